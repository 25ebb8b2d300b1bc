"""Which library a trainer's live model belongs to."""

from typing import Any

from rlk_align.errors import BadOption
from rlk_align.record.train.live import Live

ENGINES = ("hf", "fsdp", "deepspeed", "megatron")


def live_model(
    model: Any, engine: str, checkpoint: str | None, *, temperature: float, weights: bool
) -> Live:
    """The live model as the recorder sees it. Raises BadOption for an engine that is unknown or is
    not the model's, and for a model that is not recorded."""
    if engine not in ("auto", *ENGINES):
        raise BadOption(
            f"engine {engine!r} is not recorded", f"choose from auto, {', '.join(ENGINES)}"
        )
    found = _library(model)
    if engine not in ("auto", found):
        raise BadOption(f"engine={engine}: the model is one of {found!r}", "leave engine out")
    if found == "fsdp":
        from rlk_align.record.train.fsdp import LiveFSDP

        return LiveFSDP(model, temperature=temperature, weights=weights)
    if found == "deepspeed":
        from rlk_align.record.train.deepspeed import LiveDeepSpeed

        return LiveDeepSpeed(model, temperature=temperature, weights=weights)
    if found == "megatron":
        from rlk_align.record.train.megatron import LiveMegatron

        if checkpoint is None:
            raise BadOption(
                "a model of megatron-core needs checkpoint=FOLDER",
                "name the Hugging Face checkpoint that it was converted from: its config.json is "
                "read",
            )
        return LiveMegatron(model, checkpoint, temperature=temperature, weights=weights)
    from rlk_align.record.train.hf import LiveHF

    return LiveHF(model, temperature=temperature, weights=weights)


def _library(model: Any) -> str:
    """The engine of a model. Raises BadOption for a model of several ranks that is not recorded."""
    import torch.distributed as dist

    classes = _classes(model)
    if {"DeepSpeedEngine", "PipelineEngine"} & classes:
        return "deepspeed"
    if any(hasattr(p, "ds_id") for p in getattr(model, "parameters", tuple)()):
        raise BadOption(
            "a model whose parameters DeepSpeed shards, without its engine, is not recorded",
            "give what deepspeed.initialize returned",
        )
    if "FSDPModule" in classes:
        return "fsdp"
    if "GPTModel" in classes:
        return "megatron"
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    wrapped = {
        "FSDP1 (FullyShardedDataParallel)": "FullyShardedDataParallel" in classes,
        "DistributedDataParallel": "DistributedDataParallel" in classes,
        f"a trainer of {ranks} ranks without FSDP2 or DeepSpeed": ranks > 1,
    }
    for name, is_so in wrapped.items():
        if is_so:
            raise BadOption(
                f"{name} is not recorded: of several ranks, those of FSDP2 (fully_shard), of "
                "DeepSpeed and of megatron-core's GPTModel are",
                "rlk-align compare --train fsdp:dp=N scores the same ids with ranks of its own",
            )
    return "hf"


def _classes(model: Any) -> set[str]:
    """The names of the classes of a model and of what is in its wrappers."""
    found: set[str] = set()
    while model is not None:
        if isinstance(model, list | tuple):
            model = model[0] if model else None
            continue
        found |= {c.__name__ for c in type(model).__mro__}
        model = getattr(model, "module", None)
    return found
