"""What the kernels refuse by a VllmConfig, also where no tool has looked at config.json before."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rlk_kernels import sources
from rlk_kernels.integrations import vllm
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import ARCHITECTURES
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.vllm import config, registry

PARALLEL = {
    "pipeline_parallel_size": "pipeline parallelism",
    "prefill_context_parallel_size": "context parallelism",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def vllm_config(
    rope: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **model: Any
) -> SimpleNamespace:
    """What is asked of it, as vLLM 0.32 has it for a Llama; `text`: of config.json."""
    usual = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}
    usual_model = {
        "logprobs_mode": "raw_logprobs", "quantization": None, "dtype": torch.bfloat16,
        "architecture": "LlamaForCausalLM", "runner_type": "generate",
    }  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **dict.fromkeys(("tensor_parallel_size", *PARALLEL), 1), enable_expert_parallel=False
        ),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**{"rope_parameters": rope} | usual | (text or {})),
            **usual_model | model,
        ),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        lora_config=None,
    )


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, YARN])
def test_what_is_served_passes(rope: dict[str, Any] | None) -> None:
    config._check(vllm_config(rope))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_follows_the_batch_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked = vllm_config({"rope_type": kind, "factor": 4.0})
    with pytest.raises(NotSupported, match=f"rope_type={kind} is not supported: its frequencies"):
        config._check(asked)
    monkeypatch.setattr(config, "_excluded", ["q_rope"])
    config._check(asked)


def of(family: str, quantization: str | None = None, **text: Any) -> SimpleNamespace:
    text = {"model_type": family} | text
    return vllm_config(text=text, architecture=ARCHITECTURES[family], quantization=quantization)


def with_ranks(asked: SimpleNamespace, ranks: int) -> SimpleNamespace:
    asked.parallel_config.tensor_parallel_size = ranks
    return asked


FULL = ["full_attention", "full_attention"]
MIXED = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
REFUSED = {
    "Phi3ForCausalLM of model_type=llama": vllm_config(architecture="Phi3ForCausalLM"),
    "LlamaForCausalLM of model_type=phi3": vllm_config(text={"model_type": "phi3"}),
    "attention_bias of model_type=phi3": of("phi3", attention_bias=True),
    "rotary_pct of model_type=phi3": of("phi3", rotary_pct=0.5),
    "a sliding window in some layers, which": of("phi3", **MIXED),
    "use_bias of ERNIE": of("ernie4_5", use_bias=True),
    "sliding_window of model_type=ernie4_5": of("ernie4_5", sliding_window=8),
    "GraniteForCausalLM of model_type=graniteswa": of("granite", model_type="graniteswa"),
    "logit_scale of model_type=granite": of("granite", logit_scale=0.5),
    "layer_rope_theta of model_type=granite": of("granite", layer_rope_theta=[1e4]),
    "qkv_bias=False of Qwen2-MoE": of("qwen2_moe", qkv_bias=False),
    "head_dim of GraniteMoe": of("granitemoe", head_dim=64),
    "attention_bias of GraniteMoe": of("granitemoe", attention_bias=True),
    "rms_norm_eps of model_type=olmoe other than 1e-05": of("olmoe", rms_norm_eps=1e-6),
    "norm_topk_prob of model_type=olmoe other than False": of("olmoe", norm_topk_prob=True),
    "swiglu_limit of model_type=gpt_oss other than 7.0": of("gpt_oss", swiglu_limit=5.0),
    "a rope of GPT-OSS other than yarn": of("gpt_oss", rope_parameters={"rope_type": "default"}),
    "one of mscale, mscale_all_dim": of("gpt_oss", rope_parameters=YARN | {"mscale": 1.0}),
    "layer_types of GPT-OSS": of("gpt_oss", **MIXED),
    "use_bias of ERNIE, which vLLM": of("ernie4_5_moe", use_bias=True),
    "use_routing_bias=False of MiniMax-M2": of("minimax_m2", scoring_func="sigmoid"),
    "a scoring_func of MiniMax-M2 other than sigmoid": of(
        "minimax_m2", scoring_func="softmax", use_routing_bias=True
    ),
    "attention_bias of model_type=minimax_m2": of("minimax_m2", attention_bias=True),
    "several ranks with minimax_m2": with_ranks(of("minimax_m2"), 2),
    "several ranks with gpt_oss": with_ranks(of("gpt_oss"), 2),
    "mlp_bias of model_type=ministral3": of("ministral3", mlp_bias=True),
    "sliding_window of model_type=arcee": of("arcee", sliding_window=8),
    "several ranks with glm": with_ranks(of("glm"), 2),
    "sliding_window of model_type=seed_oss": of("seed_oss", sliding_window=8),
    "attn_logit_softcapping of model_type=olmo2": of("olmo2", attn_logit_softcapping=5.0),
    "a sliding window in no layer": of("exaone4", sliding_window=8, layer_types=FULL),
    "mlp_bias of model_type=exaone4": of("exaone4", mlp_bias=True),
    "LlamaForCausalLM of model_type=internlm3": vllm_config(text={"model_type": "internlm3"}),
    "TransformersForCausalLM of model_type=llama": vllm_config(
        architecture="TransformersForCausalLM"
    ),
    "runner=pooling": vllm_config(runner_type="pooling"),
    "a quantised model, quantization=awq": vllm_config(quantization="awq"),
    "fp8 on several ranks": with_ranks(vllm_config(quantization="fp8"), 2),
    "fp8 of model_type=olmo2": of("olmo2", quantization="fp8"),
    "fp8 of model_type=gemma4_text": of("gemma4_text", quantization="fp8"),
    "fp8 of a model with sparse layers": of("qwen3_moe", quantization="fp8"),
    "is_causal=False": vllm_config(text={"is_causal": False}),
    "head_dim=64 of Qwen2": of("qwen2", head_dim=64),
    "attention_bias of Qwen3": of("qwen3", attention_bias=True),
    "a sliding window in some layers": of("qwen2", **MIXED),
    "dual_chunk_attention_config": of("qwen2", dual_chunk_attention_config={"chunk_size": 4}),
    "llama_4_scaling": vllm_config(text={"llama_4_scaling": {"beta": 0.1}}),
    "sliding_window of model_type=llama": vllm_config(text={"sliding_window": 8}),
    "qkv_bias of model_type=llama": vllm_config(text={"qkv_bias": True}),
    "attention_bias of model_type=mistral": of("mistral", attention_bias=True),
    "qk_norm of model_type=qwen2": of("qwen2", qk_norm=True),
    "mrope_section in rope_parameters": vllm_config({"mrope_section": [4, 6, 6]}),
    "rope_dim in rope_parameters": vllm_config({"rope_dim": 16}),
}


@pytest.mark.parametrize("says", REFUSED)
def test_another_model_than_the_families_is_refused(says: str) -> None:
    with pytest.raises(NotSupported, match=re.escape(says)):
        config._check(REFUSED[says])


@pytest.mark.parametrize(
    "asked",
    [
        of("qwen2", head_dim=32),
        of("qwen3", head_dim=64),
        vllm_config(text={"attention_bias": True, "mlp_bias": True, "sliding_window": 0}),
        of("mistral", sliding_window=8, attention_bias=False),
        of("qwen2", sliding_window=8, layer_types=["sliding_attention"]),
        of("phi3", sliding_window=8),
        of("ernie4_5", use_bias=False),
        of("seed_oss"),
        of("cohere2", **MIXED),
        of("ministral3"),
        of("starcoder2", sliding_window=8),
        of("gemma2", **MIXED),
        *(with_ranks(of(family), 2) for family in ("gemma2", "gemma4_text", "seed_oss", "olmo3")),
        of("exaone4", **MIXED),
        of("olmo3", **MIXED, rope_parameters={"full_attention": YARN, "sliding_attention": {}}),
    ],
)
def test_the_families_are_served(asked: SimpleNamespace) -> None:
    config._check(asked)


@pytest.mark.parametrize(
    ("cache", "dtype", "served"),
    [
        ("bfloat16", torch.bfloat16, True),
        ("float16", torch.float16, True),
        ("bfloat16", torch.float32, False),
        ("float16", torch.bfloat16, False),
        ("fp8_e4m3", torch.bfloat16, False),
    ],
)
def test_a_cache_of_another_dtype_is_refused(cache: str, dtype: torch.dtype, served: bool) -> None:
    """Keys and values would be rounded to it."""
    asked = vllm_config(dtype=dtype)
    asked.cache_config.cache_dtype = cache
    if served:
        config._check(asked)
        return
    with pytest.raises(NotSupported, match=f"kv_cache_dtype={cache} of a model in"):
        config._check(asked)


def with_adapters(asked: SimpleNamespace, **settings: Any) -> SimpleNamespace:
    """A config as vLLM 0.32 has it with adapters of two projections."""
    usual = {"target_modules": ["q_proj", "down_proj"], "lora_dtype": torch.bfloat16}
    usual |= {"fully_sharded_loras": False}
    asked.lora_config = SimpleNamespace(**usual | settings)
    return asked


@pytest.fixture
def adapters_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_lora_supported", [True])


@pytest.mark.usefixtures("adapters_supported")
def test_adapters_of_projections_are_served() -> None:
    config._check(with_adapters(vllm_config()))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (with_adapters(vllm_config(), target_modules=None), "the embedding or the output layer"),
        (with_adapters(vllm_config(), target_modules=["lm_head"]), "pass lora_target_modules="),
        (with_adapters(vllm_config(), fully_sharded_loras=True), "fully_sharded_loras"),
        (
            with_adapters(vllm_config(), lora_dtype=torch.float16),
            "lora_dtype=torch.float16 of a model in bfloat16",
        ),
        (with_adapters(with_ranks(vllm_config(), 2)), "LoRA on several ranks"),
        (with_adapters(of("mixtral")), "LoRA of a model with sparse layers"),
        (with_adapters(of("seed_oss")), "LoRA of model_type=seed_oss"),
        (with_adapters(of("gemma4_text")), "LoRA of model_type=gemma4_text"),
    ],
)
@pytest.mark.usefixtures("adapters_supported")
def test_other_adapters_are_refused(asked: SimpleNamespace, says: str) -> None:
    with pytest.raises(NotSupported, match=re.escape(says)):
        config._check(asked)


@pytest.mark.usefixtures("adapters_supported")
def test_adapters_of_an_excluded_product_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM wraps no linear whose class was registered and is not used."""
    monkeypatch.setattr(config, "_excluded", ["down_proj"])
    config._check(vllm_config())
    with pytest.raises(NotSupported, match="LoRA with o_proj or down_proj excluded"):
        config._check(with_adapters(vllm_config()))


