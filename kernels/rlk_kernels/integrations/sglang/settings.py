"""The settings of SGLang and of its models that the kernels refuse, in one list, before a model is
loaded."""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from rlk_kernels.integrations import rotary
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.frameworks import refuse

VERSIONS = {"cpu": "0.5.23", "cuda": "0.5.17"}
"""Device -> the version of SGLang whose private methods were read for it: those of the head and of
log-probs have no extension point."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""model_type -> SGLang's class."""
ONE = ("dp_size", "pp_size", "ep_size", "attn_cp_size", "dcp_size", "moe_dp_size")
PADDING = 32
"""On CPUs SGLang pads the MLP's features of each rank to a multiple of this."""
OFF = {
    "enable_dp_attention": "attention divided among data-parallel ranks was not run",
    "enable_deterministic_inference": "it replaces torch's operators; the kernels need none of it",
    "rl_on_policy_target": "it adds casts of its own; the kernels need none of it",
    "quantization": "quantised weights have no kernel",
    "torchao_config": "quantised weights have no kernel",
    "enable_lora": "adapters have no kernel: merge them",
    "lora_paths": "adapters have no kernel: merge them",
    "speculative_algorithm": "drafted tokens were not run",
    "enable_torch_compile": "compiled models were not run",
    "is_embedding": "only generation is supported",
    "enable_two_batch_overlap": "it was not run",
    "enable_single_batch_overlap": "it was not run",
    "enable_pdmux": "it was not run",
    "enable_mis": "it scores by other functions",
    "enable_watermark": "it changes logits before they are scored",
    "enable_return_routed_experts": "the kernels do not report a token's experts",
    "enable_eplb": "it moves experts between ranks",
    "enable_fused_qk_norm_rope": "it bypasses the norms and the rotation",
    "flashinfer_allreduce_fusion_backend": "it bypasses the norms, and SGLang sets it for some "
    "models on several GPUs: pass enforce_disable_flashinfer_allreduce_fusion=True",
}
"""Server argument -> why it must be off."""
ONLY = {
    "disaggregation_mode": (None, "null"),
    "moe_a2a_backend": (None, "none"),
    "model_impl": (None, "auto", "sglang"),
    "load_format": (None, "auto", "safetensors", "pt", "dummy"),
    "ep_num_redundant_experts": (None, 0),
}
"""Server argument -> the values that it may have."""


def check_version() -> None:
    """Raises NotSupported for a version of SGLang that is not in `VERSIONS`."""
    version = importlib.metadata.version("sglang")
    if version not in VERSIONS.values():
        raise NotSupported(f"rlk_kernels in SGLang supports {_known()}, and this is {version}")


def _known() -> str:
    return ", ".join(f"{device} with SGLang {version}" for device, version in VERSIONS.items())


PREFILL_GRAPHS = ("breakable", "disabled")
"""SGLang's ways to capture prefills that the kernels support: `breakable`, its default on a GPU,
leaves attention out of the graphs."""


def _prefill_graphs(args: Any) -> str:
    config = getattr(args, "cuda_graph_config", None)
    return "disabled" if config is None else str(config.prefill.backend)


def check_not_captured(runner: Any) -> None:
    """Raises NotSupported if a ModelRunner has captured CUDA graphs: they would go on replaying
    SGLang's own operators."""
    graphs = {getattr(runner, f"{kind}_cuda_graph_runner", None) for kind in ("decode", "prefill")}
    if graphs - {None, getattr(runner, "eager_runner", None)}:
        raise NotSupported(
            "this ModelRunner has captured CUDA graphs, which keep SGLang's operators: call "
            "register() before the model is loaded, or set RLK_KERNELS=1"
        )


def check(runner: Any) -> None:
    """Raises NotSupported with every setting of a ModelRunner that the kernels refuse. The model
    need not be loaded."""
    from sglang.srt.arg_groups.overrides import resolved_view

    check_version()
    model = runner.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    args = resolved_view(runner.server_args)
    config = model.hf_config
    device = str(runner.device).partition(":")[0]
    version = importlib.metadata.version("sglang")
    refused = [*of_server(args, device, version, dtype), *of_model(config)]
    refuse("SGLang", refused + list(of_ranks(config, device, args.tp_size)))


