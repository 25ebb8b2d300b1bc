"""The stored formats of quantised weights, by config.json. Weights of e4m3 are read: in blocks with
a scale each, as DeepSeek's and Qwen's checkpoints have them, with one scale for each tensor, and
what llm-compressor writes (compressed-tensors), also with a scale for each row. All others are
refused by name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.results import Quantisation

E4M3 = "F8_E4M3"
"""The name of e4m3 in safetensors."""
KEYS = ("quantization_config", "compression_config")
"""The keys of config.json for quantised weights."""
INPUT_SCALE = ".input_scale"
"""The end of the name of a projection's static scale of activations."""
_IGNORED = ("modules_to_not_convert", "ignored_layers")
_KNOWN = frozenset(
    {
        *("quant_method", "activation_scheme", "fmt", "weight_block_size", "scale_fmt"),
        *("dequantize", "modules_to_convert", *_IGNORED),
    }
)
"""The settings of `quant_method: fp8`."""
_COMPRESSED = frozenset(
    {
        *("quant_method", "format", "config_groups", "ignore", "quantization_status"),
        *("global_compression_ratio", "version"),
    }
)
"""The settings of `quant_method: compressed-tensors`."""
_REMEDY = {
    "mxfp4": "transformers writes it in bf16: from_pretrained(MODEL, dtype='bfloat16', "
    "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(FOLDER, "
    "save_original_format=False), without which it loses experts; compare that folder",
}
"""A method -> the remedy, for checkpoints that are published in no other form."""


PROJECTIONS = ("linear", "expert_linear")
"""The formulas of operators that quantisers quantise, apart from the head and routers."""


@dataclass(frozen=True, slots=True)
class FP8Weights:
    """Weights of e4m3 with scales. A scale of a tensor, or of a row, is that of one large block."""

    block: tuple[int, int]
    """The rows and the columns of a block; 0 for all of a weight's."""
    powers_of_two: bool = False
    """Whether config.json says that scales are powers of two, `scale_fmt: ue8m0`."""
    ignored: tuple[str, ...] = ()
    """The modules that config.json says are not quantised."""
    scale: str = "_scale_inv"
    """The end of the name of the tensor that has the scales of another."""
    static: bool = False
    """Whether the checkpoint has scales for activations too."""

    @property
    def name(self) -> Quantisation:
        return format_of(self.block)

    def __str__(self) -> str:
        scales = "powers of two" if self.powers_of_two else "float32 scales"
        return f"{block_words(self.block)}, {scales}"

    def blocks(self, shape: Sequence[int]) -> tuple[int, int]:
        """The rows and the columns of a block of a weight `[N, K]`."""
        return sizes_of(self.block, shape)

    def lists(self, module: str) -> bool:
        """Whether the list names a module, or a module that it is in, by its whole name."""
        return any(_is_in(module, entry) for entry in self.ignored)

    def substring(self, module: str) -> str:
        """The entry that is only a part of a module's name; empty if there is none."""
        if self.lists(module):
            return ""
        return next((entry for entry in self.ignored if entry and entry in module), "")


def format_of(block: tuple[int, int]) -> Quantisation:
    """The name of a format, by which a contract limits what it does to log-probs."""
    match block:
        case (0, 0):
            return "fp8-tensor"
        case (1, 0):
            return "fp8-channel"
    return "fp8-block"


