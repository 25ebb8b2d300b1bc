"""Earlier checkpoints of the same training run, which a stale parameter may come from."""

import re
from pathlib import Path

_STEP = re.compile(r"(.*?)(\d+)")
_OWN_NAME = re.compile(r"(?:.*(?:[-_.]|step|iter|ckpt|checkpoint))?\d+")
"""A checkpoint's own name that says its step, e.g. `checkpoint-300`, `step7` or `300`."""
_FOLDER_ABOVE = re.compile(r".*(?:step|iter|ckpt|checkpoint)[-_.]?\d+")
"""The name of a folder above it that does; any other number there is no step: `user42`."""
NEAREST = 8
"""How many siblings are looked at, the latest first."""


def step_of(path: str) -> str:
    """What a checkpoint is called: its step where its path has one, else its last part."""
    numbered = _numbered(Path(path))
    return f"step {numbered[1]}" if numbered else Path(path).name


def siblings(path: str, *excluded: str) -> list[str]:
    """The checkpoints of earlier steps beside the one at `path`, the latest first.

    `checkpoint-300`, `global_step_300/actor` and `iter_0000300` have siblings that differ in the
    number alone.
    """
    place = Path(path).expanduser().absolute()
    numbered = _numbered(place)
    if numbered is None:
        return []
    folder, step = numbered
    prefix = _prefix(folder.name)
    inside = place.relative_to(folder)
    if not folder.parent.is_dir():
        return []
    others = {}
    for sibling in folder.parent.iterdir():
        match = _STEP.fullmatch(sibling.name)
        if match and match[1] == prefix and int(match[2]) < step and (sibling / inside).exists():
            others[int(match[2])] = sibling / inside
    skipped = {Path(p).expanduser().resolve() for p in excluded}
    paths = [others[s] for s in sorted(others, reverse=True)]
    return [str(p) for p in paths if p.resolve() not in skipped][:NEAREST]


def _numbered(path: Path) -> tuple[Path, int] | None:
    """(the innermost folder whose name says a step, that step)."""
    for place in (path, *path.parents):
        wanted = _OWN_NAME if place is path else _FOLDER_ABOVE
        if wanted.fullmatch(place.name):
            match = _STEP.fullmatch(place.name)
            assert match, place
            return place, int(match[2])
    return None


def _prefix(name: str) -> str:
    match = _STEP.fullmatch(name)
    assert match, name
    return match[1]
