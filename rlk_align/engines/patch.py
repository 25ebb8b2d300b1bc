"""Installs `rlk_kernels` in an engine, reports which operators it replaced by which implementation,
checks that all of them are called, and removes them again. No other module of the tool imports the
kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import rlk_kernels
import torch
from rlk_kernels import backend, private_api
from rlk_kernels.integrations import hf, megatron, profile, sglang, vllm
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.experts import Sparse
from rlk_kernels.integrations.operators import LORA, NORMS, POST_NORMS, Counted

from rlk_align.engines.base import Engine
from rlk_align.engines.common.kernels import KERNELS, REPLACEABLE, parse_excluded
from rlk_align.engines.registry import load_patch
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import EngineFailed, ModelError
from rlk_align.model.operators import OPERATORS
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.sites import model_sites

UPDATES = ("add_lora", "lora_expand")
"""The kernels that add what an adapter adds to a product: with a rollout's linear, and a trainer's.
"""


class Kernel(Counted):
    """A function of `profile` that replaces an engine's own, and counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *inputs: Any) -> Any:
        self.count()
        return self._function(*inputs)


class BasePatch(ABC):
    """The kernels in one engine, in whichever process its model is. `engines.common.kernels`
    documents the methods that an adapter calls."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        excluded = spec.option("except")
        self.excluded = parse_excluded(str(excluded)) if excluded else frozenset()
        self.undo = ExitStack()
        self.reported = Kernel(profile.logp)

    @property
    def own_logprobs(self) -> bool:
        return "logprob" in self.excluded

    def before_loading(self) -> None:
        return

    def in_spec(self, block: Any, windows: tuple[int | None, ...]) -> Any:
        raise EngineFailed(f"{self.spec.name} has no layer spec", "report this")

    @abstractmethod
    def in_model(self, model: Any, rope: Mapping[str, Any]) -> None: ...

    def logprobs(
        self, logits: torch.Tensor, target: torch.Tensor, temperature: float,
        group: Any = None, limits: Mapping[str, Any] | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        if self.own_logprobs:
            return None
        truncation = profile.Truncation(**(limits or {}))
        return self.reported(logits.detach().float(), target, temperature, group, truncation)

    def kept(
        self, logits: torch.Tensor, temperature: float, limits: Mapping[str, Any]
    ) -> torch.Tensor:
        return rlk_kernels.kept_tokens(logits, temperature=temperature, **limits)

    @abstractmethod
    def calls(self, engine: Any) -> list[dict[str, int]]:
        """For each process whose model is read here: canonical site -> number of calls, for the
        sites that the kernels compute."""

    def replaced(self, engine: Engine) -> dict[str, str]:
        """Site -> the implementation that computes it now, or `own`.

        Raises EngineFailed if the engine still computes an operator that is not excluded, or if the
        kernels compute an excluded one."""
        ranks = self.calls(engine)
        ours = frozenset(ranks[0]).intersection(*ranks)
        implementation = backend.choose("kernels", None, _empty_tensor(engine))
        computed_by, wrong = {}, []
        for site in model_sites(engine.shape):
            if site.op not in REPLACEABLE or not engine.computes(site.name):
                continue
            is_ours = site.name in ours
            computed_by[site.name] = implementation if is_ours else "own"
            # An operator fused with an excluded one is excluded with it.
            if not is_ours and site.op not in self._excluded_with:
                lacking = [r for r, rank in enumerate(ranks) if site.name not in rank]
                where = _on_rank(engine, lacking[0], ranks)
                wrong.append(f"{site.name}{where} is still computed by the engine")
            if site.op in self.excluded and any(site.name in rank for rank in ranks):
                wrong.append(f"{site.name} is excluded, but the kernels compute it")
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise EngineFailed(
                f"{self.spec}: {wrong[0]}{more}", "report this, or add except=OPERATOR"
            )
        return computed_by

    @property
    def _excluded_with(self) -> frozenset[str]:
        """The excluded operators, and those that the engine computes in one kernel with them."""
        groups = self.spec.info.one_kernel
        return self.excluded.union(*(g for g in groups if not self.excluded.isdisjoint(g)))

    @contextmanager
    def called(self, engine: Engine, batch: TokenBatch) -> Iterator[None]:
        """Raises EngineFailed if a replaced operator is not called while the context is entered:
        something else computed it. A rank without a sample of the batch has no log-prob. Raises
        ModelError for a setting that the kernels refuse as they run."""
        # A replayed CUDA graph counts no calls, so in production any earlier call is enough.
        before = None if engine.production else self.calls(engine)
        with _refused(self.spec):
            yield
        ranks = self.calls(engine)
        for rank, after in enumerate(ranks):
            if not engine.own_samples(batch):
                after.pop("logprob", None)
            earlier = before[rank] if before else {}
            idle = [name for name, count in after.items() if count == earlier.get(name, 0)]
            if idle:
                more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
                raise EngineFailed(
                    f"{self.spec}: the kernels are in place for {idle[0]}{more} and were not "
                    f"called{_on_rank(engine, rank, ranks)}: something else computed it",
                    "check what the patch replaces",
                )

    def take_out(self) -> None:
        self.undo.close()


class Patch(BasePatch):
    """The kernels in an engine whose model is in this process."""

    @abstractmethod
    def operators(self, engine: Any) -> dict[str, Any]:
        """Canonical site -> what computes it in the live model, without the log-prob."""

    def calls(self, engine: Any) -> list[dict[str, int]]:
        logprob = None if self.own_logprobs else self.reported
        return [_calls({"logprob": logprob} | self.operators(engine), engine.production)]


class HFPatch(Patch):
    """HF transformers."""

    def in_model(self, model: Any, rope: Mapping[str, Any]) -> None:
        with _refused(self.spec):
            self.undo.push(hf.use_kernels(model, self.excluded - {"logprob"}))

    def operators(self, engine: Any) -> dict[str, Any]:
        return hf.operators(engine.model)


class FSDPPatch(HFPatch):
    """FSDP2 around HF transformers."""

    def take_out(self) -> None:
        """Leaves the kernels in place, since sharding changed the classes of the modules."""


class MegatronPatch(Patch):
    """Megatron-core: through its layer spec, and in the modules that GPTModel creates itself."""

    def in_spec(self, block: Any, windows: tuple[int | None, ...]) -> Any:
        with _refused(self.spec):
            return megatron.with_kernels(block, self.excluded, windows)

    def in_model(self, model: Any, rope: Mapping[str, Any]) -> None:
        with _refused(self.spec):
            megatron.use_kernels(model, rope, self.excluded)

    def operators(self, engine: Any) -> dict[str, Any]:
        return megatron.operators(engine.model)


class SGLangPatch(Patch):
    """SGLang, whose scheduler and model runner are in this process."""

    def before_loading(self) -> None:
        with _refused(self.spec):
            sglang.register(self.excluded, self.spec.option("sampler") == "rlk")
        self.undo.callback(sglang.unregister)

    def in_model(self, model: Any, rope: Mapping[str, Any]) -> None:
        """`model`: SGLang's model runner."""
        with _refused(self.spec):
            sampler = self.spec.option("sampler") == "rlk"
            self.undo.push(sglang.use_kernels(model, self.excluded, sampler))

    def operators(self, engine: Any) -> dict[str, Any]:
        return sglang.operators(engine.runner)


