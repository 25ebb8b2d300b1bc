"""The records of a trace. The columns of its tables are in `rlk_align.trace.tables`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import Field

from rlk_align.errors import RlkError
from rlk_align.model.shape import ModelShape
from rlk_align.results import Cell, CodePlace, GraphReplays, Quantisation
from rlk_align.trace.checksums import CHECKSUMS, Checksums, FileRecord, check_files, read_checksums
from rlk_align.trace.records import Record, load_record

DtypeName = Literal["bfloat16", "float16", "float32", "float64", "int32"]


class SiteRecord(Record):
    """A site of a pass."""

    dtype: DtypeName
    """The engine's dtype of that site."""
    features: Annotated[int, Field(gt=0)]
    rows: Annotated[int, Field(ge=0)]
    padding: Annotated[int, Field(ge=0)] = 0
    """The number of padding columns of the engine's value, which were left out."""


def sites_of_parts(
    parts: Iterable[Mapping[str, SiteRecord]], error: type[RlkError], who: str
) -> dict[str, SiteRecord]:
    """The sites of all parts of a pass, each with the rows of all. Raises `error`, whose text
    begins with `who`, if parts disagree on a site's dtype or width."""
    sites: dict[str, SiteRecord] = {}
    for part in parts:
        for name, record in part.items():
            known = sites.get(name)
            if known and (known.dtype, known.features) != (record.dtype, record.features):
                raise error(
                    f"{who} disagree on {name}: {known.dtype}[{known.features}] "
                    f"and {record.dtype}[{record.features}]"
                )
            rows = record.rows + (known.rows if known else 0)
            sites[name] = record.model_copy(update={"rows": rows})
    return sites


_COPY = "@rank"


def copy_name(site: str, rank: int) -> str:
    """The name of a site's rows of which a rank has another copy than is recorded."""
    return f"{site}{_COPY}{rank}"


def site_of(name: str) -> str:
    """The site of rows with that name, which is the site's or that of a rank's copies."""
    return name.partition(_COPY)[0]


def copies_of(site: str, names: Iterable[str]) -> dict[int, str]:
    """Rank -> the name of its copies of a site, for those among `names`."""
    start = f"{site}{_COPY}"
    return {int(n.removeprefix(start)): n for n in names if n.startswith(start)}


class HeldRows(Record):
    """Consecutive rows of a sample that a rank computes; other ranks may compute the same rows."""

    sample: int
    start: int
    stop: int
    rank: int
    sharing: list[int] = Field(default_factory=list)
    """The ranks that share the features of these rows; empty if all ranks share them."""


class WrongRow(Record):
    """A row of layer 0 that does not match its position in the batch."""

    sample: int
    position: int


class WrongPosition(WrongRow):
    """A row that the engine rotated by a wrong position."""

    effective: int


Attended = Literal["other tokens", "itself alone"]


class WrongBoundary(WrongRow):
    """A row whose attention sees the wrong tokens."""

    sees: Attended


WRONG_ROWS = 8
"""The largest number of wrong rows that a pass lists."""

W = TypeVar("W", bound=WrongRow)


class Measured(Record, Generic[W]):
    """The result of one kind of measurement of the rows of layer 0."""

    checked: int = 0
    """The number of rows that could be measured."""
    wrong: int = 0
    """The number of wrong rows."""
    first: list[W] = Field(default_factory=list)
    """The first wrong rows, by sample and position."""

    @classmethod
    def of(cls, checked: int, wrong: int, wrong_rows: Iterable[W]) -> Self:
        """Keeps the first of the wrong rows."""
        first = sorted(wrong_rows, key=lambda w: (w.sample, w.position))
        return cls(checked=checked, wrong=wrong, first=first[:WRONG_ROWS])

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """Adds up the measurements of several parts of a pass."""
        wrong_rows = (w for p in parts for w in p.first)
        return cls.of(sum(p.checked for p in parts), sum(p.wrong for p in parts), wrong_rows)


