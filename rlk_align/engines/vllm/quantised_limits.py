"""Where vLLM's own fp8 is refused, by the options and config.json."""

from rlk_align.engines.info import ReadOption
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.quantised import FP8Weights
from rlk_align.model.shape import ModelShape

ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
"""The values of vLLM's `quantization` that quantise weights as they are loaded; 0.26 has all of
them, and 0.32 no `fp8`."""
CPU_LACKS = (
    "vLLM 0.32's build for CPUs has no kernel that quantises weights or activations to fp8 "
    "(scaled_fp8_quant)"
)


def check_options(option: ReadOption, shape: ModelShape, on_cpu: bool) -> None:
    """Raises BadOption for options of fp8 that no test has compared, or that vLLM cannot run."""
    chosen = {name: option(name) for name in ("quantization", "kv_cache_dtype")}
    asked = {n: value for n, value in chosen.items() if value not in (None, "auto")}
    for name, value in asked.items():
        others = {
            "kernels=rlk": option("kernels") == "rlk",
            f"tp={option('tp')}": int(option("tp") or 1) > 1,
            f"lora={option('lora')}": option("lora") is not None,
        }
        kinds = {"sparse layers": bool(shape.experts), "gated delta nets": shape.delta_layers}
        wrong = [w for w, is_so in others.items() if is_so]
        wrong += [f"a model with {kind}" for kind, is_so in kinds.items() if is_so]
        if wrong:
            raise BadOption(
                f"engine 'vllm': {name}={value} does not support {wrong[0]}, which no test has "
                "compared",
                f"leave {name} out",
            )
    if "quantization" in asked and on_cpu:
        raise BadOption(
            f"engine 'vllm' on a CPU does not support quantization={asked['quantization']}: "
            f"{CPU_LACKS}",
            "quantise the checkpoint in blocks, and add kernels=rlk; or run it on a GPU",
        )


def check_stored(option: ReadOption, stored: FP8Weights, shape: ModelShape, on_cpu: bool) -> None:
    """Raises ModelError or BadOption for a checkpoint in fp8 that vLLM, or the kernels in it, do
    not run."""
    if option("quantization") is not None:
        raise BadOption(
            f"engine 'vllm': quantization={option('quantization')} does not support weights stored "
            f"as {stored}: they are quantised already",
            "leave quantization out",
        )
    kernels = option("kernels") == "rlk"
    if kernels and stored.name == "fp8-block" and stored.scale == "_scale_inv":
        return
    if kernels:
        raise ModelError(
            f"engine 'vllm' with kernels=rlk does not support weights stored as {stored}: the "
            "kernels read weights in blocks with weight_scale_inv",
            "leave kernels=rlk out on a GPU, or quantise the weights in blocks",
        )
    if on_cpu:
        raise ModelError(
            f"engine 'vllm' on a CPU does not support weights stored as {stored}: "
            + (CPU_LACKS if stored.name != "fp8-block" else "its products of them need AMX"),
            "add kernels=rlk, which computes with the dequantised weights of blocks, or use engine "
            "'hf', which does so too; or run it on a GPU",
        )
    if shape.experts:
        raise ModelError(
            f"engine 'vllm' does not support experts stored as {stored}: what its kernels for "
            "experts compute was never compared",
            "compare with --rollout hf",
        )
