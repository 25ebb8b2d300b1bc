"""The checks before any engine starts, by config.json and the flags.

Nothing here imports an engine. torch is imported only to compare the embedding with a tied head
that is stored as well. transformers, whose import takes seconds, is imported only for chats and for
a prompt whose length is within a few tokens of the limit.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_align.capture.key import engine_versions
from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.engines.common.kernels import check_excluded, check_kernels
from rlk_align.engines.registry import does_not_sample, require_installed, require_kernels
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.tested import untested
from rlk_align.errors import BadOption, MissingDependency, ModelError
from rlk_align.model.adapter import CONFIG, AdapterFile, adapter_paths, fitting_adapter
from rlk_align.model.checkpoint import check_tokenizer, decoder, read_config, resolve_model
from rlk_align.model.config_keys import check_settings
from rlk_align.model.prompts import Prompt, Sample, TokenBatch, check_ids, refuse_long
from rlk_align.model.quantised import refused, stored_format
from rlk_align.model.shape import ModelShape, original_context, read_shape
from rlk_align.model.sites import check_selection, model_sites
from rlk_align.model.tensors import check_tensors
from rlk_align.model.tokenise import fast_tokenizer, rendered, tokenise

_CERTAINLY_LONG = 1.05
"""A text that exceeds the limit by this factor is too long by tokenizer.json alone. transformers
changes some tokenizers as it loads them, which changes the number of tokens by a few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRequest:
    """The facts about a request that its checks determined."""

    model: Path
    shape: ModelShape
    warnings: Sequence[str]
    """Warnings for the user."""
    context: int
    """The number of positions that the engine has for a prompt and the tokens after it."""
    new_tokens: int
    """The number of tokens that are sampled after each prompt."""


def check_request(request: CaptureRequest, sampling: bool) -> CheckedRequest:
    """Checks everything except the prompts.

    Raises BadOption, MissingDependency or ModelError.
    """
    spec = request.engine
    if sampling and not spec.info.samples:
        raise does_not_sample(spec.name)
    if spec.option("python") is None:
        require_installed(spec.name)
    model = resolve_model(request.model_path)
    shape, config = read_shape(model), read_config(model)
    check_stored_format(spec, model, config, shape)
    warnings = check_settings(model, config, shape.family)
    check_trace_plan(request.trace, shape)
    if spec.option("lora") is not None:
        paths = adapter_paths(spec.option("lora"))
        check_mixed_lora(spec, paths)
        for path in filter(None, paths):
            check_lora(spec, fitting_adapter(path, config, shape))
    spec.info.check(spec.option, config, shape)
    check_decoder(spec, model)
    if spec.option("kernels") != "off":
        require_kernels(spec.name)
        check_kernels(spec.name, config)
    if excluded := spec.option("except"):
        operators = {site.operator.name: site.op for site in model_sites(shape)}
        check_excluded(spec.name, str(excluded), operators)
    check_tensors(model, shape)
    return CheckedRequest(
        model=model,
        shape=shape,
        warnings=(*untested(engine_versions(spec)), *warnings, *_shortened(config)),
        context=shape.context - spec.info.spare_positions,
        new_tokens=request.max_new_tokens if sampling else 0,
    )


def check_stored_format(
    spec: EngineSpec, model: Path, config: Mapping[str, Any], shape: ModelShape
) -> None:
    """Raises ModelError if the weights are quantised in a format that is not read, or in one that
    the engine does not compute with."""
    stored = stored_format(model, config)
    if stored is None:
        return
    if stored.name not in spec.info.reads_fp8:
        raise refused(model, f"{stored}, which engine {spec.name!r} was never compared with")
    if decoder(model) or shape.delta_layers:
        raise refused(model, f"{stored}, in a checkpoint that also sees images or is a hybrid")
    if spec.option("lora") is not None:
        raise BadOption(
            f"engine {spec.name!r}: lora={spec.option('lora')} does not support weights stored as "
            f"{stored}, which no test has compared",
            "leave lora out",
        )
    spec.info.check_fp8(spec.option, stored, shape)
    if _several_own_ranks(spec):
        raise BadOption(
            f"engine {spec.name!r}: {spec.info.own_ranks}={spec.option(spec.info.own_ranks)} does "
            f"not support weights stored as {stored}: slices of blocks are not read",
            f"leave {spec.info.own_ranks} out",
        )


def check_mixed_lora(spec: EngineSpec, paths: Sequence[str | None]) -> None:
    """Raises BadOption for requests with different adapters that the engine does not compute."""
    if len(paths) == 1 and paths[0] is not None:
        return
    lora = f"lora={spec.option('lora')}"
    if not any(paths):
        raise BadOption(f"engine {spec.name!r}: {lora} names no adapter", "leave lora out")
    if not spec.info.mixes_lora:
        raise BadOption(
            f"engine {spec.name!r}: {lora} names several: this engine computes all requests with "
            "one adapter",
            "compare with engine 'hf', or give one adapter",
        )
    if spec.option("merged"):
        raise BadOption(
            f"engine {spec.name!r}: {lora} with merged=1: one adapter can be merged into the "
            "weights",
            "leave merged out, or give one adapter",
        )
    if int(spec.options.get("batch") or 1) > 1:
        raise BadOption(
            f"engine {spec.name!r}: {lora} with batch={spec.options['batch']}: the engine sets the "
            "adapter of a whole forward",
            "leave batch out",
        )


