"""SGLang's server, as `python -m sglang.launch_server` starts it, with what a CPU lacks."""

import sglang_stand_ins  # noqa: F401  isort: skip

import runpy

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
