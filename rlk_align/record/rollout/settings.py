"""What the environment of a job asks the recorder in a rollout engine for."""

import os
from dataclasses import dataclass

from rlk_align.errors import BadOption

FOLDER, SEQUENCES, EVERY = "RLK_RECORD", "RLK_RECORD_SEQUENCES", "RLK_RECORD_EVERY"
BUDGET, WINDOW, REQUESTS = "RLK_RECORD_BUDGET", "RLK_RECORD_WINDOW", "RLK_RECORD_REQUESTS"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for."""

    folder: str
    sequences: int
    every: int
    budget: int
    window: int = 64
    """How many requests of a server make a step."""
    requests: str = ""
    """The beginning of the ids of the requests that a server counts and may record."""

    @classmethod
    def read(cls) -> "Settings | None":
        """None without RLK_RECORD. Raises BadOption for a number that is none."""
        folder = os.environ.get(FOLDER, "")
        if not folder:
            return None
        return cls(
            folder,
            _number(SEQUENCES, 8),
            _number(EVERY, 1),
            _number(BUDGET, 8_000_000_000),
            _number(WINDOW, 64),
            os.environ.get(REQUESTS, ""),
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise BadOption(f"{name}={text}: it must be a number of at least 1")
    return int(text)
