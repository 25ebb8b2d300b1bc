"""A release: one version everywhere, and pages whose links work away from the repository."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import release_tree
import yaml

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://code.example/ours/rlk-align"


def project(folder: Path) -> dict[str, dict[str, str]]:
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]


def test_every_file_has_the_version() -> None:
    version = project(ROOT)["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == version


def test_links_and_pictures_become_addresses_of_the_tag() -> None:
    page = "[a](docs/x.md#y) ![p](i.png) [h](https://a.b) [s](#s)\n```\n[a](docs/x.md)\n```\n"
    assert release_tree.absolute(page, "kernels", "https://r", "v1") == (
        "[a](https://r/blob/v1/kernels/docs/x.md#y) ![p](https://r/raw/v1/kernels/i.png) "
        "[h](https://a.b) [s](#s)\n```\n[a](docs/x.md)\n```\n"
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in release_tree.PROJECTS:
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in ("pyproject.toml", "README.md"):
            (tmp_path / folder / name).write_bytes((ROOT / folder / name).read_bytes())
    return tmp_path


def test_the_pages_of_a_release_hold_no_relative_link(tree: Path) -> None:
    release_tree.prepare(tree, REPOSITORY, "v1")
    for folder in release_tree.PROJECTS:
        urls = project(tree / folder)["urls"]
        assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
        assert all(url.startswith(REPOSITORY) for url in urls.values())
        assert urls == project(tree)["urls"]
        page = (tree / folder / "README.md").read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)]+)\)", page)
        assert [t for t in targets if not t.startswith(("https://", "#"))] == []
        inside = [t for t in targets if t.startswith(REPOSITORY)]
        for target in inside:
            path = re.fullmatch(rf"{REPOSITORY}/(?:blob|raw)/v1/([^#]+)(?:#.*)?", target)
            assert path is not None, target
            assert (ROOT / path[1]).exists(), target
        assert inside or folder


def test_a_project_without_the_placeholder_is_refused(tree: Path) -> None:
    release_tree.prepare(tree, REPOSITORY, "v1")
    with pytest.raises(SystemExit, match="does not hold"):
        release_tree.prepare(tree, REPOSITORY, "v1")


@pytest.mark.parametrize("tag", ["v9.9.9", "0.0"])
def test_a_tag_of_another_version_is_refused(tag: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "release.sh", tag, out],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "REPOSITORY": REPOSITORY},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"release: {tag} is not the version in pyproject.toml" in done.stderr
    assert not out.exists()


def test_the_workflow_runs_the_script_and_publishes_what_it_made() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v[0-9]*"]}}  # `on` is a truth in YAML 1.1
    build, publish = [s for s in workflow["jobs"]["release"]["steps"] if "run" in s]
    assert build["run"] == 'bash scripts/release.sh "$GITHUB_REF_NAME" dist/release'
    assert publish["working-directory"] == "dist/release"
    for step in (build, publish):
        assert "${{" not in step["run"]
