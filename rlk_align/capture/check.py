"""What can be refused before any engine starts: everything that config and flags decide."""

from pathlib import Path

from rlk_align.capture.key import engine_versions
from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.common.kernels import check_excluded, check_kernels
from rlk_align.engines.registry import require_installed, require_kernels
from rlk_align.engines.tested import untested
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.checkpoint import check_tokenizer, read_config, resolve_model
from rlk_align.model.families import ModelShape, read_shape
from rlk_align.model.prompts import Prompt, Sample, TokenBatch, check_lengths, load_prompts
from rlk_align.model.sites import check_selection, model_sites
from rlk_align.model.tensors import check_tensors
from rlk_align.model.tokenise import fast_tokenizer, rendered, tokenise


def check_request(request: CaptureRequest, sampling: bool) -> tuple[ModelShape, list[str]]:
    """The model's shape, and what the user should be warned of.

    Raises BadOption, MissingDependency, ModelError or PromptError.
    """
    spec = request.engine
    if sampling and not spec.info.samples:
        raise BadOption(
            f"engine {spec.name!r} does not sample",
            "name it as --train, or give `capture` the --tokens of a run",
        )
    if spec.option("python") is None:
        require_installed(spec.name)
    model = resolve_model(request.model_path)
    shape = read_shape(model)
    check_selection(request.trace.sites, model_sites(shape))
    if request.trace.layers is not None and request.trace.layers[1] >= shape.layers:
        raise BadOption(
            f"--layers: the model has no layer {request.trace.layers[1]}",
            f"its layers are 0 to {shape.layers - 1}",
        )
    spec.info.check(spec.option, read_config(model), shape)
    if spec.option("kernels") != "off":
        require_kernels(spec.name)
        check_kernels(spec.name, read_config(model))
    if excluded := spec.option("except"):
        operators = {site.operator.name: site.op for site in model_sites(shape)}
        check_excluded(spec.name, str(excluded), operators)
    check_tensors(model, shape)
    _check_prompts(request, sampling, model, shape)
    return shape, untested(engine_versions(spec))


def _check_prompts(request: CaptureRequest, sampling: bool, model: Path, shape: ModelShape) -> None:
    """Raises ModelError where the model has no tokenizer or chat template and one is needed, and
    PromptError for a prompt that does not fit."""
    prompts = load_prompts(request.prompts)
    if any(p.ids is None for p in prompts):
        check_tokenizer(model)
    context = shape.context - request.engine.info.spare_positions
    new_tokens = request.max_new_tokens if sampling else 0
    # To import transformers takes seconds: only where a prompt seems to be too long, which it alone
    # can tell. What only seems to fit is refused by the engine's own process.
    suspects = _suspects(rendered(model, prompts), model, context - new_tokens)
    ids = tokenise(model, suspects)
    batch = TokenBatch(tuple(Sample(p.id, tuple(ids[p.id])) for p in suspects))
    check_lengths(batch, context, shape.vocab, new_tokens)


def _suspects(prompts: list[Prompt], model: Path, longest: int) -> list[Prompt]:
    """The prompts that may have more than `longest` tokens, and all that came as token ids."""
    # Hardly any text has more tokens than bytes.
    large = [p for p in prompts if len((p.text or "").encode()) > longest]
    with_ids = [p for p in prompts if p.ids]
    if not large:
        return with_ids
    try:
        tokenizer = fast_tokenizer(model)
    except ModelError:
        # transformers reads tokenizers of other kinds, too.
        return [*with_ids, *large]
    long = [p for p in large if len(tokenizer.encode(p.text or "").ids) > longest]
    return [*with_ids, *long]
