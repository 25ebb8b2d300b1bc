"""The models and options that SGLang cannot run, by config.json and the engine spec."""

from typing import Any

from rlk_align.engines.common.tensor_parallel import check_shared
from rlk_align.engines.info import ReadOption
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.shape import ModelShape

VERSIONS = {"cpu": "0.5.23", "cuda": "0.5.17"}
"""Device -> the version whose private methods the adapter is written for."""
ATTENTION = {"cpu": ("torch_native",), "cuda": ("triton", "fa3")}
"""Device -> the attention backends that run there; the first is the default."""
_PADDING = 32
"""On a CPU SGLang pads the MLP's features of each rank to a multiple of this."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""The families whose model classes in SGLang were run."""


def check_version(installed: str, device: str) -> None:
    """Raises BadOption for another version than the one that is supported on the device."""
    supported = VERSIONS[device]
    if installed != supported:
        raise BadOption(
            f"engine 'sglang': SGLang {installed} is installed, and only {supported} is supported "
            f"on device={device}: its prompt log-probs and its head are private methods, which "
            "change",
            f"pip install sglang=={supported}; docs/sglang.md",
        )


def attention_backend(option: ReadOption, device: str) -> str:
    """The attention backend on a device. Raises BadOption for one that does not run there."""
    backend = str(option("attention_backend") or ATTENTION[device][0])
    if backend not in ATTENTION[device]:
        raise BadOption(
            f"engine 'sglang': attention_backend={backend} does not run on device={device}",
            f"attention_backend={' or '.join(ATTENTION[device])}",
        )
    return backend


def check_sglang(option: ReadOption, config: dict[str, Any], shape: ModelShape) -> None:
    """Raises ModelError or BadOption if SGLang would fail to load the model, or compute
    nonsense."""
    device = option("device")
    if device is not None:
        if device not in VERSIONS:
            raise BadOption(
                f"engine 'sglang': device={device}: it computes on the first GPUs that it sees",
                "device=cuda, and name the GPUs in CUDA_VISIBLE_DEVICES",
            )
        attention_backend(option, str(device))
    if not float(option("mem_fraction") or 0.5) < 1:
        raise BadOption(
            f"engine 'sglang': mem_fraction={option('mem_fraction')}: must be below 1",
        )
    shape.family.check("sglang", shape.model_type)
    if shape.model_type not in FAMILIES:
        raise ModelError(
            f"engine 'sglang' was tested with {', '.join(FAMILIES)}, and this is a "
            f"{shape.model_type}",
            "compare with --rollout vllm or --rollout hf",
        )
    if config.get("mlp_bias"):
        raise ModelError(
            "engine 'sglang' ignores mlp_bias=true, which config.json asks for: its MLP has no "
            "biases, and it leaves those of the checkpoint out without an error",
            "compare with --rollout vllm or --rollout hf",
        )
    if shape.experts:
        _check_sparse(config, shape)
    _check_shared(option, shape, on_gpu=device == "cuda")


def _check_sparse(config: dict[str, Any], shape: ModelShape) -> None:
    """SGLang's Qwen3-MoE makes every layer sparse and a head of its own, whatever config.json says.
    The checkpoint has no weights for them, so that they stay uninitialised memory."""
    dense = [i for i in range(shape.layers) if i not in shape.sparse_layers]
    if dense:
        asked = next(k for k in ("mlp_only_layers", "decoder_sparse_step") if _is_set(config, k))
        raise ModelError(
            f"engine 'sglang' ignores {asked}={config[asked]}, which config.json asks for: it "
            f"makes layer {dense[0]} sparse as well, finds no weights for its experts in the "
            "checkpoint, and computes with uninitialised memory without an error",
            "compare with --rollout vllm or --rollout hf",
        )
    if config.get("tie_word_embeddings"):
        raise ModelError(
            "engine 'sglang' ignores tie_word_embeddings=true for qwen3_moe: it makes an lm_head "
            "of its own, finds no weight for it in the checkpoint, and computes logits with "
            "uninitialised memory without an error",
            "save the checkpoint with its head and tie_word_embeddings=false, or compare with "
            "--rollout vllm or --rollout hf",
        )


def _check_shared(option: ReadOption, shape: ModelShape, on_gpu: bool) -> None:
    """On CPUs SGLang adds zeros to sizes that the ranks do not divide, so that no rank has the
    features that it would have without them. On GPUs it copies key-value heads instead."""
    tp, kernels = int(option("tp") or 1), option("kernels") == "rlk"
    check_shared("sglang", shape, tp, fused_qkv=False, kernels=kernels)
    if option("ep") != 1:
        why = "experts that are divided among GPUs were not run"
        if not on_gpu:
            why = (
                "without sgl_kernel, SGLang on a CPU cannot compute the experts of one rank: it "
                "fails at the first expert of another rank"
            )
        raise BadOption(
            f"engine 'sglang': ep={option('ep')}: {why}",
            "leave ep out; tp divides every expert among the ranks",
        )
    does, where, step = ("copies", "a GPU", 1) if on_gpu else ("pads", "a CPU", _PADDING)
    inner = shape.expert_intermediate or shape.intermediate
    shared = {"key-value heads": (shape.kv_heads, tp), "features of an MLP": (inner, step * tp)}
    for what, (size, multiple) in shared.items():
        if size % multiple:
            raise BadOption(
                f"engine 'sglang': with tp={tp} SGLang {does} {size} {what} to a multiple of "
                f"{multiple} on {where}, and such models are not supported",
                "lower tp, or compare with --rollout vllm",
            )


def _is_set(config: dict[str, Any], key: str) -> bool:
    return config.get(key) not in (None, [], 1)
