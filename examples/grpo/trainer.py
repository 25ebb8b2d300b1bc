"""The trainer: a model of transformers, log-probs of packs, and AdamW on master weights."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from adapter import add_adapter, digests_of
from batch import EMPTY, PADDED_TO, Pack, empty_pack
from checks import check_gradients
from passes import Eager, Graphs
from ranks import Ranks, local, whole
from rlk_kernels import policy_loss
from rlk_kernels.integrations import hf
from sampling import limits
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlk_align.engines.common.weights import unfused
from rlk_align.engines.hf.lora import live_adapter
from rlk_align.engines.hf.places import hf_places
from rlk_align.model.shape import read_shape
from rlk_align.trace.digest import digest_parameters

Timed = Callable[[str], AbstractContextManager[None]]
Scored = list[tuple[Tensor, Tensor | None]]
"""Log-probs and entropies of each pack, float32 [T]; no entropies of distributions within
limits."""


def _most_sequences(options: argparse.Namespace) -> int:
    """The largest number of sequences in a pack."""
    return max(options.problems * options.group + 1, options.pack_tokens // EMPTY)


class Trainer:
    """options: those of train.py; timed: a context that measures the seconds of a stage."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks, timed: Timed) -> None:
        self.options, self.ranks, self.timed = options, ranks, timed
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        self.model.to(ranks.device).train()
        if options.lora:
            add_adapter(self.model, options.lora, options.seed)
        if options.kernels == "rlk":
            self.kernels = hf.use_kernels(self.model)
        ranks.shard(self.model)
        named = self.model.named_parameters()
        # Those that are trained: with --lora the factors of the adapter.
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self.places = places = list(hf_places(self.model, read_shape(options.model)))
        # After a forward, FSDP leaves the root's parameters gathered.
        self.canonical = list(unfused(self.model, [p for p in places if len(p.sites) == 1]))
        self.fused = [p for p in places if len(p.sites) > 1]
        dtype, shards = getattr(torch, options.master_dtype), self.parameters.items()
        self.masters = {n: local(p.detach()).to(dtype, copy=True) for n, p in shards}
        computes = self.score, self.loss, self.parameters
        self.passes = (
            Graphs(*computes, _most_sequences(options)) if options.graphs else Eager(*computes)
        )
        adam = {"lr": options.lr, "weight_decay": 0.0, "fused": ranks.device.type == "cuda"}
        self.optimizer = torch.optim.AdamW(self.masters.values(), **adam)

    def prepare(self) -> None:
        """Compiles, plans and captures kernels for every length of a pack, before the first
        step."""
        step, most = PADDED_TO[self.ranks.device.type], self.options.pack_tokens
        # The longest pack comes first, because its memory has room for the others.
        for tokens in reversed(range(step, most + step, step)):
            self.passes.forward(empty_pack(self.ranks.device, tokens), 0.0)
            self.passes.backward()

    def score(self, pack: Pack) -> tuple[Tensor, Tensor | None]:
        """(log-probs, entropies) float32 [T] of a pack, of the distribution that the rollout draws
        from; 0 at each sequence's first token, -inf for a token that the limits drop."""
        heat, drop = self.options.temperature, limits(self.options)
        if self.options.kernels == "rlk":
            scores = hf.score_tokens(
                self.model, pack.ids, position_ids=pack.positions, cu_seq_lens=pack.starts,
                temperature=heat, return_entropy=not drop, **drop,
            )  # fmt: skip
            rows = (scores,) if drop else scores
        else:
            call = {"position_ids": pack.positions, "use_cache": False}
            logits = self.model(pack.ids, **call).logits[:, :-1].float()
            logs = torch.log_softmax(logits / heat, -1)
            picked = logs.gather(-1, pack.ids[:, 1:, None])[..., 0]
            first = pack.positions[:, 1:] == 0
            with torch.no_grad():
                entropies = -logs.exp().mul_(logs).sum(-1)
            rows = (picked.masked_fill(first, 0.0), entropies)
        logprobs, *entropies = (torch.nn.functional.pad(x[0], (1, 0)) for x in rows)
        return logprobs, *(entropies or [None])

    def loss(self, logprobs: Tensor, pack: Pack, scale: Tensor | float) -> Tensor:
        """The sum over DAPO's clipped tokens, or over GSPO's clipped sequences, times `scale`. The
        old log-probs are the rollout's."""
        low, high = self.options.clip
        if self.options.loss == "gspo":
            mean, _ = self._policy_loss(logprobs, pack)
            return mean * (len(pack.starts) - 1) * scale
        ratio = (logprobs - pack.rollout_logprobs).exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        gain = torch.minimum(ratio * pack.advantages, clipped * pack.advantages)
        return -(gain * pack.mask).sum() * scale

    def _policy_loss(self, logprobs: Tensor, pack: Pack) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            logprobs, pack.rollout_logprobs, pack.advantages[pack.starts[:-1]], pack.mask,
            cu_seqlens=pack.starts, loss_type=self.options.loss, clip=self.options.clip,
        )  # fmt: skip

    def clip_fraction(self, row: list[Pack], scored: Scored) -> float:
        """The share of the counted tokens whose gradient the clip removes."""
        metrics = [self._policy_loss(x, pack)[1] for pack, (x, _) in zip(row, scored, strict=True)]
        clipped = sum(float(m["clip_fraction"] * m["tokens"]) for m in metrics)
        return clipped / max(sum(pack.counted for pack in row), 1)

    def update(self, row: list[Pack]) -> tuple[Scored, float]:
        """Takes one step of AdamW on all packs; returns (their log-probs and entropies before the
        step, the gradient's norm). All ranks must have the same number of packs."""
        unit = "answers" if self.options.loss == "gspo" else "counted"
        count = max(self.ranks.total(sum(getattr(pack, unit) for pack in row)), 1)
        # FSDP2 takes the mean of the ranks' gradients.
        scale = self.ranks.size / count
        scored = []
        self.optimizer.zero_grad()
        for pack in row:
            with self.timed("score"):
                scored.append(self.passes.forward(pack, scale))
            with self.timed("update"):
                self._collect(self.passes.backward())
        with self.timed("update"):
            norm = self._clip()
            self.optimizer.step()
            self.round_masters()
        return scored, norm

    def _collect(self, gradients: dict[str, Tensor]) -> None:
        """Adds a pack's bf16 gradients to the masters', in the masters' dtype."""
        first: list[tuple[Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        for name, gradient in gradients.items():
            master = self.masters[name]
            (first if master.grad is None else later).append((master, local(gradient)))
        for master, _ in first:
            master.grad = torch.empty_like(master)
        for some, into in ((first, torch._foreach_copy_), (later, torch._foreach_add_)):
            if some:
                into([master.grad for master, _ in some], [gradient for _, gradient in some])

    def _clip(self) -> float:
        """Clips the gradient of all ranks to a norm of 1; returns its norm before that."""
        gradients = {n: m.grad for n, m in self.masters.items() if m.grad is not None}
        mine = torch.nn.utils.get_total_norm(gradients.values())
        norm = self.ranks.total(mine.double().square().item()) ** 0.5
        check_gradients(norm, gradients)
        masters = [self.masters[name] for name in gradients]
        torch.nn.utils.clip_grads_with_norm_(masters, 1.0, torch.tensor(norm, device=mine.device))
        return norm

    @torch.no_grad()
    def round_masters(self) -> None:
        """Sets the model's weights to the rounded masters."""
        torch._foreach_copy_(
            [local(parameter) for parameter in self.parameters.values()],
            list(self.masters.values()),
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in the checkpoint, whole weight), or with --lora (name in the model, whole
        factor)."""
        for name, parameter in self.parameters.items():
            yield name, whole(parameter.detach())

    def digests(self) -> dict[str, str]:
        """Canonical name -> digest of each parameter, and of each factor of the adapter."""
        with torch.no_grad():
            # Parts of fused parameters may be copies.
            every = (*self.canonical, *unfused(self.model, self.fused))
            weights = digest_parameters((name, whole(value)) for name, value in every)
            return weights | digests_of(live_adapter(self.model, self.places))