def test_a_vllm_whose_adapters_work_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_lora_supported", [False])
    with pytest.raises(NotSupported, match="LoRA in this version of vLLM"):
        config._check(with_adapters(vllm_config()))


@pytest.mark.parametrize("option", PARALLEL)
def test_a_model_in_parts_is_refused(option: str) -> None:
    asked = vllm_config()
    setattr(asked.parallel_config, option, 2)
    with pytest.raises(NotSupported, match=PARALLEL[option]):
        config._check(asked)


def test_whole_experts_on_other_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank vLLM's switch changes nothing, and of a dense model neither."""
    monkeypatch.setattr(config, "_sparse_supported", [True])
    sparse, dense = vllm_config(text={"model_type": "mixtral"}), vllm_config()
    sparse.model_config.architecture = "MixtralForCausalLM"
    for asked in (sparse, dense):
        asked.parallel_config.enable_expert_parallel = True
        config._check(asked)
        asked.parallel_config.tensor_parallel_size = 2
    config._check(dense)
    with pytest.raises(NotSupported, match="expert parallelism; omit enable_expert_parallel"):
        config._check(sparse)
    sparse.parallel_config.enable_expert_parallel = False
    config._check(sparse)


def test_a_model_that_ranks_cannot_share_is_refused() -> None:
    asked = vllm_config(text={"hidden_size": 66})
    asked.parallel_config.tensor_parallel_size = 2
    config._check(asked)
    asked.parallel_config.tensor_parallel_size = 4
    with pytest.raises(NotSupported, match="hidden_size=66, which 4 ranks do not divide"):
        config._check(asked)