class VLLMPatch(BasePatch):
    """vLLM: the kernels are registered before vLLM creates its model, in this process or, through
    vLLM's plugins, in the process of each rank."""

    def before_loading(self) -> None:
        # If only some norms are excluded, `in_model` restores those in the live model.
        every = self.excluded >= NORMS - POST_NORMS
        with _refused(self.spec):
            excluded = self.excluded | NORMS if every else self.excluded - NORMS
            vllm.register(excluded, self.spec.option("sampler") == "rlk")
        self.undo.callback(vllm.unregister)

    def in_model(self, model: Any, rope: Mapping[str, Any]) -> None:
        """`model`: the engine, each rank of which has a model."""
        with _refused(self.spec):
            model.on_models(vllm.leave, self.excluded)

    def calls(self, engine: Any) -> list[dict[str, int]]:
        return engine.on_models(_calls_of_vllm, engine.production)


class Redrawn(NamedTuple):
    """Tokens that the kernels' sampler draws from rows of logits, and what it says of others."""

    ids: torch.Tensor
    """int64 [N], the drawn tokens."""
    kept: torch.Tensor
    """bool [N, V]."""
    mass: torch.Tensor
    """fp32 [N]: the kept tokens' share of the softmax at the temperature."""
    processed: torch.Tensor
    """fp32 [N]: the log-probs of the given tokens among the kept ones, at the temperature; at
    temperature 0, those of all tokens, as vLLM and SGLang have them."""
    raw: torch.Tensor
    """fp32 [N]: those among all tokens, at temperature 1."""


