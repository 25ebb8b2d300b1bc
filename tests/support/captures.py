"""Tests of one session share their captures.

A capture's folder is named after everything that decides its contents: where two tests ask for
the same, the second gets a copy of the first's passes, and no engine starts. A test of capturing
itself switches this off (`shared=False`).
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = "RLK_TEST_CAPTURES"
"""The environment variable that names the store; without it nothing is shared."""


def run_worker(run: Callable[[Any, Any], None], job: Any, progress: Any) -> None:
    """Stands in for `supervise.run_worker`, which is passed as `run`."""
    store = os.environ.get(FOLDER)
    if not store or job.then:
        run(job, progress)
        return
    key = job.folder.name.rpartition("-")[2]
    kept = Path(store) / key
    with _locked(Path(store) / f"{key}.lock"):
        _copy(kept, job.folder, job.passes)
        missing = tuple(p for p in job.passes if not (job.folder / p / "pass.json").is_file())
        if missing:
            run(job.model_copy(update={"passes": missing}), progress)
            _copy(job.folder, kept, job.passes)


def _copy(source: Path, target: Path, passes: tuple[str, ...]) -> None:
    """Copies what the target lacks. A pass is complete once it has its pass.json."""
    # These imports are late because a warm process for a changed copy must not load the package.
    from rlk_align.trace.checksums import add_checksums
    from rlk_align.trace.schema import TRACE_FILES

    target.mkdir(parents=True, exist_ok=True)
    for name in (*TRACE_FILES, "job.json"):
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)
    for name in passes:
        if (source / name / "pass.json").is_file() and not (target / name / "pass.json").exists():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)
    there = [f"{name}/pass.json" for name in passes if (target / name / "pass.json").is_file()]
    if there:
        add_checksums(target, [*TRACE_FILES, *there])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
