"""`python -m rlk_kernels.integrations.verl SETTINGS`, with the settings of a run of verl's
`main_ppo`: lists what the kernels refuse of them. Nothing is started."""

import sys
from pathlib import Path

import hydra
import verl.trainer

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.verl import check


def main(overrides: list[str]) -> int:
    """0 where nothing is refused, 2 with the list on stderr."""
    with hydra.initialize_config_dir(
        str(Path(verl.trainer.__file__).parent / "config"), version_base=None
    ):
        config = hydra.compose("ppo_trainer", overrides)
    try:
        check(config)
    except NotSupported as refused:
        print(refused, file=sys.stderr)
        return 2
    print("rlk_kernels in verl: nothing is refused")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
