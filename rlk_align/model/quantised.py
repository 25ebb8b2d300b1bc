"""The stored formats of quantised weights, by config.json. One of them is read: blocks of e4m3 with
a scale each, `weight` and `weight_scale_inv`, as DeepSeek's and Qwen's checkpoints have them. All
others are refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_align.errors import ModelError

E4M3 = "F8_E4M3"
"""The name of e4m3 in safetensors."""
KEYS = ("quantization_config", "compression_config")
"""The keys of config.json for quantised weights."""
SCALE = "_scale_inv"
"""The end of the name of the tensor that has the scales of another."""
_IGNORED = ("modules_to_not_convert", "ignored_layers")
_KNOWN = frozenset(
    {
        *("quant_method", "activation_scheme", "fmt", "weight_block_size", "scale_fmt"),
        *("dequantize", "modules_to_convert", *_IGNORED),
    }
)
"""The settings of a block-wise fp8 checkpoint."""
_REMEDY = {
    "mxfp4": "transformers writes it in bf16: from_pretrained(MODEL, dtype='bfloat16', "
    "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(FOLDER, "
    "save_original_format=False), without which it loses experts; compare that folder",
}
"""A method -> the remedy, for checkpoints that are published in no other form."""


PROJECTIONS = ("linear", "expert_linear")
"""The formulas of operators that quantisers quantise, apart from the head and routers."""
FP8_BLOCK = "fp8-block"
"""The name of the format, by which a contract limits what it does to log-probs."""


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """Weights in blocks of e4m3, each with a scale."""

    block: tuple[int, int]
    """The rows and the columns of a block."""
    powers_of_two: bool = False
    """Whether config.json says that scales are powers of two, `scale_fmt: ue8m0`."""
    ignored: tuple[str, ...] = ()
    """The modules that config.json says are not quantised."""

    def __str__(self) -> str:
        scales = "powers of two" if self.powers_of_two else "float32 scales"
        return f"fp8 e4m3 in blocks of {self.block[0]} x {self.block[1]}, {scales}"

    def lists(self, module: str) -> bool:
        """Whether the list names a module, or a module that it is in, by its whole name."""
        return any(_is_in(module, entry) for entry in self.ignored)

    def substring(self, module: str) -> str:
        """The entry that is only a part of a module's name; empty if there is none."""
        if self.lists(module):
            return ""
        return next((entry for entry in self.ignored if entry and entry in module), "")


def _is_in(module: str, entry: str) -> bool:
    """Whether an entry names a module or one around it: `lm_head`, `model.layers.0.mlp`, or the
    last parts of a name, e.g. `mlp.gate`."""
    parts, named = module.split("."), entry.strip(".").split(".")
    return any(parts[i : i + len(named)] == named for i in range(len(parts) - len(named) + 1))


def stored_format(model: Path, config: Mapping[str, Any]) -> BlockFP8 | None:
    """The format of a checkpoint's weights; None if they are not quantised. Raises ModelError for
    any other format than blocks of fp8, by its name."""
    settings = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise refused(model, f"config.json states quantisation by {settings!r}")
    method = str(settings.get("quant_method"))
    if method != "fp8":
        raise refused(model, f"config.json states quantisation by {method}", method)
    block, scheme = settings.get("weight_block_size"), settings.get("activation_scheme", "dynamic")
    if block is None:
        raise refused(model, "fp8 with one scale for each tensor, as config.json has no blocks")
    if not (isinstance(block, list) and len(block) == 2 and all(_is_size(n) for n in block)):
        raise ModelError(f"{model}/config.json: weight_block_size = {block!r}, not two sizes")
    expected: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "activation_scheme": (scheme, ("dynamic",)),
        "fmt": (settings.get("fmt"), ("e4m3", None)),
        "scale_fmt": (settings.get("scale_fmt"), ("float", "ue8m0", None)),
    }
    for key, (value, values) in expected.items():
        if value not in values:
            raise refused(model, f"fp8 with {key} = {value!r}")
    if other := sorted(k for k in settings.keys() - _KNOWN if settings[k] not in (None, False, [])):
        raise refused(model, f"fp8 with {other[0]} = {settings[other[0]]!r}")
    if settings.get("modules_to_convert"):
        raise refused(model, f"fp8 with modules_to_convert = {settings['modules_to_convert']!r}")
    listed = next((settings[key] for key in _IGNORED if settings.get(key)), ())
    ignored = tuple(str(entry) for entry in listed)
    return BlockFP8((block[0], block[1]), settings.get("scale_fmt") == "ue8m0", ignored)


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
        "operators are recorded and recomputed with weights in bf16, fp16 or fp32, or dequantised "
        "from fp8 in blocks",
        _REMEDY.get(method, usual),
    )
