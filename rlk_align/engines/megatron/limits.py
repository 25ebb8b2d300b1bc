"""The models and options that the Megatron engine cannot run, by config.json and the spec."""

import importlib.util
import math
from typing import Any

from rlk_align.engines.common.tensor_parallel import check_shared
from rlk_align.engines.info import ReadOption
from rlk_align.engines.megatron.rope import ROPES, another_attention_factor, refused_with_latents
from rlk_align.engines.megatron.stages import Stage
from rlk_align.errors import BadOption, MissingDependency, ModelError
from rlk_align.model.rotary import (
    lacks_factor,
    partial_rotary_factor,
    rope_parameters,
    rotates_a_part,
)
from rlk_align.model.shape import ModelShape
from rlk_align.selftest.faults.catalogue import choose

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""The supported values of `hidden_act`."""


def check_megatron(option: ReadOption, config: dict[str, Any], shape: ModelShape) -> None:
    """Raises ModelError for a model that the engine would compute wrongly, BadOption or
    MissingDependency for options that it does not support."""
    kernels = option("kernels") == "rlk"
    fused = not shape.latent
    check_shared("megatron", shape, int(option("tp") or 1), fused_qkv=fused, kernels=kernels)
    if shape.sparse_layers and (tp := int(option("tp") or 1)) > 1:
        raise BadOption(
            f"engine 'megatron': tp={tp} does not support sparse layers",
            f"leave tp out; with ep={tp} the ranks share the experts",
        )
    _check_slices(shape, option, kernels)
    _check_stages(shape, int(option("pp") or 1))
    _check_experts(shape, int(option("ep") or 1))
    if option("fault") is not None:
        _check_stage_of_fault(shape, option, str(option("fault")))
    if shape.sparse_layers and option("spec") == "te":
        raise BadOption(
            "engine 'megatron': spec=te does not support sparse layers", "spec=local does"
        )
    if option("spec") == "te":
        _check_te(option, config)
    shape.family.check("megatron", shape.model_type)
    if shape.latent:
        _check_latent(option, shape)
    rope = rope_parameters(config)
    activation = config.get("hidden_act") or "silu"
    partial = partial_rotary_factor(config)
    refused = {
        f"hidden_act={activation}": activation not in ACTIVATIONS,
        # The referee recomputes the sum of experts with silu only.
        f"hidden_act={activation} in sparse layers": bool(shape.sparse_layers)
        and activation != "silu",
        f"rope_type={rope['rope_type']}": rope["rope_type"] not in ROPES,
        f"rope_type={rope['rope_type']} without a factor": lacks_factor(rope),
        # megatron-core computes the factor, and a trainer cannot set another.
        f"attention_factor={rope.get('attention_factor')}": another_attention_factor(rope),
        f"partial_rotary_factor={partial}": partial != 1.0 and not rotates_a_part(config),
        f"rope_type={rope['rope_type']} on a part of each head": (
            partial != 1.0 and rope["rope_type"] != "default"
        ),
        **_unknown_routing(shape),
        **(refused_with_latents(rope) if shape.latent else {}),
    }
    for what, is_so in refused.items():
        if is_so:
            raise ModelError(
                f"engine 'megatron' does not support {what}, which config.json asks for",
                "compare with --train hf",
            )


def _check_latent(option: ReadOption, shape: ModelShape) -> None:
    """Raises BadOption for what the engine's latent attention does not have."""
    tp = int(option("tp") or 1)
    unfit = {
        "spec=te": option("spec") == "te",
        f"cp={option('cp')}": int(option("cp") or 1) > 1,
        "sp=1": bool(option("sp")),
    }
    for what, is_so in unfit.items():
        if is_so:
            raise BadOption(
                f"engine 'megatron': {what} does not support latent attention, which no test has "
                "compared there",
                f"leave {what.partition('=')[0]} out",
            )
    sizes = {"q_lora_rank": shape.query_latent}
    sizes["kv_lora_rank + qk_rope_head_dim"] = shape.size("latent_and_key")
    for name, size in sizes.items():
        if size % tp:
            raise BadOption(
                f"engine 'megatron': tp={tp}: {name} = {size} features cannot be divided among "
                f"{tp} ranks",
                "leave tp out",
            )


