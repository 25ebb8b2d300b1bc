"""Bundles in RL-Kernel's portable format, written after its published code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Cli
from hostile_pickle import Hostile
from imports import beyond, imported, rejected, trace_of
from rl_kernel_files import Capture, prepare

from rlk_align.data import data_path
from rlk_align.trace.writer import one_thread

IDS = [5, 40, 300, 7, 906, 732, 939, 17, 60, 61, 62, 63]
POSITIONS = list(range(2, len(IDS)))
LAYER = "model.layers.1"
SITES = {
    # By the module of the checkpoint: id -> module, stage, width.
    "embedding": ("model.embed_tokens", "output", 192),
    "before-attention": (f"{LAYER}.input_layernorm", "output", 192),
    "attention": (f"{LAYER}.self_attn.o_proj", "input", 256),
    # By the name of the site, with a stage of the application's own.
    "layers.1.o_proj": (f"{LAYER}.self_attn.o_proj", "after-projection", 192),
    "layers.1.up_proj": (f"{LAYER}.mlp.up_proj", "after-projection", 512),
    "layers.1.mlp_norm": (f"{LAYER}.post_attention_layernorm", "normed", 192),
    "router-entropy": ("router", "somewhere", 1),
}
IDENTITY = {
    "weights": "v7",
    "tokens": IDS,
    "positions": "0..11",
    "mask": "causal",
    "sampling": "t=1",
}
Edit = Callable[[str, torch.Tensor], torch.Tensor]
"""(boundary, rows `[N, F]`) -> the rows that a side has."""


def unchanged(_boundary: str, rows: torch.Tensor) -> torch.Tensor:
    return rows


def boundaries() -> list[dict[str, Any]]:
    return [
        {"id": name, "module": module, "stage": stage, "positions": POSITIONS, "width": width}
        for name, (module, stage, width) in SITES.items()
    ]


@pytest.fixture(scope="module")
def values() -> dict[str, torch.Tensor]:
    """Boundary -> its rows `[len(IDS), F]` in a forward of the embedded model."""
    from transformers import AutoModelForCausalLM

    found: dict[str, torch.Tensor] = {}
    with one_thread():
        model = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype="bfloat16").eval()
        for name, (module, stage, _) in SITES.items():
            if module != "router":

                def hook(
                    _m: Any, args: Any, out: Any, name: str = name, stage: str = stage
                ) -> None:
                    found[name] = (args[0] if stage == "input" else out)[0].clone()

                model.get_submodule(module).register_forward_hook(hook)
        with torch.no_grad():
            model(torch.tensor([IDS]), use_cache=False)
    return found | {"router-entropy": torch.ones(len(IDS), 1)}


def write_side(
    folder: Path, side: str, values: dict[str, torch.Tensor], edit: Edit = unchanged, ranks: int = 1
) -> None:
    """Each rank writes its part of each boundary's features."""
    for rank in range(ranks):
        capture = Capture(folder, side, IDENTITY, rank)
        for name, rows in values.items():
            whole = edit(name, rows)[POSITIONS]
            width = whole.shape[1] if rows.shape[1] == 1 else whole.shape[1] // ranks
            at = 0 if rows.shape[1] == 1 else rank * width
            part = whole[:, at : at + width].clone()
            capture.record(name, part, positions=POSITIONS, offset=at, contracts={"sum": "float32"})


