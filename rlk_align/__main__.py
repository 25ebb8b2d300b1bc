"""`python -m rlk_align`."""

from rlk_align.cli.main import main

if __name__ == "__main__":
    main()
