"""Import this module before SGLang, in each process: at the top of a script, so that the processes
that SGLang starts import it too."""

from rlk_align.engines.sglang.boot import prepare

prepare(raw=False)