def test_vllms_own_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(NotSupported, match="VLLM_BATCH_INVARIANT=1"):
        config._check(vllm_config())


def test_a_config_is_checked_that_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a user keeps from another engine, or wrote."""
    asked = vllm_config()
    asked.parallel_config.pipeline_parallel_size = 2
    monkeypatch.setattr(config, "get_current_vllm_config", lambda: asked)
    asked.additional_config = {config.KEY: config.digest()}
    config.prepare_config()
    asked.additional_config = {config.KEY: "another"}
    with pytest.raises(NotSupported, match="pipeline parallelism"):
        config.prepare_config()


@pytest.mark.parametrize("name", ["kernel.py", "hopper/kernel.cu"])
def test_an_edited_source_is_another_digest(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    digests = []
    for text in ("one", "two", "two"):
        (tmp_path / name).write_text(text)
        digests.append(sources.sources_digest.__wrapped__())
    assert digests[0] != digests[1] == digests[2]


def test_the_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for off in ("", "0"):
        monkeypatch.setenv(vllm.ENVIRONMENT, off)
        vllm.plugin()
    monkeypatch.setenv(vllm.ENVIRONMENT, "false")
    with pytest.raises(
        NotSupported, match="RLK_KERNELS=false: 1 switches the kernels on, and 0 off"
    ):
        vllm.plugin()


def test_a_list_of_plugins_without_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that makes the model would have none."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    with pytest.raises(NotSupported, match="VLLM_PLUGINS=others excludes rlk_kernels"):
        vllm.register()


def test_norms_are_left_all_or_none() -> None:
    with pytest.raises(
        NotSupported, match="attn_norm, q_norm cannot be excluded alone, because all norms"
    ):
        vllm.register(["q_norm", "attn_norm", "act"])


def test_compiled_norms_cannot_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code has them in it."""
    from rlk_kernels.integrations.vllm import layers, registry

    first, second = (object.__new__(layers.RlkRMSNorm) for _ in range(2))
    live = {"layers.0.attn_norm": first, "layers.0.mlp_norm": second}
    monkeypatch.setattr(registry, "operators", lambda _: live)
    model = SimpleNamespace(model=SimpleNamespace(do_not_compile=False))
    registry.leave(model, ["act"])
    with pytest.raises(NotSupported, match="attn_norm: compiled code cannot change its norms"):
        registry.leave(model, ["attn_norm"])
    model.model.do_not_compile = True
    registry.leave(model, ["attn_norm"])
    assert type(first) is layers.RMSNorm
    assert type(second) is layers.RlkRMSNorm


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_sparse_models_are_refused_where_vllm_makes_them_otherwise(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    from rlk_kernels.integrations.vllm import registry
    from rlk_kernels.integrations.vllm.families import ARCHITECTURES

    asked = vllm_config(text={"model_type": family}, architecture=ARCHITECTURES[family])
    assert len(registry._sparse_classes()) == 4
    config._check(asked)
    monkeypatch.delattr(vllm, "sparse", raising=False)
    monkeypatch.setitem(sys.modules, "rlk_kernels.integrations.vllm.sparse", None)
    assert registry._sparse_classes() == {}
    with pytest.raises(NotSupported, match="sparse layers of this version of vLLM"):
        config._check(asked)
    config._check(vllm_config())
    monkeypatch.undo()
    assert len(registry._sparse_classes()) == 4


@pytest.mark.parametrize("cuda", [False, True])
def test_gated_delta_nets_are_compiled_on_nvidias_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    monkeypatch.setattr(config, "_delta_nets_supported", [True])
    monkeypatch.setattr(type(config.current_platform), "is_cuda", lambda _: cuda)
    for eager in (True, False):
        asked = vllm_config(
            text={"model_type": "qwen3_5_text"}, architecture="Qwen3_5ForCausalLM",
            enforce_eager=eager,
        )  # fmt: skip
        if eager or cuda:
            config._check(asked)
            continue
        with pytest.raises(NotSupported, match="compiled code with gated delta nets on a device"):
            config._check(asked)


def test_the_classes_of_models_are_vllms_own_again() -> None:
    from rlk_kernels.integrations.vllm.registry import MODELS
    from vllm.model_executor.models import ModelRegistry

    before = dict(ModelRegistry.models)
    vllm.register()
    registered = dict(ModelRegistry.models)
    vllm.unregister()
    assert dict(ModelRegistry.models) == before
    assert {name for name in before if registered[name] != before[name]} == set(MODELS)


def test_a_part_of_each_head_is_rotated_where_all_engines_do() -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    glm = {"text": {"model_type": "glm4_moe"}, "architecture": "Glm4MoeForCausalLM"}
    config._check(vllm_config(rope, **glm))
    with pytest.raises(NotSupported, match="in llama, transformers rotates whole heads"):
        config._check(vllm_config(rope))
    with pytest.raises(NotSupported, match=r"rope_type=yarn with partial_rotary_factor=0\.5"):
        config._check(vllm_config(YARN | rope | {"rope_type": "yarn"}, **glm))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_model_needs_a_call_of_some_kernel(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Compiled code counts no calls of single operators."""
    monkeypatch.setattr(registry, "operators", lambda _: {"layers.0.act": Counted()})
    model = SimpleNamespace(model=SimpleNamespace(do_not_compile=not compiled))
    monkeypatch.setattr(registry, "backend_calls", lambda: {("swiglu", "torch"): 1})
    assert registry.check_model(model, called=False).uncalled == ("layers.0.act",)
    if compiled:
        assert registry.check_model(model).replaced == ("layers.0.act",)
        monkeypatch.setattr(registry, "backend_calls", dict)
    words = "no kernel was called" if compiled else r"never called for layers\.0\.act"
    with pytest.raises(NotSupported, match=words):
        registry.check_model(model)


def test_fp8_passes_unless_a_projection_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    config._check(vllm_config(quantization="fp8"))
    monkeypatch.setattr(config, "_excluded", ["o_proj"])
    with pytest.raises(NotSupported, match="fp8 with a projection excluded"):
        config._check(vllm_config(quantization="fp8"))


def test_fp8_without_blocks_and_fused_weights_of_shared_blocks_are_refused() -> None:
    from rlk_kernels.integrations.vllm.fp8 import DequantisedMethod, RlkFp8Config

    usual: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    with pytest.raises(NotSupported, match="one scale for each tensor"):
        RlkFp8Config.from_config(usual)
    blocks = RlkFp8Config.from_config(usual | {"weight_block_size": [128, 128]})
    method = DequantisedMethod(blocks, "model.layers.0.self_attn.qkv_proj")
    with pytest.raises(NotSupported, match="a block would have rows of two of them"):
        method.create_weights(
            torch.nn.Module(), 192, [192, 128, 128], 192, 448, torch.bfloat16, weight_loader=None
        )


def test_vllm_reads_fp8_by_our_class_while_the_kernels_are_registered() -> None:
    from rlk_kernels.integrations.vllm.fp8 import RlkFp8Config
    from vllm.model_executor.layers.quantization import get_quantization_config

    try:
        vllm.register()
        assert get_quantization_config("fp8") is RlkFp8Config
    finally:
        vllm.unregister()
    assert get_quantization_config("fp8") is not RlkFp8Config
