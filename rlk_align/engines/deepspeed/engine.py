"""DeepSpeed: the HF model, its optimizer states, gradients and parameters sharded by ZeRO."""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.weights import unfused
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.hf.experts import corrections, expert_weights
from rlk_align.engines.hf.fsdp import FSDPEngine
from rlk_align.engines.process.ranks import Ranks, gather


class DeepSpeedEngine(FSDPEngine):
    """`deepspeed:dp=N,stage=0|1|2|3,mixed=bf16|autocast,checkpointing=0|1` and the options of `hf`.

    `mixed=bf16`: weights in the spec's dtype, and fp32 masters beside them where ZeRO shards its
    optimizer; `autocast`: fp32 weights, under torch's autocast. Rank r scores the samples
    r, r + N, ...
    """

    package: Any
    """The module `deepspeed`."""

    def open(self) -> None:
        self.device = self.ranks.device
        self.package = import_deepspeed(self.ranks)
        config = self._config()
        # transformers reads it for as long as it lives.
        keep = _partitioning(config) if self.spec.option("zero_init") else None
        model = self.load("float32" if self._autocast else self.compute_dtype)
        del keep
        if self.spec.option("checkpointing"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        self.engine, *_ = self.package.initialize(
            model=model,
            optimizer=torch.optim.AdamW(p for p in model.parameters() if p.requires_grad),
            config=config,
            dist_init_required=False,
        )
        self.model = self.engine.module

    @property
    def _autocast(self) -> bool:
        return self.spec.option("mixed") == "autocast"

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank holds a part of every parameter."""
        return self.spec.option("stage") == "3"

    def _config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": int(str(self.spec.option("stage")))}
        # Small parameters are sharded as well.
        zero["stage3_param_persistence_threshold"] = 0
        if self.spec.option("offload") == "params":
            zero["offload_param"] = {"device": "cpu"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }
        if self._autocast:
            config["torch_autocast"] = {"enabled": True, "dtype": self.compute_dtype}
        else:
            config["bf16"] = {"enabled": self.compute_dtype == "bfloat16"}
        if self.spec.option("buffers") == "bf16":
            config["data_types"] = {"buffer_dtype": "bf16"}
        return config

    def version(self) -> str:
        other = HFEngine.version(self)
        return f"{self.package.__version__}, torch {torch.__version__}, transformers {other}"

    def attributes(self) -> dict[str, Any]:
        with self.gathered([self.model.model.embed_tokens.weight]):
            return super().attributes()

    def whole_parameters(self) -> Iterator[LiveParameter]:
        for place in self.places():
            module = self.model.get_submodule(place.holder)
            # PEFT's layers hold the linear that they wrap.
            wraps = hasattr(module, "lora_A")
            with self.gathered(module.parameters(recurse=wraps)):
                for name, value in unfused(self.model, [place]):
                    yield from self._of_ranks(name, value)
        for name, value in expert_weights(self.model, self.gathered):
            yield from self._of_ranks(name, value)
        for name, value in corrections(self.model, self.gathered):
            yield from self._of_ranks(name, value, cast=False)

    def _of_ranks(
        self, name: str, value: torch.Tensor, cast: bool = True
    ) -> Iterator[LiveParameter]:
        """What is multiplied, and below stage 3, where each rank keeps all of it, every copy."""
        if cast:
            value = value.to(getattr(torch, self.compute_dtype))
        # Stage 3 shares slices of flat parameters, which are not slices of rows or columns.
        copies = [value] if self.shards_parameters else gather(value, self.ranks)
        if copies is not None and self.ranks.rank == 0:
            yield LiveParameter(name, copies[0], replicas=tuple(copies[1:]))

    def gathered(
        self, parameters: Iterable[torch.Tensor], written: bool = False
    ) -> AbstractContextManager[None]:
        return self.package.zero.GatheredParameters(
            list(parameters), modifier_rank=0 if written else None, enabled=self.shards_parameters
        )

    def run_model(self, **inputs: Any) -> Any:
        """Through the engine, which turns autocast on."""
        return self.engine(**inputs)


def import_deepspeed(ranks: Ranks) -> Any:
    """The package, for these ranks, which have joined already."""
    on_cpu = ranks.device.type == "cpu"
    os.environ.setdefault("LOCAL_RANK", str(ranks.rank))
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Otherwise it compiles an operator for shared memory as it joins: for minutes.
    for name in deepspeed.ops.__compatible_ops__:
        if "shm" in name:
            deepspeed.ops.__compatible_ops__[name] = False
    deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl", dist_init_required=False)
    return deepspeed


def _partitioning(config: dict[str, Any]) -> Any:
    """Has transformers shard parameters as it loads them, for as long as what is returned lives."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(config)
