"""The earlier checkpoints of a training run, whose values a stale parameter may have."""

import re
from pathlib import Path

_STEP = re.compile(r"(.*?)(\d+)")
_OWN_NAME = re.compile(r"(?:.*(?:[-_.]|step|iter|ckpt|checkpoint))?\d+")
"""The names of checkpoints that contain a step, e.g. `checkpoint-300`, `step7` or `300`."""
_FOLDER_ABOVE = re.compile(r".*(?:step|iter|ckpt|checkpoint)[-_.]?\d+")
"""The names of parent folders that contain a step; other numbers, e.g. `user42`, are not steps."""
MAX_SIBLINGS = 8
"""The largest number of siblings that are compared, the latest first."""


def step_of(path: str) -> str:
    """The name of a checkpoint: its step if its path contains one, otherwise its last part."""
    numbered = _numbered(Path(path))
    return f"step {numbered[1]}" if numbered else Path(path).name


def siblings(path: str, *excluded: str) -> list[str]:
    """The checkpoints of earlier steps beside the one at `path`, the latest first.

    Siblings, e.g. of `checkpoint-300`, `global_step_300/actor` or `iter_0000300`, differ only in
    the number.
    """
    checkpoint = Path(path).expanduser().absolute()
    numbered = _numbered(checkpoint)
    if numbered is None:
        return []
    folder, step = numbered
    prefix, _ = _split(folder.name)
    inside = checkpoint.relative_to(folder)
    if not folder.parent.is_dir():
        return []
    others = {}
    for sibling in folder.parent.iterdir():
        match = _STEP.fullmatch(sibling.name)
        if match and match[1] == prefix and int(match[2]) < step and (sibling / inside).exists():
            others[int(match[2])] = sibling / inside
    skipped = {Path(p).expanduser().resolve() for p in excluded}
    paths = [others[s] for s in sorted(others, reverse=True)]
    return [str(p) for p in paths if p.resolve() not in skipped][:MAX_SIBLINGS]


def _numbered(path: Path) -> tuple[Path, int] | None:
    """(the innermost folder whose name contains a step, that step)."""
    for folder in (path, *path.parents):
        pattern = _OWN_NAME if folder is path else _FOLDER_ABOVE
        if pattern.fullmatch(folder.name):
            return folder, int(_split(folder.name)[1])
    return None


def _split(name: str) -> tuple[str, str]:
    """The prefix and the number of a name that contains a step."""
    match = _STEP.fullmatch(name)
    assert match, name
    return match[1], match[2]
