"""The models and options that an engine refuses, by config.json and the spec alone."""

import ast
import importlib.util
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import require_engine

from rlk_align.data import data_path
from rlk_align.engines.common.tensor_parallel import check_shared
from rlk_align.engines.info import EngineInfo
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm import limits
from rlk_align.engines.vllm.limits import CPU_EXPERT_STEP, CPU_HEAD_SIZES
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import read_shape

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
HYBRID = Path(__file__).parents[2] / "fixtures/hybrid"
WINDOW: dict[str, Any] = {"sliding_window": 6, "use_sliding_window": True, "layer_types": None}
DENSE = data_path("model")


def check(
    text: str, model: Path = DENSE, sizes: dict[str, Any] | None = None, **changes: Any
) -> None:
    """`sizes`: changes of the model's shape; `changes`: of its config."""
    spec, shape = EngineSpec.parse(text), replace(read_shape(model), **(sizes or {}))
    spec.info.check(spec.option, read_config(model) | changes, shape)


def test_an_engine_refuses_nothing_unless_it_says_so() -> None:
    EngineInfo("").check(lambda name: None, {}, read_shape(DENSE))


@pytest.mark.parametrize("engine", ["hf", "fsdp:dp=3", "megatron", "megatron:tp=8,sp=1", "vllm"])
def test_the_embedded_model_is_taken(engine: str) -> None:
    check(engine)


@pytest.mark.parametrize(
    ("options", "changes", "word"),
    [
        ("device=cpu", {}, "device=cpu"),
        ("padding=left", {}, "padding=left"),
        ("tp=2", WINDOW, "sliding window"),
    ],
)
def test_transformer_engine_does_not_take(
    monkeypatch: pytest.MonkeyPatch, options: str, changes: dict[str, Any], word: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check("megatron:spec=te")
    check(f"megatron:{options}", **changes)
    with pytest.raises(BadOption, match=word) as error:
        check(f"megatron:spec=te,{options}", **changes)
    assert error.value.fix == "spec=local does"


@pytest.mark.parametrize(
    ("options", "sparse", "says", "fix"),
    [
        ("pp=3", False, "4 layers", "pp=1|2|4"),
        ("cp=3,kernels=rlk", False, "8 heads and 4 key-value heads", "cp=1|2|4|8 with kernels=rlk"),
        ("tp=2,cp=8,kernels=rlk", False, "2 key-value heads of tp=2", "cp=1|2|4 with kernels=rlk"),
        ("ep=2", False, "no experts", "leave ep out"),
        ("ep=3", True, "8 experts", "ep=1|2|4|8"),
        (
            "pp=2,fault=norm-eps@rank1",
            False,
            "stage 0 of pp=2 computes layers.0.attn_norm, and rank 1 belongs to stage 1",
            "choose from rank0, or leave @rank out",
        ),
        (
            "tp=2,pp=2,fault=attn-scale@0.1@rank1",
            False,
            "stage 1 of pp=2 computes layers.3.attn, and rank 1 belongs to stage 0",
            "choose from rank2, rank3,",
        ),
        ("ep=2,pp=2,fault=logprob-zero@rank0", True, "stage 1 of pp=2 computes logprob", "rank2"),
    ],
)
def test_what_ranks_of_megatron_cannot_share(
    options: str, sparse: bool, says: str, fix: str
) -> None:
    with pytest.raises(BadOption, match=re.escape(says)) as error:
        check(f"megatron:{options}", SPARSE if sparse else DENSE)
    assert fix in error.value.fix


@pytest.mark.parametrize(
    "options",
    [
        *("cp=3", "cp=8,kernels=rlk", "cp=3,kernels=rlk,except=attn", "tp=2,cp=2,pp=4"),
        *("pp=2,fault=norm-eps@rank0", "pp=2,fault=norm-eps", "tp=2,pp=2,fault=attn-scale@rank3"),
    ],
)
def test_ranks_of_megatron_share_what_they_can(options: str) -> None:
    check(f"megatron:{options}")


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        YARN | {"attention_factor": 0.1 * math.log(4.0) + 1.0},
        YARN | {"factor": 0.5, "attention_factor": 1.0},
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
        YARN | {"mscale": 1.0, "attention_factor": 0.1 * math.log(4.0) + 1.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ],
)
def test_megatron_takes_what_it_computes_itself(rope: dict[str, Any]) -> None:
    check("megatron", rope_parameters=rope)
    if "attention_factor" in rope:
        with pytest.raises(ModelError, match=r"attention_factor=1\.2"):
            check("megatron", rope_parameters=rope | {"attention_factor": 1.2})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        YARN | {"original_max_position_embeddings": 256},
        YARN | {"original_max_position_embeddings": 1024},
        YARN,
    ],
)
def test_vllm_takes_a_rope_whose_table_is_long_enough(rope: dict[str, Any]) -> None:
    check("vllm", rope_parameters=rope)
    check("vllm", rope_scaling=rope, rope_theta=1e4)