SHIFT_IS_HARMLESS = "attention reads differences of positions alone, so its output cannot change"
"""Why it does not matter that all queries and keys of a sequence have the same shift."""


class PositionRecord(Measured[WrongPosition]):
    """The measured positions of the engine's rotary embedding."""

    shift: tuple[int, int] | None = None
    """The smallest and the largest shift of a sequence's queries and keys; None if the shift is not
    constant in each sequence, or is unknown."""

    @property
    def harmless(self) -> bool:
        """Whether positions are wrong and all differences of positions are right."""
        return bool(self.wrong) and self.shift is not None

    @property
    def one_shift(self) -> int:
        """The common shift of all positions; 0 if there is none."""
        return self.shift[0] if self.shift and self.shift[0] == self.shift[1] else 0

    @property
    def shift_words(self) -> str:
        """E.g. `+1`, or `-3 to +5, one shift in each sequence`."""
        assert self.shift is not None
        least, most = self.shift
        one = f"{least:+d}"
        return one if least == most else f"{one} to {most:+d}, one shift in each sequence"

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        shifts = {p.shift for p in parts if p.checked}
        shift = shifts.pop() if len(shifts) == 1 else None
        # Several parts may have rows of the same sequence.
        if shift is not None and len(parts) > 1 and shift[0] != shift[1]:
            shift = None
        return super().together(parts).model_copy(update={"shift": shift})


BoundaryRecord = Measured[WrongBoundary]
"""The measured boundaries of sequences in the attention."""