def _unknown_routing(shape: ModelShape) -> dict[str, bool]:
    """Settings of a router that megatron-core computes differently -> whether they apply."""
    if not shape.family.sigmoid:
        # Its softmax over a single expert would be 1 for any scores, and it refuses that.
        alone = shape.top_k == 1 and shape.norm_topk
        return {"num_experts_per_tok=1 with weights that are divided by their sum": alone}
    of_group = shape.top_k // shape.top_groups
    return {
        "num_experts_per_tok=1 (it does not divide a single score by itself)": shape.top_k == 1,
        "norm_topk_prob=false (it divides a sigmoid's scores by their sum)": not shape.norm_topk,
        f"num_experts_per_tok={shape.top_k} from topk_group={shape.top_groups} groups (it adds up "
        f"the best {of_group} scores of a group where the model adds up 2)": (
            shape.top_groups < shape.groups and of_group != 2
        ),
    }


def _check_slices(shape: ModelShape, option: ReadOption, kernels: bool) -> None:
    """Raises BadOption for context parallelism in which the kernels cannot divide the heads."""
    cp, tp = int(option("cp") or 1), int(option("tp") or 1)
    queries, heads = shape.heads // tp, max(shape.kv_heads // tp, 1)
    excluded = str(option("except") or "").split("+")

    def shared(ranks: int) -> bool:
        return queries % ranks == 0 and (heads % ranks == 0 or ranks % heads == 0)

    if kernels and not shared(cp) and "attn" not in excluded:
        raise BadOption(
            f"engine 'megatron': cp={cp}: the kernels exchange heads for rows, and {cp} ranks "
            f"cannot share {queries} heads and {heads} key-value heads"
            + (f" of tp={tp}" if tp > 1 else ""),
            f"this model takes cp={'|'.join(str(n) for n in (1, 2, 4, 8) if shared(n))} with "
            "kernels=rlk",
        )


def _check_stages(shape: ModelShape, pp: int) -> None:
    if shape.layers % pp:
        fits = [n for n in range(1, shape.layers + 1) if shape.layers % n == 0]
        raise BadOption(
            f"engine 'megatron': pp={pp}: {shape.layers} layers cannot be divided into {pp} equal "
            "stages",
            f"this model takes pp={'|'.join(map(str, fits))}",
        )


def _check_stage_of_fault(shape: ModelShape, option: ReadOption, fault: str) -> None:
    """Raises BadOption for a fault on one rank whose stage does not compute the operator."""
    chosen, stages = choose("megatron", fault), int(option("pp") or 1)
    if chosen.rank is None:
        return
    size = math.prod(int(option(key) or 1) for key in ("tp", "cp", "ep"))
    own = Stage(chosen.rank // size, stages, shape.layers)
    of = own.of(chosen.fault.site)
    # A model without that layer is refused when the fault is planted.
    if of != own.number and of < stages:
        ranks = [f"rank{r}" for r in range(of * size, (of + 1) * size)]
        raise BadOption(
            f"engine 'megatron': fault={fault}: stage {of} of pp={stages} computes "
            f"{chosen.fault.site}, and rank {chosen.rank} belongs to stage {own.number}",
            f"choose from {', '.join(ranks)}, or leave @rank out",
        )


def _check_experts(shape: ModelShape, ep: int) -> None:
    if ep == 1:
        return
    if not shape.sparse_layers:
        raise BadOption(f"engine 'megatron': ep={ep}: this model has no experts", "leave ep out")
    if shape.experts % ep:
        fits = [n for n in range(1, shape.experts + 1) if shape.experts % n == 0]
        raise BadOption(
            f"engine 'megatron': ep={ep}: {shape.experts} experts cannot be divided among {ep} "
            "ranks",
            f"this model takes ep={'|'.join(map(str, fits))}",
        )


def _check_te(option: ReadOption, config: dict[str, Any]) -> None:
    # The packages of another interpreter are not known here.
    if option("python") is None and importlib.util.find_spec("transformer_engine") is None:
        raise MissingDependency(
            "engine 'megatron': spec=te needs the package 'transformer_engine', which is not "
            "installed",
            "pip install 'transformer_engine[pytorch]', or spec=local",
        )
    unfit = {
        "device=cpu": option("device") == "cpu",
        "padding=left": option("input") != "packed" and option("padding") == "left",
        "a model with a sliding window": _windowed(config),
    }
    for what, is_so in unfit.items():
        if is_so:
            raise BadOption(
                f"engine 'megatron': spec=te does not support {what}", "spec=local does"
            )


def _windowed(config: dict[str, Any]) -> bool:
    kinds = config.get("layer_types") or ["sliding_attention"]
    used = config.get("use_sliding_window") is not False and "sliding_attention" in kinds
    return used and config.get("sliding_window") is not None
