"""The kernels in verl's FSDP2 workers, and the check of what they copy to the rollout.

N = rows of logits   V = vocabulary
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.frameworks import of_family, refuse, row_digests, to_bytes
from rlk_kernels.integrations.operators import Counted, look
from rlk_kernels.integrations.verl import settings


class TokenLogprobs(Counted):
    """verl's `logprobs_from_logits`, by the kernels.

    verl's rollout gives no probability to tokens that the model has and the tokenizer lacks, nor to
    placeholders of images: this gives them none either.
    """

    vocabulary: int | None = None
    """The tokenizer's size."""
    placeholders: tuple[int, ...] = ()

    def __call__(self, logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        """fp32, shaped as labels, of logits[..., V]."""
        self.count()
        # The columns left out are not copied; columns of -inf would give the same bits.
        rows = logits.reshape(-1, logits.shape[-1])[:, : self.vocabulary]
        if self.placeholders:
            columns = torch.tensor(self.placeholders, device=rows.device)
            rows = rows.index_fill(-1, columns, -torch.inf)
        return hf.token_logprobs(rows, labels.reshape(-1)).view(labels.shape)


LOGPROBS = TokenLogprobs()


class Copies:
    """What this process has copied to the rollout, and how much of it was checked."""

    model: Any = None
    """The one whose weights are copied."""
    dtype: torch.dtype = torch.bfloat16
    """What it computes in, and the rollout holds."""
    steps = 0
    """What its optimizer has taken."""
    checked = 0
    """Copies; 1 of the checkpoint, 1 after the first step."""
    due = False
    """Whether the copy that is being made is checked."""


COPIES = Copies()


def use_kernels(engine: Any, model: Any) -> None:
    """Puts the kernels into a causal LM that an FSDP engine has built and not yet sharded."""
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    config, settled = engine.model_config, engine.engine_config
    actor = {"strategy": settled.strategy, "fsdp_config": settled}
    asked = {settings.HERE: {"model": config, "actor": actor}}
    refuse("verl", [*settings.refused(asked), *of_family(model)])
    hf.use_kernels(model)
    if config.tokenizer is not None:
        LOGPROBS.vocabulary = len(config.tokenizer)
    LOGPROBS.placeholders = tuple(get_vision_placeholder_token_ids(config.processor))
    if not settled.forward_only:
        computed = (settled.mixed_precision or {}).get("param_dtype", "bf16")
        COPIES.model, COPIES.dtype = model, PrecisionType.to_dtype(computed)
        if engine.rank == 0:
            print(
                f"rlk_kernels in verl's trainer: the kernels compute {len(hf.operators(model))} "
                f"operators of {type(model).__name__}, and log-probs",
                flush=True,
            )


def count_step(engine: Any) -> None:
    """Called after each step of an engine's optimizer."""
    COPIES.steps += engine.module is COPIES.model


def start_copy(adapter: Any) -> dict[str, Tensor] | None:
    """Called before weights are copied; returns where their digests are to be kept, or None where
    this copy is not checked, or not by this rank."""
    COPIES.due = COPIES.checked < (2 if COPIES.steps else 1)
    return {} if COPIES.due and adapter._has_server else None


def recorded(
    weights: Iterable[tuple[str, Tensor]], digests: dict[str, Tensor] | None
) -> Iterable[tuple[str, Tensor]]:
    """The weights, whose digests are taken on their way."""
    return weights if digests is None else _recorded(weights, digests)


def _recorded(
    weights: Iterable[tuple[str, Tensor]], digests: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        digests[name] = row_digests(weight.to(COPIES.dtype))
        yield name, weight


async def check_copy(adapter: Any, digests: dict[str, Tensor] | None) -> None:
    """Raises NotSupported where the rollout does not hold what was just copied to it, or, after a
    step, where a kernel of either side was never called."""
    if not COPIES.due:
        return
    trained = COPIES.steps > 0
    hf.check(hf.operators(COPIES.model), called=trained)
    if trained and not LOGPROBS.rlk_calls:
        raise NotSupported("verl has trained, and never called the kernels' log-prob")
    if digests is not None:
        asked = {"digests": to_bytes(digests), "generated": trained}
        await adapter._execute_method("rlk_check", kwargs=asked)
    COPIES.checked += 1


def report() -> dict[str, Any]:
    """What a worker says at the end of a run."""
    found = look(hf.operators(COPIES.model))
    return {
        "replaced": len(found.replaced), "not_replaced": found.not_replaced,
        "uncalled": found.uncalled, "logprobs": LOGPROBS.rlk_calls,
        "checked": COPIES.checked, "steps": COPIES.steps,
    }  # fmt: skip


def conclude(reports: list[dict[str, Any]]) -> str:
    """Returns one line about all workers. Raises NotSupported where a kernel is missing or was
    never called, or where no copy of weights was checked."""
    for rank, said in enumerate(reports):
        if not said["steps"]:
            return "rlk_kernels in verl: no step was taken, so that nothing is known of the trainer"
        for what, names in (("lacks", said["not_replaced"]), ("never called", said["uncalled"])):
            if names:
                raise NotSupported(f"verl's worker {rank} {what} the kernels of {', '.join(names)}")
        if not said["logprobs"]:
            raise NotSupported(f"verl's worker {rank} never called the kernels' log-prob")
        if not said["checked"]:
            raise NotSupported(f"no copy of weights of verl's worker {rank} was checked")
    first = reports[0]
    return (
        f"rlk_kernels in verl: {len(reports)} worker{'s'[: len(reports) > 1]}, "
        f"{first['replaced']} operators and the log-prob by the kernels, each called; the rollout "
        f"held the trainer's weights, bit for bit, after {first['checked']} checked copies"
    )