@pytest.fixture
def bundle(tmp_path: Path, values: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "bundle"
    prepare(folder, boundaries())
    write_side(folder, "rollout", values)
    return folder


def both(cli: Cli, bundle: Path, tmp_path: Path) -> Any:
    """Imports both sides and compares them."""
    for side in ("rollout", "train"):
        done = imported(cli, "rl-kernel", bundle, tmp_path / side, side)
        assert done.code == 0, done.err
        assert "sites    6 of 72" in done.out
    return cli("compare", tmp_path / "rollout", tmp_path / "train", "--edges", "prefill_vs_train")


def test_ranks_are_joined_and_sides_compared(
    cli: Cli, bundle: Path, tmp_path: Path, values: dict[str, torch.Tensor]
) -> None:
    write_side(bundle, "training", values, ranks=2)
    done = both(cli, bundle, tmp_path)
    verdict = done.verdict
    assert verdict["divergence"]["first_bitwise"] is None
    assert verdict["coverage"]["paired"] == 6 * len(POSITIONS)
    trace = trace_of(tmp_path / "train")
    [sample] = trace.tokens.samples
    assert list(sample.ids) == IDS
    rows = trace.read_pass("prefill").rows("layers.1.attn")
    assert rows is not None
    assert sorted(rows.position.tolist()) == POSITIONS
    assert "of the file" not in done.err


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_a_planted_fault_is_named_on_its_side(
    cli: Cli, tmp_path: Path, values: dict[str, torch.Tensor], side: str
) -> None:
    """The projection's input is recorded too, so float64 says which side is off."""

    def scaled(boundary: str, rows: torch.Tensor) -> torch.Tensor:
        return rows * 1.03125 if boundary == "layers.1.up_proj" else rows

    folder = tmp_path / "bundle"
    prepare(folder, boundaries())
    for each in ("rollout", "training"):
        write_side(folder, each, values, scaled if each == side else unchanged)
    done = both(cli, folder, tmp_path)
    assert done.first == "layers.1.up_proj"
    expected = "train" if side == "training" else side
    assert beyond(done) == {("layers.1.up_proj", expected)}


def test_another_identity_is_an_attribute_that_differs(
    cli: Cli, bundle: Path, tmp_path: Path, values: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(IDENTITY, "weights", "v6")
    write_side(bundle, "training", values)
    done = both(cli, bundle, tmp_path)
    [mismatch] = done.verdict["precheck"]["mismatches"]
    assert mismatch["name"] == "identity.weights"
    assert (mismatch["rollout"], mismatch["train"]) == ("'v7'", "'v6'")


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "capture-manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def first(folder: Path) -> Path:
    return folder / "captures/rollout-rank0-call0.pt"


def change_capture(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = torch.load(first(folder), weights_only=True)
    change(record)
    torch.save(record, first(folder))


def without_half(folder: Path) -> None:
    def half(record: dict[str, Any]) -> None:
        record["tensors"]["value"] = record["tensors"]["value"][:, :96].clone()

    change_capture(folder, half)


def another_replica(folder: Path) -> None:
    record = torch.load(first(folder), weights_only=True)
    record["tensors"]["value"][0, 0] += 1
    torch.save(record, folder / "captures/rollout-rank1-call0.pt")


def other_identities(folder: Path) -> None:
    change_capture(folder, lambda r: r["identity"].update(weights="v8"))


def hashed_tokens(folder: Path) -> None:
    for path in (folder / "captures").glob("*.pt"):
        record = torch.load(path, weights_only=True)
        record["identity"]["tokens"] = "sha256:ab"
        torch.save(record, path)


def missing_side(folder: Path) -> None:
    for path in (folder / "captures").glob("rollout*.pt"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: change_manifest(f, schema_version="rlkernel.capture.v2"), "has version"),
        (lambda f: change_manifest(f, boundaries=[]), "lists no boundaries"),
        (lambda f: (f / "capture-manifest.json").unlink(), "cannot be read"),
        (lambda f: change_capture(f, lambda r: r.update(schema_version="v0")), "has version 'v0'"),
        (lambda f: change_capture(f, lambda r: r.pop("identity")), "lacks its rows"),
        (lambda f: change_capture(f, lambda r: r["tensors"].clear()), "lacks its rows"),
        (lambda f: change_capture(f, lambda r: r.update(boundary="x")), "does not list"),
        (lambda f: first(f).write_bytes(first(f).read_bytes()[:500]), "was cut off"),
        (lambda f: torch.save({"x": Hostile(f / "owned")}, first(f)), "objects other than tensors"),
        (without_half, "96 of 192 features"),
        (another_replica, "with other bits"),
        (other_identities, "has another identity"),
        (hashed_tokens, "does not list its tokens"),
        (missing_side, "has no capture of the rollout side"),
    ],
)
def test_what_cannot_be_read_is_named(
    cli: Cli, bundle: Path, tmp_path: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    spoil(bundle)
    done = imported(cli, "rl-kernel", bundle, tmp_path / "out", "rollout")
    assert said in rejected(done)
    assert not (bundle / "owned").exists()
    assert not list((tmp_path / "out").rglob("recording.json"))


def test_an_incomplete_capture_is_a_note(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    (bundle / "captures/rollout-rank0-call99.lock").touch()
    done = imported(cli, "rl-kernel", bundle, tmp_path / "out", "rollout")
    assert "captures that were not complete: rollout-rank0-call99" in done.out


def test_nothing_of_the_model(cli: Cli, tmp_path: Path, values: dict[str, torch.Tensor]) -> None:
    folder = tmp_path / "bundle"
    prepare(folder, boundaries())
    write_side(folder, "rollout", {"router-entropy": values["router-entropy"]})
    done = imported(cli, "rl-kernel", folder, tmp_path / "out", "rollout")
    assert "no tensor of RL-Kernel is one of this model's: they have router-entropy" in rejected(
        done
    )
