"""How a checkpoint is found, and the fingerprint of its files."""

from pathlib import Path

import pytest

from rlk_align.errors import ModelError
from rlk_align.model import checkpoint
from rlk_align.model.checkpoint import fingerprint_files, resolve_model
from rlk_align.trace.run import fingerprint


def test_a_model_folder_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == tmp_path / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "./a/b", "/no/such", "a b/c"])
def test_what_is_neither_folder_nor_hub_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError, match=name):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        resolve_model("org/name")


def test_an_unknown_home_is_no_model() -> None:
    with pytest.raises(ModelError):
        resolve_model("~nobody-of-that-name/model")


def test_a_fingerprint_does_not_change_between_versions() -> None:
    # Pinned, because captures are found by their fingerprints.
    parts = ("0.1.0", "hf:attn=eager", ["torch 2"], None, [32, 0], Path("x"))
    assert fingerprint(*parts) == fingerprint(*parts)
    assert fingerprint("a", 1, None) == "10c084dbba9e8b5e"
    assert fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
    different = {fingerprint(*p) for p in [("a", "b"), ("ab",), ("b", "a"), ("a", None), ()]}
    assert len(different) == 5


def test_a_models_fingerprint_sees_each_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    first = fingerprint_files(tmp_path)
    (tmp_path / "README.md").write_text("not read by an engine")
    assert fingerprint_files(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"abd")
    second = fingerprint_files(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    third = fingerprint_files(tmp_path)
    assert len({first, second, third}) == 3


def test_a_models_files_are_read_once_while_they_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"abc")
    fresh = fingerprint_files(tmp_path)
    monkeypatch.setattr(checkpoint, "SETTLED", -60.0)
    assert fingerprint_files(tmp_path) == fresh
    opened: list[Path] = []
    original = Path.open

    def noting(path: Path, *args: str, **more: str) -> object:
        opened.append(path)
        return original(path, *args, **more)

    monkeypatch.setattr(Path, "open", noting)
    assert fingerprint_files(tmp_path) == fresh
    assert opened == []
    weights.write_bytes(b"abcd")
    opened.clear()
    assert fingerprint_files(tmp_path) != fresh
    assert [p.name for p in opened] == ["model.safetensors"]