@pytest.mark.parametrize("original", [1, 255])
def test_vllm_would_read_past_the_end_of_a_shorter_one(original: int) -> None:
    rope = YARN | {"original_max_position_embeddings": original}
    with pytest.raises(ModelError, match=f"has {4 * original} positions"):
        check("vllm", rope_parameters=rope)
    check("vllm:kernels=rlk", rope_parameters=rope)


def test_a_malformed_original_context_is_named() -> None:
    with pytest.raises(ModelError, match="original_max_position_embeddings is '4k'"):
        check("vllm", rope_parameters=YARN | {"original_max_position_embeddings": "4k"})


@pytest.mark.parametrize(
    ("sizes", "tp", "fused_qkv", "kernels", "word"),
    [
        ({}, 3, False, False, "8 heads"),
        ({"heads": 12, "kv_heads": 4}, 6, False, False, "4 key-value heads"),
        ({"intermediate": 513}, 2, False, False, "513 MLP features"),
        ({"heads": 6, "kv_heads": 1, "intermediate": 513}, 3, True, False, "256 rows of q, k and"),
        ({"hidden": 129}, 2, False, True, "129 hidden features"),
    ],
)
def test_what_ranks_cannot_share(
    sizes: dict[str, int], tp: int, fused_qkv: bool, kernels: bool, word: str
) -> None:
    shape = replace(read_shape(DENSE), **sizes)
    check_shared("it", shape, 1, fused_qkv, kernels)
    with pytest.raises(BadOption, match=word) as error:
        check_shared("it", shape, tp, fused_qkv, kernels)
    assert "this model takes tp=1" in error.value.fix
    if fused_qkv or kernels:
        check_shared("it", shape, tp, fused_qkv=False, kernels=False)


def test_a_window_that_is_not_used_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check("megatron:spec=te", **WINDOW | {"use_sliding_window": False})
    check("megatron:spec=te", **WINDOW | {"layer_types": ["full_attention"] * 4})


def test_of_another_interpreter_only_the_model_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check("megatron:spec=te,python=/usr/bin/python3")
    with pytest.raises(ModelError, match="hidden_act=gelu_new"):
        check("megatron:python=/usr/bin/python3", hidden_act="gelu_new")
    check("vllm:python=/usr/bin/python3", sizes={"head_dim": 24})


def test_activations_are_those_that_the_model_is_built_with() -> None:
    require_engine("megatron")
    from rlk_align.engines.megatron import model
    from rlk_align.engines.megatron.limits import ACTIVATIONS

    assert tuple(model.ACTIVATIONS) == ACTIVATIONS


@pytest.mark.parametrize(("k", "normed"), [(1, True), (1, False), (2, True)])
def test_a_softmax_over_a_single_expert_is_refused_by_megatron(k: int, normed: bool) -> None:
    refused = pytest.raises(ModelError, match="num_experts_per_tok=1 with weights that are divided")
    with refused if k == 1 and normed else nullcontext():
        check("megatron", SPARSE, {"top_k": k, "norm_topk": normed})