def redraw(
    logits: torch.Tensor, tokens: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
    temperature: float, limits: Mapping[str, Any],
) -> Redrawn:  # fmt: skip
    """The tokens of logits[N, V] by the seeds[N] of their requests and their positions[N]; the
    log-probs are those of tokens[N]. Runs on a GPU if there is one. Raises ModelError for a row
    without a distribution."""
    if torch.cuda.is_available():
        logits, tokens, seeds, positions = (x.cuda() for x in (logits, tokens, seeds, positions))
    settings = {"temperature": temperature, **limits}
    try:
        drawn = rlk_kernels.sample(logits, seeds, positions, **settings)
        kept = rlk_kernels.kept_tokens(logits, **settings)
    except ValueError as error:
        raise ModelError(str(error), "look at the weights and at the engine's dtype") from error
    if without := (drawn.ids < 0).nonzero().flatten().tolist():  # a GPU raises nothing
        raise ModelError(
            f"row {without[0]} of the logits has no distribution",
            "look at the weights and at the engine's dtype",
        )
    raw = processed = profile.logp(logits.float(), tokens)
    if temperature > 0:
        truncation = profile.Truncation(**limits)
        processed = profile.logp(logits.float(), tokens, temperature, None, truncation)
    return Redrawn(*(x.cpu() for x in (drawn.ids, kept, drawn.mass, processed, raw)))


def patch_of(spec: EngineSpec) -> BasePatch | None:
    """The kernels for an engine, if its spec asks for them."""
    return load_patch(spec.name)(spec) if spec.option("kernels") == "rlk" else None


def fast_paths() -> dict[str, str]:
    """Fast path of the kernels' host code -> `on`, or `off` and why."""
    return private_api.fast_paths()


@contextmanager
def _refused(spec: EngineSpec) -> Iterator[None]:
    """Turns the kernels' refusal of a setting into the user's error."""
    try:
        yield
    except NotSupported as error:
        raise ModelError(
            f"{spec}: {error}", "leave kernels=rlk out, or add except=OPERATOR"
        ) from error


def _on_rank(engine: Engine, rank: int, ranks: Sequence[object]) -> str:
    """` on rank N`, for one of the `ranks` that are read here, or else for this process; empty for
    an engine of one rank."""
    if len(ranks) > 1:
        return f" on rank {rank}"
    return f" on rank {engine.ranks.rank}" if engine.ranks.world > 1 else ""


def _calls_of_vllm(model: Any, production: bool) -> dict[str, int]:
    return _calls(vllm.operators(model), production)


def _calls(operators: Mapping[str, Any], production: bool) -> dict[str, int]:
    """Site -> number of calls, for the sites that the kernels compute."""
    ours = {name: o for name, o in operators.items() if isinstance(o, Counted)}
    if production:
        # Compiled code does not count the calls of modules; the kernels count themselves.
        return {name: _runs(name.rpartition(".")[2], o) for name, o in ours.items()}
    return {name: o.rlk_calls for name, o in ours.items()}


def _runs(op: str, computes: Counted) -> int:
    """How often the kernels that may compute an operator ran in this process."""
    # An operator of a sparse layer may have the site name of a dense layer's.
    name = f"expert_{op}" if isinstance(computes, Sparse) and f"expert_{op}" in OPERATORS else op
    kernels = UPDATES if op == LORA else KERNELS[OPERATORS[name].formula]
    return sum(count for (name, _), count in rlk_kernels.backend_calls().items() if name in kernels)


def _empty_tensor(engine: Engine) -> torch.Tensor:
    """An empty tensor of the dtype and on the device that the engine computes in."""
    here = engine.spec.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.empty(0, dtype=getattr(torch, engine.dtype()), device=here)
