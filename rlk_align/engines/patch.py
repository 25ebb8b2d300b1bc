"""Puts `rlk_kernels` into an engine, says what was replaced and by which implementation, sees that
all of it is called, and takes it out again. No other module of the tool imports the kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import rlk_kernels
import torch
from rlk_kernels import backend, private_api
from rlk_kernels.integrations import hf, megatron, profile, vllm
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.experts import Sparse
from rlk_kernels.integrations.operators import NORMS, Counted

from rlk_align.engines.base import Engine
from rlk_align.engines.common.kernels import KERNELS, REPLACEABLE, parse_excluded
from rlk_align.engines.registry import load_patch
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import EngineFailed, ModelError
from rlk_align.model.operators import OPERATORS
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.sites import model_sites


class Kernel(Counted):
    """A function of `profile` that an engine calls in place of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *inputs: Any) -> Any:
        self.count()
        return self._function(*inputs)


class BasePatch(ABC):
    """The kernels in one engine, wherever its model is; see `engines.common.kernels` for what its
    adapter calls."""

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
        self, logits: torch.Tensor, target: torch.Tensor, temperature: float, group: Any = None
    ) -> torch.Tensor | None:
        if self.own_logprobs:
            return None
        return self.reported(logits.detach().float(), target, temperature, group)

    @abstractmethod
    def calls(self, engine: Any) -> list[dict[str, int]]:
        """Canonical site -> calls, of those that the kernels compute; one of each process whose
        model is asked here."""

    def replaced(self, engine: Engine) -> dict[str, str]:
        """Site -> the implementation that computes it now, or `own`.

        Raises EngineFailed where an operator that was not excluded is still the engine's own, or
        where an excluded one is not."""
        ranks = self.calls(engine)
        ours = frozenset(ranks[0]).intersection(*ranks)
        implementation = backend.choose("kernels", None, _like(engine))
        said, wrong = {}, []
        for site in model_sites(engine.shape):
            if site.op not in REPLACEABLE or not engine.computes(site.name):
                continue
            is_ours = site.name in ours
            said[site.name] = implementation if is_ours else "own"
            # An operator fused with an excluded one is excluded with it.
            if not is_ours and site.op not in self._excluded_with:
                lacking = [r for r, rank in enumerate(ranks) if site.name not in rank]
                wrong.append(
                    f"{site.name}{_on(engine, lacking[0], ranks)} is still the engine's own"
                )
            if site.op in self.excluded and any(site.name in rank for rank in ranks):
                wrong.append(f"{site.name} was to be left to the engine")
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise EngineFailed(f"{self.spec}: {wrong[0]}{more}", "report this; or except=OPERATOR")
        return said

    @property
    def _excluded_with(self) -> frozenset[str]:
        """The excluded operators, with what the engine computes as one with them."""
        groups = self.spec.info.one_kernel
        return self.excluded.union(*(g for g in groups if not self.excluded.isdisjoint(g)))

    @contextmanager
    def called(self, engine: Engine, batch: TokenBatch) -> Iterator[None]:
        """Raises EngineFailed where an operator that was replaced is not called in between: then
        something else computed it. A rank without a sample of the batch has no log-prob. ModelError
        for what the kernels refuse there."""
        # In production graphs are replayed, of which no kernel tells: one call is enough.
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
                    f"called{_on(engine, rank, ranks)}: something else computed it",
                    "check what a patch replaces",
                )

    def take_out(self) -> None:
        self.undo.close()


class Patch(BasePatch):
    """The kernels in one engine whose model is in this process."""

    @abstractmethod
    def operators(self, engine: Any) -> dict[str, Any]:
        """Canonical site -> what computes it in the live model, the log-prob left out."""

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
        """Leaves them in: sharding gave modules other classes, and the process ends with them."""


class MegatronPatch(Patch):
    """Megatron-core: through its layer spec, and what GPTModel wires in itself."""

    def in_spec(self, block: Any, windows: tuple[int | None, ...]) -> Any:
        with _refused(self.spec):
            return megatron.with_kernels(block, self.excluded, windows)

    def in_model(self, model: Any, rope: Mapping[str, Any]) -> None:
        with _refused(self.spec):
            megatron.use_kernels(model, rope, self.excluded)

    def operators(self, engine: Any) -> dict[str, Any]:
        return megatron.operators(engine.model)


class VLLMPatch(BasePatch):
    """vLLM: registered before it makes its model, in this process or in one for each rank, which
    gets the kernels as vLLM's plugin."""

    def before_loading(self) -> None:
        # Where only some norms are excluded, `in_model` gives the live model those back.
        every = self.excluded >= NORMS
        with _refused(self.spec):
            vllm.register(self.excluded if every else self.excluded - NORMS)
        self.undo.callback(vllm.unregister)

    def in_model(self, model: Any, rope: Mapping[str, Any]) -> None:
        """`model`: the engine, each rank of which has one."""
        with _refused(self.spec):
            model.on_models(vllm.leave, self.excluded)

    def calls(self, engine: Any) -> list[dict[str, int]]:
        return engine.on_models(_calls_of_vllm, engine.production)


def patch_of(spec: EngineSpec) -> BasePatch | None:
    """The kernels for an engine, where its spec asks for them."""
    return load_patch(spec.name)(spec) if spec.option("kernels") == "rlk" else None


def fast_paths() -> dict[str, str]:
    """Fast path of the kernels' host code -> `on`, or `off` and why."""
    return private_api.fast_paths()


@contextmanager
def _refused(spec: EngineSpec) -> Iterator[None]:
    """A setting that the kernels do not support, as the user's error."""
    try:
        yield
    except NotSupported as error:
        raise ModelError(f"{spec}: {error}", "leave kernels=rlk out, or except=OPERATOR") from error


def _on(engine: Engine, rank: int, ranks: Sequence[object]) -> str:
    """Which of an engine's ranks, in words: of those that were asked here, or this process. Nothing
    of an engine of one."""
    if len(ranks) > 1:
        return f" on rank {rank}"
    return f" on rank {engine.ranks.rank}" if engine.ranks.world > 1 else ""


def _calls_of_vllm(model: Any, production: bool) -> dict[str, int]:
    return _calls(vllm.operators(model), production)


def _calls(operators: Mapping[str, Any], production: bool) -> dict[str, int]:
    """Operator -> calls, of those that the kernels compute."""
    ours = {name: o for name, o in operators.items() if isinstance(o, Counted)}
    if production:
        # Compiled code counts no modules; the kernels count themselves.
        return {name: _runs(name.rpartition(".")[2], o) for name, o in ours.items()}
    return {name: o.rlk_calls for name, o in ours.items()}


def _runs(op: str, computes: Counted) -> int:
    """How often one of the kernels that may compute an operator ran in this process."""
    # A sparse layer's may have the name of a dense one's.
    name = f"expert_{op}" if isinstance(computes, Sparse) and f"expert_{op}" in OPERATORS else op
    kernels = KERNELS[OPERATORS[name].formula]
    return sum(count for (name, _), count in rlk_kernels.backend_calls().items() if name in kernels)


def _like(engine: Engine) -> torch.Tensor:
    """An empty tensor of what the engine computes in, where it does."""
    here = engine.spec.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.empty(0, dtype=getattr(torch, engine.dtype()), device=here)
