"""`compare --modules` with real engines: undescribed families, healthy and with faults."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command import Cli, Outcome, require_engine
from safetensors.torch import load_file, save_file
from undescribed_models import IN_VLLM, SETTINGS, undescribed_model

from rlk_align.model.families import FAMILIES

PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}
PROMPTS = [[5, 17, 301, 44, 87, 120, 9, 511, 33, 700, 12, 64, 90, 210, 18], [45, 99, 3, 610, 222]]
LOST_BY_VLLM = {
    # vLLM keeps A = -exp(A_log).
    "falcon_h1": ["model.layers.0.mamba.A_log", "model.layers.1.mamba.A_log"],
    "mamba2": ["backbone.layers.0.mixer.A_log", "backbone.layers.1.mixer.A_log"],
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in PROMPTS * 2))
    return path


def compared(cli: Cli, prompts: Path, model: Path, rollout: str, train: str) -> Outcome:
    for spec in (rollout, train):
        require_engine(spec.partition(":")[0])
    done = cli(
        *("compare", "--modules", "--model", model, "--prompts", prompts),
        *("--rollout", rollout, "--train", train, "--run-dir", model.parent / "run"),
        env=PATCHES,
    )
    assert done.verdict is not None, done.out + done.err
    assert "PASS" not in done.out
    assert done.verdict["status"] != "pass"
    assert done.code == done.verdict["exit_code"]
    return done


def over(verdict: dict[str, Any]) -> set[tuple[str, str]]:
    return {(u["module"], u["side"]) for u in verdict["over_budget"]}


def assert_nothing_over(done: Outcome) -> None:
    assert done.verdict is not None
    assert (done.verdict["over_budget"], done.verdict["changed_weights"]) == ([], []), done.out
    assert done.code == 4
    assert done.verdict["controls"]["observer"] == "bitwise"
    assert done.verdict["drift"]["tokens"] == sum(len(ids) - 1 for ids in PROMPTS * 2)
    for side in ("rollout", "train"):
        judged = [u for u in done.verdict["judged"] if u["side"] == side]
        assert len(judged) > 7
        assert all(u["rms"] >= 0 and u["rows"] for u in judged)


def whole(*values: object, default: bool) -> object:
    """A case of the matrix; those outside of the default run have the marker `whole_matrix`."""
    return pytest.param(*values, marks=() if default else pytest.mark.whole_matrix)


def test_nine_families_of_these_tests_are_not_described() -> None:
    assert len(SETTINGS.keys() - FAMILIES.keys()) == 9
    assert SETTINGS.keys() & FAMILIES.keys() == {"stablelm", "falcon_h1"}


@pytest.mark.parametrize("family", [whole(f, default=f == "falcon_h1") for f in SETTINGS])
def test_two_models_of_transformers_are_never_a_pass(
    cli: Cli, prompts: Path, tmp_path: Path, family: str
) -> None:
    model = undescribed_model(tmp_path, family)
    train = "hf" if family == "mamba2" else "hf:attn=sdpa"
    done = compared(cli, prompts, model, "hf:attn=eager", train)
    assert_nothing_over(done)
    assert done.verdict is not None
    for side in ("rollout", "train"):
        assert done.verdict["weights"][side]["missing"] == []
        assert done.verdict["weights"][side]["strays"] == []


@pytest.mark.parametrize("family", [whole(f, default=f == "gpt2") for f in IN_VLLM])
def test_vllm_and_transformers_are_never_a_pass(
    cli: Cli, prompts: Path, tmp_path: Path, family: str
) -> None:
    done = compared(cli, prompts, undescribed_model(tmp_path, family), "vllm", "hf")
    assert_nothing_over(done)
    assert done.verdict is not None
    assert done.verdict["weights"]["train"]["missing"] == []
    assert done.verdict["weights"]["rollout"]["missing"] == LOST_BY_VLLM.get(family, [])
    head = [u for u in done.verdict["unjudged"] if u["side"] == "rollout" and u["kind"] == "Linear"]
    assert [u["reason"] for u in head] == ["never called as a module"]


@dataclass(frozen=True)
class Planted:
    """A fault of `module_patches` in one side, and what must be named."""

    family: str
    fault: str
    engine: str
    over: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = field(default=())

    @property
    def side(self) -> str:
        return "train" if self.engine == "hf" else "rollout"

    @property
    def id(self) -> str:
        return f"{self.family}-{self.fault}-{self.engine}"


NORM = "model.layers.1.input_layernorm"
Q, K, V = (f"model.layers.1.self_attn.{n}_proj" for n in "qkv")
PLANTED = [
    Planted("falcon_h1", "one_element", "hf", (NORM,), (f"{NORM}.weight",)),
    Planted("falcon_h1", "one_element", "vllm", (NORM,), (f"{NORM}.weight",)),
    Planted("stablelm", "one_element_of_a_product", "hf", (K,), (f"{K}.weight",)),
    Planted("falcon_h1", "larger_epsilon", "hf", (NORM,)),
    Planted("falcon_h1", "larger_epsilon", "vllm", (NORM,)),
    Planted("falcon_h1", "one_plus_weight", "hf", (NORM,)),
    Planted("falcon_h1", "one_plus_weight", "vllm", (NORM,)),
    Planted("nemotron", "weight_alone", "hf", (NORM,)),
    Planted("nemotron", "weight_alone", "vllm", (NORM,)),
    Planted("stablelm", "no_bias", "hf", (Q,), (), (f"{Q}.bias",)),
    Planted("stablelm", "no_bias", "vllm", (Q, K, V), (), (f"{Q}.bias", f"{K}.bias", f"{V}.bias")),
    Planted("phi", "no_bias", "vllm", (Q, K, V), (), tuple(f"{p}.bias" for p in (Q, K, V))),
    Planted("falcon_h1", "one_nan", "hf", (NORM,)),
    Planted("nemotron", "other_activation", "hf", ("model.layers.1.mlp.act_fn",)),
]
DEFAULT = {"falcon_h1-larger_epsilon-hf", "falcon_h1-one_element-hf"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.id, marks=() if c.id in DEFAULT else pytest.mark.whole_matrix)
        for c in PLANTED
    ],
)
def test_a_planted_fault_is_named_with_its_side(
    cli: Cli, prompts: Path, tmp_path: Path, case: Planted
) -> None:
    model = undescribed_model(tmp_path, case.family)
    patched = f"patch=module_patches:{case.fault}"
    rollout = "hf:attn=eager" if case.engine == "hf" else f"vllm:{patched}"
    done = compared(cli, prompts, model, rollout, f"hf:{patched}" if case.engine == "hf" else "hf")
    assert done.verdict is not None
    assert done.code == 1, done.out
    assert over(done.verdict) == {(name, case.side) for name in case.over}
    changed = [(c["tensor"], c["side"]) for c in done.verdict["changed_weights"]]
    assert changed == [(name, case.side) for name in case.changed]
    lost = set(done.verdict["weights"][case.side]["missing"])
    assert lost - set(LOST_BY_VLLM.get(case.family, ())) == set(case.missing)
    for name in (*case.over, *case.changed):
        assert name in done.out


@pytest.mark.whole_matrix
@pytest.mark.parametrize("tensor", [f"{K}.weight", f"{V}.bias", "model.embed_tokens.weight"])
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_one_element_of_a_tensor_that_vllm_fuses_or_packs(
    cli: Cli, prompts: Path, tmp_path: Path, tensor: str, engine: str
) -> None:
    model = undescribed_model(tmp_path, "stablelm")
    other = changed_copy(model, tensor)
    rollout = f"{engine}:model={other}"
    done = compared(cli, prompts, model, rollout, "hf")
    assert done.verdict is not None
    assert done.code == 1, done.out
    [changed] = done.verdict["changed_weights"]
    assert (changed["tensor"], changed["side"], changed["changed"]) == (tensor, "rollout", 1)
    where = tensor.rpartition(".")[0]
    # The one token whose embedding changed is not in the prompts.
    assert over(done.verdict) == (set() if "embed" in tensor else {(where, "rollout")})


def changed_copy(model: Path, tensor: str) -> Path:
    """A copy of a checkpoint with one entry of a tensor changed."""
    copy = model.with_name("changed")
    shutil.copytree(model, copy)
    for path in copy.glob("*.safetensors"):
        tensors = load_file(path)
        if tensor in tensors:
            flat = tensors[tensor].view(-1)
            flat[len(flat) // 2 + 1] += 0.5
            save_file(tensors, path, metadata={"format": "pt"})
    return copy


@pytest.mark.whole_matrix
def test_a_fault_inside_an_unknown_module_is_not_seen_and_a_head_that_is_missing_is(
    cli: Cli, prompts: Path, tmp_path: Path
) -> None:
    # vLLM 0.32 ties every head of this family, and computes its attention otherwise.
    done = compared(cli, prompts, undescribed_model(tmp_path, "lfm2"), "vllm", "hf")
    assert_nothing_over(done)
    assert done.verdict is not None
    assert done.verdict["weights"]["rollout"]["missing"] == ["lm_head.weight"]
    assert done.verdict["drift"]["mean_abs_dlogp"] > 0.1


def test_a_known_family_in_padded_batches(cli: Cli, prompts: Path) -> None:
    done = cli(
        *("compare", "--modules", "--prompts", prompts, "--rollout", "hf:attn=eager,batch=4"),
        *("--train", "hf"),
    )
    assert_nothing_over(done)
    assert done.verdict is not None
    assert done.verdict["unjudged"] == []
    assert "compare without --modules: this family is described" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--edges", "decode_vs_prefill"), "--edges: it has one pass a side"),
        (("--max-new-tokens", "4"), "--max-new-tokens: it scores the prompts"),
        (("--production",), "--production: compiled code has no modules"),
        (("--probe",), "--probe"),
        (("--replay-routing",), "--replay-routing"),
        (("--kernels", "rlk"), "--kernels rlk: the kernels know the families"),
        (("--rollout", "vllm:tp=2"), "vllm:tp=2: the shards of several ranks"),
        (("--rollout", "hf:fault=norm-eps"), "hf:fault=norm-eps: a fault is planted"),
        (("--train", "megatron"), "engine 'megatron'"),
        (("--train", "fsdp"), "engine 'fsdp'"),
        (("--train", "deepspeed"), "engine 'deepspeed'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    cli: Cli, words: tuple[str, ...], said: str
) -> None:
    for spec in (word.partition(":")[0] for word in words if not word.startswith("--")):
        if spec in ("vllm", "megatron", "deepspeed"):
            require_engine(spec)
    done = cli("compare", "--modules", *words)
    assert done.code == 2
    assert f"--modules does not support {said}" in done.err


def test_an_unknown_family_is_told_to_try_modules(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bamba"}')
    done = cli("compare", "--model", tmp_path, "--rollout", "hf", "--train", "hf")
    assert done.code == 2
    assert "`compare --modules` compares any model, module by module" in done.err


def test_a_run_of_modules_is_not_gated(cli: Cli, prompts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = cli(
        *("compare", "--modules", "--prompts", prompts, "--rollout", "hf:attn=eager"),
        *("--train", "hf", "--run-dir", run, "--output", f"markdown={tmp_path / 'said.md'}"),
    )
    assert done.code == 4
    assert json.loads((run / "verdict.json").read_text())["schema"] == "rlk-align/modules/1"
    assert "INCONCLUSIVE" in (tmp_path / "said.md").read_text().upper()
    refused = cli("gate", run)
    assert refused.code == 2
    assert "was compared by --modules" in refused.err
    assert os.listdir(run / "captures")
