"""Import this module before SGLang, in each process: at the top of a script, so that the processes
that SGLang starts import it too."""

import os

from rlk_align.engines.sglang.boot import prepare

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
"""The rank of this process among those that torchrun started."""
if RANKS > 1:
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = "env://"
prepare("cpu", raw=False, ranks=RANKS)
