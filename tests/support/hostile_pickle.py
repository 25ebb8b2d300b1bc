"""An object whose pickle calls a function when it is loaded."""

import os
from pathlib import Path


class Hostile:
    """Makes a folder when its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)
