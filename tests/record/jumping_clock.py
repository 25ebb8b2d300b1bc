"""A plugin of vLLM, which a trainer calls too, that makes the wall clock jump: an hour back, a day
ahead, and so on."""

import itertools
import time

_clock, _jumps = time.time, itertools.cycle((0, -3600, 86400, -600_000))


def plugin() -> None:
    time.time = lambda: _clock() + next(_jumps)
