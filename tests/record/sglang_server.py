"""SGLang's server, as `python -m sglang.launch_server` starts it, with what a CPU lacks."""

import sglang_stand_ins  # noqa: F401  isort: skip

import runpy
import sys

from transformers.utils import import_utils

from rlk_align.engines.common.stand_ins import stand_in

# transformers caches its answer, and must not find the stand-in.
import_utils.is_soundfile_available()
if stand_in({"soundfile": ()}):
    # The server asks for it as it is imported.
    sys.modules["soundfile"].available_formats = dict

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
