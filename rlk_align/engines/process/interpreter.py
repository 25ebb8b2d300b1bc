"""The interpreter that an engine spec names with `python=`, and whether rlk-align can run in it."""

import importlib.metadata
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlk_align.engines.process import versions
from rlk_align.errors import BadOption, MissingDependency

DISTRIBUTION = "rlk-align"
EXTRA = "engines"
_OPTIONAL = ("typer", "rich", "packaging", "jinja2", "markupsafe", "tomli-w", "rlk-kernels")
"""Requirements that a worker does not need, or only if a spec asks for the kernels."""
_TIMEOUT = 60.0
"""Seconds within which an interpreter must answer."""


def requirements() -> list[Requirement]:
    """The requirements of a worker, from rlk-align's metadata."""
    declared = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    wanted = (r for r in declared if r.name not in _OPTIONAL)
    return [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": EXTRA})]


def examine(python: str, module: str, instead: Sequence[str] = ()) -> dict[str, str]:
    """The versions in `python` of rlk-align's requirements and of the distributions that contain
    the engine's `module`. `instead`: requirements of the engine's worker in the place of those of
    the same packages.

    Raises BadOption if `python` cannot be started or is not a Python, MissingDependency if it or a
    requirement is too old, or if a requirement is missing.
    """
    replaced = {r.name: r for r in map(Requirement, instead)}
    needed = [replaced.get(r.name, r) for r in requirements()]
    asked = {"distributions": [r.name for r in needed], "modules": [module] if module else []}
    report = _ask(python, json.dumps(asked))
    wanted = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"]
    if not SpecifierSet(wanted).contains(report["python"], prereleases=True):
        raise MissingDependency(
            f"python={python} is Python {report['python']}; rlk-align needs {wanted}",
            "create an environment for the engine with such a Python",
        )
    installed = report["versions"]
    wrong = [
        f"{_bare(r)} (has {installed[r.name]})" if installed[r.name] else _bare(r)
        for r in needed
        if not installed[r.name] or not r.specifier.contains(installed[r.name], prereleases=True)
    ]
    if wrong:
        install = " ".join(
            f"'{_bare(r)}'" for r in needed if any(w.startswith(r.name) for w in wrong)
        )
        raise MissingDependency(
            f"python={python} lacks packages that rlk-align needs: {', '.join(wrong)}",
            f"{python} -m pip install {install}",
        )
    return {name: version for name, version in installed.items() if version}


def _bare(requirement: Requirement) -> str:
    """The requirement without the marker of the extra that includes it."""
    return f"{requirement.name}{requirement.specifier}"


def _ask(python: str, question: str) -> dict:
    command = [python, str(Path(versions.__file__).resolve()), question]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
        )
    except OSError as error:
        raise BadOption(f"python={python} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BadOption(f"python={python} is not a Python: no answer in {_TIMEOUT:g} s") from error
    try:
        report = json.loads(done.stdout.strip().rpartition("\n")[2])
        if done.returncode == 0 and isinstance(report, dict) and "python" in report:
            return report
    except ValueError:
        pass
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
    raise BadOption(
        f"python={python} is not a Python: when asked for its versions, it ended with code "
        f"{done.returncode} and printed {said[:200]!r}",
        "give the path of a Python interpreter, e.g. python=ENV/bin/python",
    )


def package_path(folder: Path, package: Path) -> Path:
    """A folder below `folder` that contains this rlk-align and nothing else: packages installed
    beside it must not replace those of the other interpreter."""
    alone = folder / "package"
    alone.mkdir(exist_ok=True)
    link = alone / package.name
    link.unlink(missing_ok=True)
    link.symlink_to(package, target_is_directory=True)
    return alone