def check_lora(spec: EngineSpec, adapter: AdapterFile) -> None:
    """Raises MissingDependency, BadOption or ModelError if the engine cannot load the adapter."""
    largest, rank = spec.info.largest_lora_rank, adapter.settings.rank
    if largest and rank > largest:
        raise ModelError(
            f"{adapter.folder / CONFIG}: r={rank}, and engine {spec.name!r} supports ranks up to "
            f"{largest}"
        )
    if ranks := _several_own_ranks(spec):
        raise BadOption(
            f"engine {spec.name!r}: {ranks}={spec.option(ranks)} with lora={spec.option('lora')}: "
            "an adapter's slices of several ranks are not read",
            f"leave {ranks} out",
        )
    package = spec.info.lora_package
    if package and spec.option("python") is None and importlib.util.find_spec(package) is None:
        raise MissingDependency(
            f"engine {spec.name!r}: lora={spec.option('lora')} needs the package {package!r}, "
            "which is not installed",
            f"pip install {package}",
        )


def _several_own_ranks(spec: EngineSpec) -> str:
    """The option that makes the engine start several ranks itself; empty if it starts one."""
    ranks = spec.info.own_ranks
    return ranks if ranks and int(spec.option(ranks) or 1) > 1 else ""


def check_decoder(spec: EngineSpec, model: Path) -> None:
    """Raises ModelError or BadOption if the model also sees images and the engine cannot run its
    decoder alone."""
    alone = decoder(model)
    if alone is None:
        return
    if not spec.info.takes_decoder:
        raise ModelError(
            f"engine {spec.name!r} does not load the decoder, {alone.cls}, of a checkpoint that "
            "also sees images",
            "compare with --rollout vllm or --rollout hf, or store the decoder alone",
        )
    if ranks := _several_own_ranks(spec):
        raise BadOption(
            f"engine {spec.name!r}: {ranks}={spec.option(ranks)} does not support a checkpoint "
            "that also sees images: only one process is told to leave out the part for images",
            f"leave {ranks} out, or store the decoder alone",
        )


def _shortened(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A warning if a longrope is compared up to its original length only."""
    original, longest = original_context(config), config.get("max_position_embeddings")
    if original is None or not isinstance(longest, int) or longest <= original:
        return ()
    return (
        f"rope_type=longrope is compared up to original_max_position_embeddings={original}: beyond "
        "it transformers chooses the factors by the longest position of each forward, and vLLM by "
        "the longest that it serves",
    )


def check_trace_plan(plan: TracePlan, shape: ModelShape) -> None:
    """Raises BadOption if the plan names sites or layers that the model lacks."""
    check_selection(plan.sites, model_sites(shape))
    if plan.layers is not None and plan.layers[1] >= shape.layers:
        raise BadOption(
            f"--layers: the model has no layer {plan.layers[1]}",
            f"its layers are 0 to {shape.layers - 1}",
        )


def check_prompts(checked: CheckedRequest, prompts: Sequence[Prompt]) -> None:
    """Raises ModelError if the prompts need a tokenizer or chat template that the model lacks, and
    PromptError for prompts that do not fit."""
    with_ids = tuple(Sample(p.id, p.ids) for p in prompts if p.ids)
    check_ids(TokenBatch(with_ids), checked.shape.vocab)
    refuse_long(too_long(checked, prompts), checked.context, checked.new_tokens)


def too_long(checked: CheckedRequest, prompts: Sequence[Prompt]) -> dict[str, int]:
    """The number of tokens of each prompt that does not fit, by its id; the engine's process checks
    all prompts again. Raises the errors of `rendered`, and ModelError for a missing tokenizer."""
    model, longest = checked.model, checked.context - checked.new_tokens
    if any(p.ids is None for p in prompts):
        check_tokenizer(model)
    prompts = rendered(model, prompts)
    # A text almost never has more tokens than bytes.
    large = [p for p in prompts if p.ids is None and len((p.text or "").encode()) > longest]
    lengths = {p.id: len(p.ids) for p in prompts if p.ids} | _lengths(model, large, longest)
    return {p.id: lengths[p.id] for p in prompts if lengths.get(p.id, 0) > longest}


def _lengths(model: Path, large: Sequence[Prompt], longest: int) -> dict[str, int]:
    """The number of tokens of each text; exact if it is close to the longest that fits."""
    if not large:
        return {}
    try:
        tokenizer = fast_tokenizer(model)
    except ModelError:
        # transformers reads other kinds of tokenizers as well.
        close, lengths = large, {}
    else:
        lengths = {p.id: len(tokenizer.encode(p.text or "").ids) for p in large}
        close = [p for p in large if longest < lengths[p.id] <= longest * _CERTAINLY_LONG]
    return lengths | {name: len(ids) for name, ids in tokenise(model, close).items()}
