"""The subclass of GRPOTrainer, and the output layer that its models get in place of TRL's."""

import functools
import gc
import importlib
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from rlk_kernels.integrations import hf, operators, vllm
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.frameworks import differences, refuse, row_digests, to_bytes
from rlk_kernels.integrations.hf.score import score_without_padding
from rlk_kernels.integrations.trl import settings

MODULE = "trl.trainer.grpo_trainer"
HEAD = "add_fused_lm_head"
"""TRL calls this function of `MODULE` for the policy and for the reference model, before it starts
vLLM; a model's forward then returns log-probs where it is asked for them."""
RUN_WITH = "1.16.0"
SYNCHRONISATIONS = 2
"""How many are checked: the first gives vLLM the weights that it has already."""


def derive(trainer: type) -> type:
    """See the package."""
    grpo = importlib.import_module(MODULE)
    if not (isinstance(trainer, type) and issubclass(trainer, grpo.GRPOTrainer)):
        raise TypeError(f"{trainer!r} is not derived from trl.GRPOTrainer")
    if not hasattr(grpo, HEAD):
        version = importlib.import_module("trl").__version__
        raise NotSupported(f"trl {version} has no {MODULE}.{HEAD}; trl {RUN_WITH} was run")
    return type(trainer.__name__, (_WithKernels, trainer), {"__module__": trainer.__module__})


class _WithKernels:
    """What `derive` puts before a GRPOTrainer."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        made = super().__init__
        given = inspect.signature(made).bind_partial(*positional, **named).arguments
        args = given.get("args")
        if args is None:
            raise NotSupported("args is missing: a GRPOConfig with use_vllm=True is needed")
        refuse("TRL", settings.refused(given))
        vllm.register()
        try:
            with _scoring_heads(args):
                made(*positional, **named)
            self._check_rollout()
        except BaseException:
            vllm.unregister()
            raise
        self._report()
        _check_synchronisations(self)
        self.add_callback(_FirstStep(self))

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, logits_to_keep: int, batch_size: int | None = None,
        compute_entropy: bool = False, **more: Any,
    ) -> Any:  # fmt: skip
        # TRL names the number of tokens here, and to the model's forward by labels, on the device.
        bonus = getattr(self, "_entropy_bonus_enabled", True)
        _asked.set(_Asked(logits_to_keep, compute_entropy, bonus))
        return super()._get_per_token_logps_and_entropies(
            model, ids, mask, logits_to_keep, batch_size, compute_entropy, **more
        )

    @property
    def _llm(self) -> Any:
        return self.vllm_generation.llm

    def _check_rollout(self) -> None:
        """Raises NotSupported where vLLM computes in another dtype, or an operator is its own."""
        trained = settings.computing_dtype(self.model, self.args)
        sampled = str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")
        if sampled != trained:
            raise NotSupported(
                f"vLLM computes in {sampled}, as config.json says, and the trainer in {trained}: "
                f"write {trained} as dtype into config.json, or train in {sampled}"
            )
        # Imports vLLM.
        from rlk_kernels.integrations.vllm.registry import check_model

        self._llm.apply_model(lambda model: check_model(model, called=False))

    def _report(self) -> None:
        if not self.accelerator.is_main_process:
            return
        import torch
        import trl
        from vllm import __version__

        model = self.model
        device = next(model.parameters()).device.type
        print(
            f"rlk_kernels: {len(hf.operators(model))} operators of the trainer (trl "
            f"{trl.__version__}, torch {torch.__version__}) and those of the rollout (vLLM "
            f"{__version__}, in this process) run on the {device} by the kernels, in "
            f"{settings.computing_dtype(model, self.args)}",
            flush=True,
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What TRL asks the next forward for."""

    last: int
    """The number of tokens at the end of each row that are to be scored."""
    entropy: bool
    entropy_gradient: bool


_asked: ContextVar[_Asked] = ContextVar("asked")


@contextmanager
def _scoring_heads(args: Any) -> Iterator[None]:
    """While a trainer is made, its models get the kernels where TRL adds its output layer."""
    grpo = importlib.import_module(MODULE)
    own = getattr(grpo, HEAD)

    def put_in(model: Any, temperature: float = 1.0, **_own_settings: Any) -> None:
        refuse("TRL", settings.of_model(model, args))
        hf.use_kernels(model)
        _score_in_forward(model, temperature)

    setattr(grpo, HEAD, put_in)
    try:
        yield
    finally:
        setattr(grpo, HEAD, own)


def _score_in_forward(model: Any, temperature: float) -> None:
    """Has a model's forward return log-probs, and entropies if asked for, where it is called with
    `fused_lm_head=True`, as TRL does."""
    from trl.trainer.utils import FusedCausalLMOutput

    forward = model.forward

    # TRL and generate read the signature.
    @functools.wraps(type(model).forward)
    def scored(_self: Any, *inputs: Any, fused_lm_head: bool = False, **named: Any) -> Any:
        if not fused_lm_head:
            return forward(*inputs, **named)
        ids, mask = named.pop("input_ids"), named.pop("attention_mask")
        named.pop("labels")
        if named or inputs:
            raise NotSupported(
                f"TRL gives the model {', '.join(named) or 'inputs without names'}, which the "
                "kernels do not support: train on text, with GRPOTrainer's own loss"
            )
        asked = _asked.get()
        scores = score_without_padding(
            model, forward, ids, mask, asked.last, temperature, asked.entropy,
            asked.entropy_gradient,
        )  # fmt: skip
        entropy = scores[..., 1] if asked.entropy else None
        return FusedCausalLMOutput(log_probs=scores[..., 0], entropy=entropy)

    model.forward = types.MethodType(scored, model)


def _check_synchronisations(trainer: Any) -> None:
    """Has the first synchronisations compare vLLM's weights with those that TRL gives it."""
    generation = trainer.vllm_generation
    synchronise = generation.sync_weights
    done = 0

    @functools.wraps(synchronise)
    def synchronised() -> None:
        nonlocal done
        synchronise()
        done += 1
        if done > SYNCHRONISATIONS:
            return
        wrong = generation.llm.apply_model(lambda model: _differences(trainer, model))[0]
        if wrong:
            raise NotSupported(
                f"after synchronisation {done}, vLLM does not hold the trainer's weights: "
                f"{'; '.join(wrong[:4])}" + (f"; and {len(wrong) - 4} more" if wrong[4:] else "")
            )

    generation.sync_weights = synchronised


def _differences(trainer: Any, model: Any) -> list[str]:
    """The parameters of a live vLLM model that do not have the bits which TRL gave it, rounded to
    vLLM's dtype."""
    # Imports vLLM.
    from rlk_kernels.integrations.vllm.weights import held

    dtype = trainer._llm.llm_engine.model_config.dtype
    given = trainer.vllm_generation._iter_named_params()
    sent = to_bytes({name: row_digests(value.to(dtype)) for name, value in given})
    return differences(sent, held(model), trainer.model.config.tie_word_embeddings)


class _FirstStep(TrainerCallback):
    """Ends training where an operator was not computed by its kernel in the first step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._checked = trainer, False

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._checked:
            return
        self._checked = True
        operators.check(hf.operators(self._trainer.model))
        vllm.check(self._trainer._llm)
        if gc.get_freeze_count():
            # vLLM collects garbage whenever it goes to sleep, and exempts the objects that exist
            # once it has started. The kernels' caches are filled in the first step.
            gc.collect()
            gc.freeze()