def of_server(args: Any, device: str, version: str, dtype: str) -> Iterator[str]:
    """A reason for each refused server argument, for a model in dtype, and this version of
    SGLang."""
    if version != VERSIONS.get(device):
        yield f"device={device} with SGLang {version}: the kernels support {_known()}"
    if device == "cuda" and (how := _prefill_graphs(args)) not in PREFILL_GRAPHS:
        yield f"CUDA graphs of prefills by {how}: pass cuda_graph_backend_prefill='breakable'"
    for name in ONE:
        if (ranks := getattr(args, name, 1)) not in (None, 1):
            yield f"{name}={ranks}: of several ranks, tp_size alone was run"
    for name, why in OFF.items():
        if value := getattr(args, name, None):
            yield f"{name}={value}: {why}"
    for name, values in ONLY.items():
        if (value := getattr(args, name, None)) not in values:
            known = ", ".join(str(v) for v in values if v is not None)
            yield f"{name}={value}; only {known}"
    if (cache := getattr(args, "kv_cache_dtype", "auto")) not in ("auto", dtype):
        yield f"kv_cache_dtype={cache} of a model in {dtype}"


def of_model(config: Any) -> Iterator[str]:
    """A reason for each refused setting of config.json."""
    family = config.model_type
    loaded = (getattr(config, "architectures", None) or [None])[0]
    if ARCHITECTURES.get(family) != loaded:
        yield f"{loaded} of model_type={family}; {', '.join(ARCHITECTURES.values())} are supported"
        return
    if config.hidden_act != "silu":
        yield f"hidden_act={config.hidden_act}; silu is supported"
    if getattr(config, "quantization_config", None):
        yield "quantization_config: quantised weights have no kernel"
    if getattr(config, "use_sliding_window", False):
        yield "use_sliding_window, which SGLang's class ignores"
    if getattr(config, "mlp_bias", False):
        yield "mlp_bias, which SGLang's class ignores"
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:
        yield "a config without rope_parameters"
    else:
        try:
            rotary.check(rope)
        except NotSupported as error:
            yield str(error)
        if (partial := rope.get("partial_rotary_factor") or 1.0) != 1.0:
            yield f"partial_rotary_factor={partial} of {family}"
    if family == "qwen3_moe":
        # SGLang's class makes every layer sparse, and an output layer of its own, and leaves the
        # weights that the checkpoint lacks uninitialised.
        wrong = "SGLang ignores it and computes with uninitialised weights, without a message"
        if getattr(config, "mlp_only_layers", None):
            yield f"mlp_only_layers={config.mlp_only_layers}: {wrong}"
        if (step := getattr(config, "decoder_sparse_step", 1)) != 1:
            yield f"decoder_sparse_step={step}: {wrong}"
        if config.tie_word_embeddings:
            yield f"tie_word_embeddings: {wrong}"


def of_ranks(config: Any, device: str, ranks: int) -> Iterator[str]:
    """A reason for each size of the model that tensor-parallel ranks cannot divide. On CPUs SGLang
    pads these sizes with zeros, and keeps them as `original_*`."""
    step = PADDING if device == "cpu" else 1
    heads = getattr(config, "original_num_attention_heads", config.num_attention_heads)
    kv_heads = getattr(config, "original_total_num_kv_heads", config.num_key_value_heads)
    inner = "moe_intermediate_size" if config.model_type == "qwen3_moe" else "intermediate_size"
    sizes = {
        "hidden_size": (config.hidden_size, ranks),
        "num_attention_heads": (heads, ranks),
        "num_key_value_heads": (kv_heads, ranks),
        inner: (getattr(config, f"original_{inner}", getattr(config, inner)), step * ranks),
    }
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            yield f"{name}={size}, which is no multiple of {multiple}, with {ranks} ranks"
