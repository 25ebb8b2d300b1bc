"""Prepares a copy of the repository for PyPI: `release_tree.py TREE REPOSITORY TAG`.

The owner in `[project.urls]` becomes the owner of REPOSITORY, an https address, and the relative
links of both README files become addresses of the files at TAG, because PyPI shows the README
without the repository.
"""

import posixpath
import re
import sys
from pathlib import Path

from docs_site import FENCE, LINK

PLACEHOLDER = "https://github.com/OWNER/rlk-align"
PROJECTS = ("", "kernels")
"""The folders that hold a project file and a README."""


def absolute(page: str, folder: str, repository: str, tag: str) -> str:
    """A page of `folder`, whose relative links and pictures become addresses in the repository."""

    def link(match: re.Match[str]) -> str:
        image, words, target, anchor = match.groups(default="")
        if re.match(r"[a-z]+:", target):
            return match[0]
        kind = "raw" if image else "blob"
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"{image}[{words}]({repository}/{kind}/{tag}/{path}{anchor})"

    parts = FENCE.split(page)
    return "".join(part if n % 2 else LINK.sub(link, part) for n, part in enumerate(parts))


def prepare(tree: Path, repository: str, tag: str) -> None:
    """Rewrites the project files and the README files below `tree`."""
    for folder in PROJECTS:
        project, readme = tree / folder / "pyproject.toml", tree / folder / "README.md"
        text = project.read_text(encoding="utf-8")
        if PLACEHOLDER not in text:
            raise SystemExit(f"{project}: [project.urls] does not hold {PLACEHOLDER}")
        project.write_text(text.replace(PLACEHOLDER, repository), encoding="utf-8")
        page = absolute(readme.read_text(encoding="utf-8"), folder, repository, tag)
        readme.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), sys.argv[2].rstrip("/"), sys.argv[3])
