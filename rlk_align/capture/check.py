"""What can be refused before any engine starts: everything that config and flags decide."""

from rlk_align.capture.key import engine_versions
from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.common.kernels import check_kernels, check_left
from rlk_align.engines.registry import require_installed
from rlk_align.engines.tested import untested
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import check_tokenizer, read_config, resolve_model
from rlk_align.model.families import ModelShape, read_shape
from rlk_align.model.prompts import load_prompts
from rlk_align.model.sites import check_selection, model_sites
from rlk_align.model.tensors import check_tensors


def check_request(request: CaptureRequest, sampling: bool) -> tuple[ModelShape, list[str]]:
    """The model's shape, and what the user should be warned of.

    Raises BadOption, MissingDependency or ModelError.
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
        check_kernels(spec.name, read_config(model))
    if left := spec.option("except"):
        check_left(spec.name, str(left), {site.op for site in model_sites(shape)})
    check_tensors(model, shape)
    if any(p.text is not None for p in load_prompts(request.prompts)):
        check_tokenizer(model)
    return shape, untested(engine_versions(spec))
