"""Prepares a comparison module by module: from the text of flags to a checked request."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlk_align.api import options
from rlk_align.api.pair import Pair
from rlk_align.api.prompts import RunPrompts
from rlk_align.capture.recording import Recording
from rlk_align.engines.registry import ENGINES, engine_info
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.judge.load import default_contract, load_contract
from rlk_align.model.checkpoint import default_model, read_config, resolve_model
from rlk_align.model.config_keys import check_own_code
from rlk_align.model.dtypes import lower_precision
from rlk_align.model.outline import read_outline
from rlk_align.progress import Progress
from rlk_align.trace.run import Run

if TYPE_CHECKING:
    from rlk_align.capture.check import CheckedRequest
    from rlk_align.capture.request import CaptureRequest
    from rlk_align.modules.pipeline import ModulesRequest
    from rlk_align.modules.record import ModulesVerdict

_WITHOUT = {
    **{"max_new_tokens": "it scores the prompts, and decodes nothing"},
    **{"seed": "it scores the prompts, and samples nothing"},
    **{"edges": "it has one pass a side", "production": "compiled code has no modules"},
    **{"layers": "it keeps every module's values", "sites": "it keeps every module's values"},
    "allow_mismatch": "it names weights that differ, and goes on",
}
"""Field of a pair that has no meaning here -> why."""
_REFUSED_OPTIONS = {
    "kernels": "the kernels know the families that are described",
    "except": "the kernels know the families that are described",
    "fault": "a fault is planted at an operator of a described family",
    "logprobs": "those of a prompt are raw",
    **dict.fromkeys(
        ("quantization", "kv_cache_dtype"), "what is in fp8 is compared in described families"
    ),
    "tp": "the shards of several ranks are not joined here",
}
"""Option of an engine -> why it is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModules:
    """A comparison that is ready to start."""

    request: "ModulesRequest"
    run: Run
    prompts: RunPrompts

    def start(self, progress: Progress) -> "ModulesVerdict":
        """Runs the comparison and returns the verdict."""
        from rlk_align.modules.pipeline import compare_modules

        self.prompts.save()
        return compare_modules(self.request, self.run, progress)


def prepare(
    pair: Pair,
    runs: Sequence[str],
    others: Collection[str],
    warn: options.Warn,
    command: Sequence[str],
) -> PreparedModules:
    """Checks a request, so that errors come before an engine starts. `others`: further flags that
    were given. Raises RlkError."""
    _check_flags(pair, runs, others)
    specs = {"rollout": _engine(pair.rollout or options.default_rollout())}
    specs["train"] = _engine(pair.train or "hf")
    name = pair.model or str(specs["rollout"].option("model") or default_model())
    model = resolve_model(name)
    settings = (name, str(pair.prompts), *map(str, specs.values()))
    run = options.choose_run(pair.run_dir, "modules", *settings)
    prompts = RunPrompts.of(pair.prompts, run)
    requests = {
        side: replace(
            pair.request(spec, pair.plan, ("prefill",), prompts.path), model=name, modules=True
        )
        for side, spec in specs.items()
    }
    checked = {side: _checked(request) for side, request in requests.items()}
    for warning in (w for c in checked.values() for w in c.warnings):
        warn(warning)
    prompts = prompts.fitting(checked.values(), run, warn)
    requests = {side: replace(r, prompts=prompts.path) for side, r in requests.items()}
    dtypes = [r.engine.dtype(checked[side].shape.dtype) for side, r in requests.items()]
    dtype = lower_precision(*dtypes)

    from rlk_align.modules.pipeline import ModulesRequest

    return PreparedModules(
        request=ModulesRequest(
            model=model,
            rollout=requests["rollout"],
            train=requests["train"],
            contract=load_contract(pair.contract or default_contract(dtype), dtype),
            fresh=pair.fresh,
            command=tuple(command),
        ),
        run=run,
        prompts=prompts,
    )


def _check_flags(pair: Pair, runs: Sequence[str], others: Collection[str]) -> None:
    default = Pair()
    for name in (*others, *(["RUN_A RUN_B"] if runs else [])):
        raise BadOption(f"--modules does not support {name}", "omit it")
    for name, why in _WITHOUT.items():
        if (getattr(pair, name) or None) != (getattr(default, name) or None):
            raise BadOption(f"--modules does not support --{name.replace('_', '-')}: {why}")
    if pair.kernels not in (None, "off"):
        why = _REFUSED_OPTIONS["kernels"]
        raise BadOption(f"--modules does not support --kernels {pair.kernels}: {why}")


def _engine(text: str) -> EngineSpec:
    """Raises BadOption for a recording, and for an engine or an option that has no modules here."""
    spec = options.side(text, None)
    if isinstance(spec, Recording):
        raise BadOption(f"--modules does not support recordings: {text}", "name an engine")
    if not spec.info.modules:
        known = ", ".join(name for name in ENGINES if engine_info(name).modules)
        raise BadOption(f"--modules does not support engine {spec.name!r}", f"use {known}")
    for key, why in _REFUSED_OPTIONS.items():
        if key in spec.options and spec.options[key] not in ("off", "raw", 1):
            value = spec.options[key]
            raise BadOption(f"--modules does not support {spec.name}:{key}={value}: {why}")
    return spec


def _checked(request: "CaptureRequest") -> "CheckedRequest":
    """Raises ModelError for a checkpoint that cannot be compared."""
    from rlk_align.capture.check import CheckedRequest
    from rlk_align.capture.key import engine_versions
    from rlk_align.engines.tested import untested
    from rlk_align.model.quantised import check_not_quantized

    spec, model = request.engine, resolve_model(request.model_path)
    shape, config = read_outline(model), read_config(model)
    check_not_quantized(model, config)
    warnings = check_own_code(model, config)
    return CheckedRequest(
        model=model,
        shape=shape,
        warnings=(*untested(engine_versions(spec)), *warnings),
        context=shape.context - spec.info.spare_positions,
        new_tokens=0,
    )