@pytest.mark.parametrize(("hidden", "kernels"), [(128, False), (136, False), (136, True)])
def test_vllm_takes_experts_on_a_cpu_in_steps_of_their_hidden_size(
    hidden: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_on_cpu", lambda option: True)
    engine, sizes = "vllm:kernels=rlk" if kernels else "vllm", {"hidden": hidden}
    refused = pytest.raises(ModelError, match="hidden size 136: its kernels take multiples of 32")
    with refused if hidden == 136 and not kernels else nullcontext():
        check(engine, SPARSE, sizes | {"expert_intermediate": 36})
    check(engine, SPARSE, sizes | {"experts": 0, "sparse_layers": ()})


@pytest.mark.parametrize(
    ("options", "says", "fix"),
    [
        ("dtype=float32", "dtype=float32", "add kernels=rlk, or compare with --rollout hf"),
        ("dtype=float16", "dtype=float16", "compare with --rollout hf"),
        ("dtype=float16,kernels=rlk", "dtype=float16", "compare with --rollout hf"),
    ],
)
def test_vllm_computes_gated_delta_nets_in_float32_with_the_kernels_alone(
    monkeypatch: pytest.MonkeyPatch, options: str, says: str, fix: str
) -> None:
    monkeypatch.setattr(limits, "_on_cpu", lambda option: True)
    for taken in ("vllm", "vllm:kernels=rlk", "vllm:dtype=float32,kernels=rlk"):
        check(taken, HYBRID)
    with pytest.raises(ModelError, match=says) as refused:
        check(f"vllm:{options}", HYBRID)
    assert refused.value.fix == fix


def test_vllm_takes_heads_of_v_as_wide_as_those_of_k_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "_on_cpu", lambda option: True)
    check("vllm:kernels=rlk", HYBRID, {"delta_width": 128})
    said = "linear_key_head_dim=64 and linear_value_head_dim=128"
    with pytest.raises(ModelError, match=said) as refused:
        check("vllm", HYBRID, {"delta_width": 128})
    assert refused.value.fix == "add kernels=rlk, or compare with --rollout hf"


def test_vllm_takes_a_hybrid_without_the_experts_of_its_family_with_the_kernels_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "_on_cpu", lambda option: True)
    dense = {"model_type": "qwen3_next"}
    check("vllm:kernels=rlk", HYBRID, dense)
    check("vllm", HYBRID, dense | {"experts": 8, "sparse_layers": (1,)})
    with pytest.raises(ModelError, match="a qwen3_next without sparse layers") as refused:
        check("vllm", HYBRID, dense)
    assert refused.value.fix == "add kernels=rlk, or compare with --rollout hf"


def test_vllms_ranks_share_heads_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_on_cpu", lambda option: True)
    for kernels in ("rlk", "off"):
        check(f"vllm:tp=2,kernels={kernels}", HYBRID)
    said = "1 heads of keys of a gated delta net cannot be divided among 2 ranks"
    with pytest.raises(BadOption, match=said):
        check("vllm:tp=2,kernels=rlk", HYBRID, {"delta_key_heads": 1})


def test_on_a_gpu_vllm_computes_gated_delta_nets_with_the_kernels_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "_on_cpu", lambda option: False)
    check("vllm:kernels=rlk", HYBRID)
    with pytest.raises(ModelError, match="on a GPU does not support its own gated delta nets") as r:
        check("vllm", HYBRID)
    assert r.value.fix is not None
    assert r.value.fix.startswith("add kernels=rlk")


def source_of_vllm(*path: str) -> ast.Module:
    require_engine("vllm")
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent.joinpath(*path)
    return ast.parse(file.read_text(encoding="utf-8"))


def test_the_step_is_that_of_vllms_kernels_for_experts_on_cpus() -> None:
    tree = source_of_vllm("model_executor", "layers", "fused_moe", "experts", "cpu_moe.py")
    [portable] = [n for n in tree.body if getattr(n, "name", "") == "CPUUnquantizedExperts"]
    [step] = [
        ast.literal_eval(node.value)
        for node in ast.walk(portable)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "output_alignment"
    ]
    assert step == CPU_EXPERT_STEP


def test_head_sizes_are_those_of_vllms_attention_on_cpus() -> None:
    tree = source_of_vllm("v1", "attention", "backends", "cpu_attn.py")
    returned = [
        ast.literal_eval(node.value)
        for function in ast.walk(tree)
        if getattr(function, "name", "") == "get_supported_head_sizes"
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]
    assert returned == [list(CPU_HEAD_SIZES)]
