"""The holders of weights: a checkpoint's folder or file, or the run of a live engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlk_align.errors import ModelError, UsageError
from rlk_align.model.checkpoint import read_config, resolve_model, weight_files
from rlk_align.model.operators import OPERATORS
from rlk_align.model.quantised import PROJECTIONS, FP8Weights, stored_format
from rlk_align.model.shape import ModelShape, is_tied, read_shape
from rlk_align.model.tensors import beside_decoder
from rlk_align.model.vision import decoder_tensor
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Role, Run
from rlk_align.weights.dcp import METADATA, read_dcp
from rlk_align.weights.deepspeed import deepspeed_folder, read_deepspeed
from rlk_align.weights.lazy import LazyTensor
from rlk_align.weights.naming import Piece, pieces
from rlk_align.weights.parameter import (
    Parameter,
    QuantisedParameter,
    RecordedParameter,
    StoredParameter,
)
from rlk_align.weights.safetensors import read_safetensors

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "mp_rank_*/*.pt")
EMBEDDING, HEAD = "embed", "lm_head"


@dataclass(frozen=True, slots=True)
class WeightHolder:
    """One side of a comparison of weights."""

    path: str
    kind: str
    """`safetensors`, `distributed checkpoint`, or the engine of a run, e.g. `vllm 0.32.0`."""
    parameters: dict[str, Parameter]
    tied: bool = False
    """Whether its config ties the head to the embedding."""
    head_dim: int = 0
    """The number of features of an attention head; 0 if the model's shape is unknown."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Its projections that are not quantised although others are, and config.json does not list
    them -> the entry of its list that is a part of their name."""
    beside: frozenset[str] = frozenset()
    """Its parameters beside those of the decoder: for images, and to predict further tokens."""

    def comparable_with(self, other: "WeightHolder") -> "WeightHolder":
        """This holder, without those beside the decoder if `other` has the decoder alone."""
        if not self.beside or other.beside:
            return self
        kept = {n: p for n, p in self.parameters.items() if n not in self.beside}
        return replace(self, parameters=kept, beside=frozenset())

    def with_head(self, other: "WeightHolder") -> "WeightHolder":
        """This holder, with its embedding as the tied head if only `other` has a head."""
        if HEAD in self.parameters or HEAD not in other.parameters:
            return self
        embedding = self.parameters.get(EMBEDDING)
        if not self.tied or not isinstance(embedding, StoredParameter):
            return self
        return replace(self, parameters={**self.parameters, HEAD: replace(embedding, name=HEAD)})


@dataclass(frozen=True, slots=True)
class Location:
    """The contents of a path, before its names are mapped to canonical ones."""

    path: str
    kind: str
    shape: ModelShape | None
    tied: bool
    tensors: list[LazyTensor]
    trace: Trace | None = None
    quantised: FP8Weights | None = None
    """The format of its quantised weights."""
    beside: tuple[str, ...] = ()
    """What the names of its tensors beside the decoder start with."""

    def holder(self, shape: ModelShape | None) -> WeightHolder:
        """The holder with canonical parameters; `shape`: that of another side, which is used if
        this one has no config."""
        known = self.shape or shape
        head_dim = known.head_dim if known else 0
        if self.trace is not None:
            trace = self.trace
            recorded = {n: RecordedParameter(n, trace, w) for n, w in trace.weights.items()}
            return WeightHolder(self.path, self.kind, dict(recorded), self.tied, head_dim)
        parameters: dict[str, Parameter] = {}
        beside: set[str] = set()
        left_out: dict[str, str] = {}
        end = self.quantised.scale if self.quantised is not None else ""
        scales = {t.name: t for t in self.tensors if end and t.name.endswith(end)}
        # A trainer may store copies, e.g. an average, under longer names: the shortest name is the
        # model's.
        for tensor in sorted(self.tensors, key=lambda t: t.name.count(".")):
            if tensor.name in scales:
                continue
            for piece in pieces(tensor.name, len(tensor.shape), known):
                name = piece.parameter if piece.parameter not in parameters else tensor.name
                parameters[name] = self._parameter(name, tensor, piece, scales)
                if self.quantised is not None and _is_projection(name):
                    module = tensor.name.removesuffix(".weight")
                    is_stored = isinstance(parameters[name], QuantisedParameter)
                    if not is_stored and not self.quantised.lists(module):
                        left_out[name] = self.quantised.substring(module)
                if decoder_tensor(tensor.name).startswith(self.beside):
                    beside.add(name)
        found = frozenset(beside)
        return WeightHolder(self.path, self.kind, parameters, self.tied, head_dim, left_out, found)

    def _parameter(
        self, name: str, tensor: LazyTensor, piece: Piece, scales: Mapping[str, LazyTensor]
    ) -> StoredParameter:
        of = scales.get(f"{tensor.name}{self.quantised.scale}") if self.quantised else None
        if self.quantised is None or of is None:
            return StoredParameter(name, tensor, piece)
        if piece.rows or piece.layer is not None:
            raise ModelError(
                f"{self.path}: {tensor.name} is stored in fp8 and has several operators "
                "or layers: fused weights are not read",
                "store one tensor for each projection, as transformers does",
            )
        return QuantisedParameter(name, tensor, piece, of, self.quantised)


def open_holders(paths: Iterable[tuple[str, Role]]) -> list[WeightHolder]:
    """Opens several holders of one model's weights; only headers are read.

    The role of a path selects a side of a run that compared two engines. The first holder with a
    config determines the model's shape. Raises UsageError for a path that is neither a checkpoint
    nor a run, CorruptCheckpoint or CorruptTrace for a damaged one."""
    locations = [locate(path, role) for path, role in paths]
    shape = next((x.shape for x in locations if x.shape is not None), None)
    tied = any(x.tied for x in locations if x.shape is not None)
    return [replace(x, tied=x.tied or (tied and x.shape is None)).holder(shape) for x in locations]


def locate(path: str, role: Role) -> Location:
    """Finds the weights at a path. Raises the errors of `open_holders`."""
    found = Path(path).expanduser()
    if found.is_dir() and (found / "run.json").is_file():
        trace = Trace(Run.open(path).capture_folder(role))
        record = trace.record
        return Location(path, f"{record.engine} {record.version}", record.shape, False, [], trace)
    if found.is_file() and found.suffix == ".safetensors":
        return _checkpoint(path, found.parent, "safetensors", read_safetensors(found))
    if found.is_file():
        raise ModelError(f"{path} is not a file of weights that can be read", _SUPPORTED)
    folder = resolve_model(path)
    if (folder / METADATA).is_file():
        return _checkpoint(path, folder, "distributed checkpoint", read_dcp(folder))
    if not any(folder.glob("*.safetensors")) and (states := deepspeed_folder(folder)):
        return _checkpoint(path, states, *read_deepspeed(states))
    tensors = [t for file in _safetensors(folder, path) for t in read_safetensors(file)]
    return _checkpoint(path, folder, "safetensors", tensors)


_SUPPORTED = (
    "give a folder or file of safetensors, a distributed checkpoint (the folder with .metadata), "
    "a DeepSpeed checkpoint, or a run's folder"
)


def _safetensors(folder: Path, path: str) -> list[Path]:
    if any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        return weight_files(folder)
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("adapter_"))
    if files:
        return files
    pickles = [p for pattern in _PICKLES for p in folder.glob(pattern)]
    if pickles:
        raise ModelError(
            f"{path} has only pickles ({pickles[0].name}), which are not read, because loading a "
            "pickle runs code",
            "have the trainer save safetensors or a distributed checkpoint (Megatron: "
            "--ckpt-format torch_dist)",
        )
    inside = sorted(p.parent.name for p in folder.glob(f"*/{METADATA}"))
    fix = f"give one of the checkpoints in it: {', '.join(inside)}" if inside else _SUPPORTED
    raise ModelError(f"{path} has no weights that can be read", fix)


def _checkpoint(path: str, folder: Path, kind: str, tensors: list[LazyTensor]) -> Location:
    for near in (folder, folder / "huggingface", folder.parent, folder.parent / "huggingface"):
        if (near / "config.json").is_file():
            tied, shape = is_tied(read_config(near)), _shape(near)
            beside = beside_decoder(near, shape) if shape else ()
            quantised = _quantised(near)
            return Location(path, kind, shape, tied, tensors, None, quantised, beside)
    return Location(path, kind, None, False, tensors)


def _quantised(folder: Path) -> FP8Weights | None:
    """The format of quantised weights; None for one that is not read, whose stored tensors are
    compared as they are."""
    try:
        return stored_format(folder, read_config(folder))
    except ModelError:
        return None


def _is_projection(name: str) -> bool:
    operator = OPERATORS.get(name.rpartition(".")[2])
    return operator is not None and operator.formula in PROJECTIONS and operator.site != "logits"


def _shape(folder: Path) -> ModelShape | None:
    """The model's shape; None for an unknown family, whose stored names are compared."""
    try:
        return read_shape(folder)
    except UsageError:
        return None