class PartRecord(Record):
    """part-N.json: the part of a pass that one process wrote; deleted when the pass is complete."""

    sites: dict[str, SiteRecord]
    positions: PositionRecord
    boundaries: BoundaryRecord
    overwritten: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    held: list[HeldRows] = Field(default_factory=list)
    cached: dict[int, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    seconds: float


class PassRecord(Record):
    """pass.json."""

    sites: dict[str, SiteRecord]
    positions: PositionRecord = PositionRecord()
    boundaries: BoundaryRecord = BoundaryRecord()
    unexposed: dict[str, str] = Field(default_factory=dict)
    """Sites that the engine cannot expose -> the reason."""
    overwritten: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """The number of live rows of each site that an intervention overwrote."""
    held: list[HeldRows] = Field(default_factory=list)
    """The rows that each rank computes; empty if each rank computes all rows."""
    cached: dict[int, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    """Sample -> the number of its first tokens whose keys, values and states the engine says that
    it took from its cache, where another sample left them."""
    graphs: GraphReplays | None = None
    """The CUDA graphs that a production pass replayed; None if the engine has none."""
    parted: list[Cell] = Field(default_factory=list)
    """The (sample, position) at which a production decode first sampled another token than the
    batch has; the sample's log-probs end before it."""
    files: dict[str, FileRecord]
    """Every other file of the pass."""
    seconds: float
    """The wall time of the pass, including taps and the writing of values during the pass."""


COMPILED = "its job runs compiled code or CUDA graphs, inside of which no tap sees a value"
"""The reason in `PassRecord.unexposed` for which a recorded job's rows of a site are not expected:
log-probs are judged, and operators are listed."""


TRACE_FILES = ("trace.json", "prompts.jsonl", "tokens.parquet", "weights.parquet")
"""The files of every trace outside its passes."""


CUTS = "cuts"
"""The key of `TraceRecord.environment` by which an engine's own kernels cut off the lower 16 bits
of float32 numbers instead of rounding them to bfloat16; its value says why."""


class LoraModule(Record):
    """The adapter of one projection, as an engine computes with it."""

    rank: Annotated[int, Field(gt=0)]
    dtype: DtypeName
    """The dtype of A and B in the engine."""
    scale: float
    """The factor that it multiplies by; 1 if the scale is folded into B."""
    kernels: bool = False
    """Whether the kernels compute it, which round x · Aᵀ and neither the product with B nor its
    product with the scale."""
    digests: dict[str, tuple[str, str]]
    """The digests of A and of scale · B by the dtype to which A and B are rounded first: the dtype
    that the engine computes in and, if that is float32, narrower ones. An engine that folds the
    scale into B has these values."""
    cast: tuple[str, str] = ("", "")
    """For A and for B the dtype, another than the engine's, to which it was cast: the engine holds
    it in that dtype, or every entry is a number of it; empty if there is none."""
    sums: list[float]
    """The sums of the columns of scale · B, of which a multiple has multiples."""
    zero: bool
    """Whether A or B is all zeros, so that the adapter changes nothing."""


class LoraRecord(Record):
    """The adapter of an engine."""

    path: str
    scale: float
    """The scale that adapter_config.json states."""
    modules: dict[str, LoraModule]
    """Site -> its adapter, for each projection that has one in the live model, or had one before it
    was merged."""
    merged: str = ""
    """What merged the adapter into the weights; empty if it is applied beside them."""


class QuantisedRecord(Record):
    """The stored weights of an engine's checkpoint, if some of them are quantised."""

    name: Quantisation = "fp8-block"
    format: str
    """In words, e.g. `fp8 e4m3 in blocks of 128 x 128, float32 scales`."""
    block: tuple[int, int]
    """The rows and the columns of a block; 0 for all of a weight's."""
    powers_of_two: bool
    """Whether config.json says that scales are powers of two."""
    ignored: list[str]
    """The modules that config.json says are not quantised."""
    weights: dict[str, tuple[str, str, str]]
    """Parameter -> the digests of its values, of its scales, and of the weight that they stand for,
    dequantised and rounded to the engine's dtype."""
    unquantised: list[str]
    """The parameters of projections that are not quantised."""
    left_out: dict[str, str]
    """Those among them that config.json does not list -> the entry of its list that is a part of
    their name; empty if there is none."""
    listed: list[str]
    """The quantised parameters that config.json lists as not quantised."""


class Grid(Record):
    """The numbers of e4m3, times a scale, to which an engine rounds the inputs of a product."""

    columns: Annotated[int, Field(ge=0)]
    """The number of consecutive entries of a row that share a scale; 0 for the whole row."""
    scale: float | None = None
    """The static scale of all entries; None if it is the largest magnitude of the group / 448."""
    by_batch: bool = False
    """Whether all rows of a forward share a scale."""
    few_bits: bool = False
    """Whether the sums of the product keep fewer bits than float32, as those of fp8 on the tensor
    cores of Hopper GPUs do."""
    powers_of_two: bool = False
    """Whether scales are rounded up to powers of two."""


class QuantisedProduct(Record):
    """A product with a weight in fp8, as an engine computes it."""

    block: tuple[int, int]
    """The rows and the columns of a block of the weight; 0 for all of them."""
    digests: tuple[str, str]
    """Those of the live values `[N, K]` and scales `[ceil(N / R), ceil(K / C)]`. The weight that is
    recorded is their product in float32."""
    fused: list[str]
    """The parameters that are in one matrix with it in the engine, and itself. A weight with one
    scale has that of all of them."""
    grids: list[Grid]
    """The grid of its inputs; empty if they are not rounded, and several if the engine chooses one
    by the number of rows in a forward."""
    kernel: str
    """The engine's name of what computes it."""


class CacheRecord(Record):
    """The quantised keys and values of an engine's attention."""

    dtype: Literal["float8_e4m3fn"] = "float8_e4m3fn"
    scales: dict[int, tuple[float, float]]
    """Layer -> the scale of its keys and that of its values, by which they are divided first."""
    queries: dict[int, float] = Field(default_factory=dict)
    """Layer -> the scale of its queries; empty if they are not quantised."""
    cuts: bool = False
    """Whether numbers are cut off to e4m3 instead of rounded."""
    backend: str
    """The engine's name of the attention and, on a CPU, of its instructions."""


class TraceRecord(Record):
    """trace.json."""

    schema_id: Literal["rlk-align/trace/2"] = "rlk-align/trace/2"
    key: str
    """A digest of everything that affects the contents of the capture."""
    engine: str
    version: str
    options: dict[str, Any]
    model: str
    shape: ModelShape
    dtype: str
    """The dtype that the engine computed in."""
    environment: dict[str, str]
    attributes: dict[str, Any]
    code: dict[str, CodePlace] = Field(default_factory=dict)
    """Site -> where the engine's code computes it."""
    kernels: dict[str, str] = Field(default_factory=dict)
    """Site -> the implementation of rlk_kernels that computed it, or `own`; empty without them."""
    shards: dict[str, list[tuple[int, int, int]]] = Field(default_factory=dict)
    """Site -> (rank, first feature, feature after the last) of each rank's shard, without the sites
    of which each rank has every feature."""
    stages: dict[str, list[int]] = Field(default_factory=dict)
    """Site -> the ranks of the pipeline stage that computes it; empty for a single stage."""
    experts: list[list[int]] = Field(default_factory=list)
    """The ranks that have each expert; empty if all ranks have all experts."""
    adapters: list[LoraRecord | None] = Field(default_factory=list)
    """The LoRA adapters that the engine computes with; empty without any. Sample i has the adapter
    of the place i modulo their number, where None is none."""
    quantised: QuantisedRecord | None = None
    """The stored weights, if some of them are quantised."""
    products: dict[str, QuantisedProduct] = Field(default_factory=dict)
    """Parameter -> how the engine multiplies by it, for those that it holds in fp8."""
    cache: CacheRecord | None = None
    """The keys and values of attention, if they are quantised."""
    prompt_ids: dict[str, list[int]]
    """Prompt id -> the token ids of its text by this side's tokenizer."""
    seed: int | None = None
    """The seed with which its responses were sampled; see `request_seed`. None if others sampled
    them, or an earlier version captured them."""
    recorded: str = ""
    """The step of a job that recorded it as it ran, once and with taps; empty for a capture."""
    lost: list[int] = Field(default_factory=list)
    """The ranks of that job that did not complete their shards."""
    imported: str = ""
    """The tool whose files it was imported from; empty otherwise. Such a trace has those parameters
    and attributes that the files have, and says nothing of others."""
    old_weights: dict[str, str] = Field(default_factory=dict)
    """Parameter -> which side of that job has an old value of it, in words."""

    @property
    def adapter(self) -> LoraRecord | None:
        """The adapter of all samples; None if they have several or none."""
        return self.adapters[0] if len(self.adapters) == 1 else None


def request_seed(seed: int, number: int) -> int:
    """The seed of the request of sample `number` in a pass that samples by `seed`."""
    return seed * 1_000_003 + number


def checked_trace(folder: Path) -> Checksums:
    """The checksums of a trace, after its records and tables and each pass.json were compared with
    them; other files of a pass are compared when they are read. Raises CorruptTrace."""
    checksums = read_checksums(folder)
    checksums.check(folder, (*TRACE_FILES, *checksums.files))
    return checksums


def finished_passes(checksums: Checksums) -> list[str]:
    """The finished passes of a trace, by its checksums."""
    return [str(Path(name).parent) for name in checksums.files if Path(name).name == "pass.json"]


def check_trace(folder: Path) -> None:
    """Raises CorruptTrace if any file of a trace is missing or was changed."""
    for name in finished_passes(checked_trace(folder)):
        record = load_record(PassRecord, folder / name / "pass.json")
        check_files(folder / name, record.files)


def passes_in(folder: Path) -> list[str]:
    """The finished passes of a trace, if it exists. Raises CorruptTrace for changed files."""
    return finished_passes(checked_trace(folder)) if (folder / CHECKSUMS).is_file() else []
