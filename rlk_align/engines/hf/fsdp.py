"""PyTorch FSDP2: the HF model, whose parameters `fully_shard` shards over ranks."""

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlk_align.engines.base import Engine, Logprobs, SamplesDone
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.lora import LiveLora
from rlk_align.engines.common.parameters import LiveParameter, Shard, even_shards
from rlk_align.engines.common.weights import unfused
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.hf.experts import corrections, expert_weights
from rlk_align.engines.hf.lora import NAME
from rlk_align.model.checkpoint import EXPERT
from rlk_align.model.prompts import TokenBatch
from rlk_align.trace.writer import PassWriter


class FSDPEngine(HFEngine):
    """`fsdp:dp=N,mixed=1|0,checkpointing=0|1` and the options of `hf`.

    `mixed`: fp32 master weights that compute in the spec's dtype, as in trainers; 0 keeps the
    weights in that dtype. Rank r scores the samples r, r + N, ...
    """

    def open(self) -> None:
        self.device = self.ranks.device
        compute = getattr(torch, self.compute_dtype)
        mixed = bool(self.spec.option("mixed"))
        # FSDP2 shards parameters of one dtype.
        self.adapter_in_float32 = mixed
        model = self.load("float32" if mixed else self.compute_dtype)
        if self.spec.option("checkpointing"):
            # transformers checkpoints only in training mode; the precheck reports active dropout.
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        mesh = init_device_mesh(self.device.type, (self.ranks.world,))
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        # Buffers are not sharded; the rotary frequencies stay in fp32.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)

    def version(self) -> str:
        return f"torch {torch.__version__}, transformers {super().version()}"

    def dtype(self) -> str:
        return self.compute_dtype

    def reshard(self) -> None:
        """Leaves each rank its part of every parameter: after a forward the root's stay
        gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole_parameters(self) -> Iterator[LiveParameter]:
        compute = getattr(torch, self.compute_dtype)
        self.reshard()
        for name, weight in unfused(self.model, self.places()):
            if not isinstance(weight, DTensor):
                # A buffer is not rounded, which changes only what the compute dtype cannot hold.
                held = torch.equal(weight.to(compute).to(weight.dtype), weight)
                if self.ranks.rank == 0:
                    yield LiveParameter(name, weight.to(compute) if held else weight)
                continue
            # The engine computes with the master weight rounded to the compute dtype.
            whole = weight.to(compute).full_tensor()
            # DTensor's Shard(0) gives every rank ceil(n / world) slices while they last.
            share = -(-weight.shape[0] // self.ranks.world)
            remaining = [max(0, weight.shape[0] - r * share) for r in range(self.ranks.world)]
            shards = even_shards(0, [min(share, n) for n in remaining])
            if self.ranks.rank == 0:
                yield LiveParameter(name, whole, shards)
        # A rank has whole experts.
        share = -(-self.shape.experts // self.ranks.world)
        for name, whole in expert_weights(self.model):
            found = EXPERT.fullmatch(name.removesuffix(".bias"))
            assert found is not None, name
            if self.ranks.rank == 0:
                of_rank = Shard(int(found[2]) // share, 0, 0, len(whole))
                yield LiveParameter(name, whole.to(compute), (of_rank,))
        for name, value in corrections(self.model):
            # A buffer is neither shared nor rounded.
            if isinstance(value, DTensor):
                value = value.full_tensor().to(compute)
            if self.ranks.rank == 0:
                yield LiveParameter(name, value)

    def live_adapter(self, name: str = NAME) -> Iterator[LiveLora]:
        # Like the weights, it is rounded to the compute dtype as it is gathered.
        yield from map(self.rounded, super().live_adapter(name))

    # HF's `sample` would need the ranks to decode in step, each with its own samples.
    sample = Engine.sample

    def own_samples(self, batch: TokenBatch) -> range:
        return range(self.ranks.rank, len(batch.samples), self.ranks.world)

    def score(
        self,
        batch: TokenBatch,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Logprobs:
        samples = self.own_samples(batch)
        most = range(0, len(batch.samples), self.ranks.world)
        logprobs: Logprobs = {}
        # Checkpointing has an effect only if gradients are enabled.
        wanted = bool(self.spec.option("checkpointing"))
        editor = Editor.of(intervention, batch)
        if tap is not None:
            for i in samples:
                tap.computes(self.ranks.rank, i, range(len(batch.samples[i].ids)))
        with torch.set_grad_enabled(wanted), self.tapped(tap, editor) as taps:
            for members in self.forwards(samples):
                logprobs |= self.forward(batch, members, taps)
                done(min(len(batch.samples), len(logprobs) * self.ranks.world))
        # Every forward gathers weights from all ranks, so all ranks run as many forwards.
        steps = len(list(self.forwards(most))) - len(list(self.forwards(samples)))
        with torch.no_grad():
            for _ in range(steps):
                ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
                self.run_model(input_ids=ids, use_cache=False)
        return logprobs