def sizes_of(block: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """The rows and the columns of a block of a weight `[N, K]`, where 0 is all of them."""
    return block[0] or shape[0], block[1] or shape[1]


def block_words(block: tuple[int, int]) -> str:
    """A format in words: `fp8 e4m3 in blocks of 128 x 128`."""
    of = {(0, 0): "with one scale for each tensor", (1, 0): "with a scale for each row"}
    return f"fp8 e4m3 {of.get(block, f'in blocks of {block[0]} x {block[1]}')}"


def _is_in(module: str, entry: str) -> bool:
    """Whether an entry names a module or one around it: `lm_head`, `model.layers.0.mlp`, or the
    last parts of a name, e.g. `mlp.gate`; or `re:` and a regular expression."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    parts, named = module.split("."), entry.strip(".").split(".")
    return any(parts[i : i + len(named)] == named for i in range(len(parts) - len(named) + 1))


def stored_format(model: Path, config: Mapping[str, Any]) -> FP8Weights | None:
    """The format of a checkpoint's weights; None if they are not quantised. Raises ModelError for
    any other format than e4m3 with scales, by its name."""
    settings = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise refused(model, f"config.json states quantisation by {settings!r}")
    method = str(settings.get("quant_method"))
    if method not in ("fp8", "compressed-tensors"):
        raise refused(model, f"config.json states quantisation by {method}", method)
    return (_fp8 if method == "fp8" else _compressed_tensors)(model, settings)


def _fp8(model: Path, settings: Mapping[str, Any]) -> FP8Weights:
    """What `quant_method: fp8` states, in blocks or with a scale for each tensor."""
    block, scheme = settings.get("weight_block_size"), settings.get("activation_scheme", "dynamic")
    if block is not None:
        _check_block(model, "weight_block_size", block)
    expected: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "activation_scheme": (scheme, ("dynamic",) if block else ("dynamic", "static")),
        "fmt": (settings.get("fmt"), ("e4m3", None)),
        "scale_fmt": (settings.get("scale_fmt"), ("float", "ue8m0", None)),
    }
    for key, (value, values) in expected.items():
        if value not in values:
            raise refused(model, f"fp8 with {key} = {value!r}")
    _check_known(model, "fp8", settings, _KNOWN)
    if settings.get("modules_to_convert"):
        raise refused(model, f"fp8 with modules_to_convert = {settings['modules_to_convert']!r}")
    listed = next((settings[key] for key in _IGNORED if settings.get(key)), ())
    ignored = tuple(str(entry) for entry in listed)
    if block is None:
        return FP8Weights((0, 0), ignored=ignored, scale="_scale", static=scheme == "static")
    return FP8Weights((block[0], block[1]), settings.get("scale_fmt") == "ue8m0", ignored)


_STRATEGIES = {"tensor": (0, 0), "channel": (1, 0), "block": None}
"""A strategy of compressed-tensors for weights -> the sizes of a block, if it states none."""
_GRIDS = {"tensor", "token", "group"}
"""The strategies for activations."""


def _compressed_tensors(model: Path, settings: Mapping[str, Any]) -> FP8Weights:
    """What `quant_method: compressed-tensors` states: one group of e4m3 for all linear layers."""
    groups = settings.get("config_groups")
    known = settings.get("format") in ("float-quantized", "naive-quantized", None)
    if not known or not isinstance(groups, Mapping) or len(groups) != 1:
        what = settings.get("format") if not known else f"{len(groups or ())} groups"
        raise refused(model, f"compressed-tensors with {what}")
    group = next(iter(groups.values()))
    weights, rows = group.get("weights") or {}, group.get("input_activations") or {}
    block = _STRATEGIES.get(str(weights.get("strategy")))
    if weights.get("strategy") == "block":
        block = weights.get("block_structure")
        _check_block(model, "block_structure", block)
    is_e4m3 = all((x.get("num_bits"), x.get("type")) == (8, "float") for x in (weights, rows))
    symmetric = all(x.get("symmetric", True) for x in (weights, rows))
    if block is None or not is_e4m3 or not symmetric or rows.get("strategy") not in _GRIDS:
        what = f"weights {weights!r} and activations {rows!r}"
        raise refused(model, f"compressed-tensors with {what}")
    if group.get("targets") != ["Linear"] or group.get("output_activations"):
        raise refused(model, f"compressed-tensors with targets = {group.get('targets')!r}")
    _check_known(model, "compressed-tensors", settings, _COMPRESSED)
    ignored = tuple(str(entry) for entry in settings.get("ignore") or ())
    static = not rows.get("dynamic")
    return FP8Weights((block[0], block[1]), ignored=ignored, scale="_scale", static=static)


def _check_known(
    model: Path, method: str, settings: Mapping[str, Any], known: frozenset[str]
) -> None:
    """Raises ModelError for a setting that is none of a format's and is not empty."""
    other = sorted(k for k in settings.keys() - known if settings[k] not in (None, False, [], {}))
    if other:
        raise refused(model, f"{method} with {other[0]} = {settings[other[0]]!r}")


def _check_block(model: Path, key: str, block: object) -> None:
    """Raises ModelError if a setting is not the rows and the columns of a block."""
    if not (isinstance(block, list) and len(block) == 2 and all(_is_size(n) for n in block)):
        raise ModelError(f"{model}/config.json: {key} = {block!r}, not two sizes")


def _is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


def check_not_quantized(model: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if config.json says that the weights are quantised."""
    if (found := stored_format(model, config)) is not None:
        raise refused(model, str(found))


def refused(model: Path, what: str, method: str = "") -> ModelError:
    """The error of weights in a format that is not read."""
    usual = (
        "name the checkpoint before quantisation; patch=module:function in an engine's spec can "
        "quantise its weights after they are loaded"
    )
    return ModelError(
        f"{model}: its weights are quantised ({what}), and this format is not supported here: "
        "operators are recorded and recomputed with weights in bf16, fp16 or fp32, or e4m3 with "
        "scales",
        _REMEDY.get(method, usual),
    )
