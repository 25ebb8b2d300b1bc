"""The records of a trace, written and read in one place. Its tables: `rlk_align.trace.tables`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import Field

from rlk_align.model.families import ModelShape
from rlk_align.results import Cell, CodePlace, GraphReplays
from rlk_align.trace.checksums import CHECKSUMS, Checksums, FileRecord, check_files, read_checksums
from rlk_align.trace.records import Record, load_record

DtypeName = Literal["bfloat16", "float16", "float32", "float64", "int32"]


class SiteRecord(Record):
    """A site of a pass."""

    dtype: DtypeName
    """The engine's own dtype of that site."""
    features: Annotated[int, Field(gt=0)]
    rows: Annotated[int, Field(ge=0)]
    padding: Annotated[int, Field(ge=0)] = 0
    """Columns beyond the features that the engine gave, and that were left out."""


_COPY = "@rank"


def copy_name(site: str, rank: int) -> str:
    """Under which a pass keeps the rows of a site of which that rank has another copy than the
    one that is recorded under the site's own name."""
    return f"{site}{_COPY}{rank}"


def site_of(name: str) -> str:
    """The site of which these rows are, its own or a rank's copy."""
    return name.partition(_COPY)[0]


def copies_of(site: str, names: Iterable[str]) -> dict[int, str]:
    """Rank -> the name of its copies of a site, of those that there are."""
    start = f"{site}{_COPY}"
    return {int(n.removeprefix(start)): n for n in names if n.startswith(start)}


class HeldRows(Record):
    """Consecutive rows of a sample that one rank computes: alone, or with others of which that is
    said too."""

    sample: int
    start: int
    stop: int
    rank: int
    sharing: list[int] = Field(default_factory=list)
    """The ranks that share these rows of the sites in the trace's `shards`; empty where all do."""


class WrongRow(Record):
    """A row of layer 0 that is not what its place in the batch asks for."""

    sample: int
    position: int


class WrongPosition(WrongRow):
    """A row that the engine rotated by another position than its own."""

    effective: int


Attended = Literal["other tokens", "itself alone"]


class WrongBoundary(WrongRow):
    """A row whose attention sees other tokens than its sequence lets it."""

    sees: Attended


WRONG_ROWS = 8
"""How many wrong rows a pass names."""

W = TypeVar("W", bound=WrongRow)


class Measured(Record, Generic[W]):
    """What was measured of the rows of layer 0, in one respect."""

    checked: int = 0
    """Rows that could be measured."""
    wrong: int = 0
    first: list[W] = Field(default_factory=list)
    """The first wrong ones, by sample and position."""

    @classmethod
    def of(cls, checked: int, wrong: int, wrong_rows: Iterable[W]) -> Self:
        """Keeps the first of those that were found."""
        first = sorted(wrong_rows, key=lambda w: (w.sample, w.position))
        return cls(checked=checked, wrong=wrong, first=first[:WRONG_ROWS])

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """Adds up what several parts of a pass measured."""
        wrong_rows = (w for p in parts for w in p.first)
        return cls.of(sum(p.checked for p in parts), sum(p.wrong for p in parts), wrong_rows)


SHIFT_IS_HARMLESS = "attention reads differences of positions alone, so its output cannot change"
"""Where all queries and keys of a sequence are shifted by one number."""


class PositionRecord(Measured[WrongPosition]):
    """Measures by which positions the engine's rotary embedding rotated."""

    shift: tuple[int, int] | None = None
    """By how much the queries and keys of each sequence are shifted, the least and the most of a
    sequence; None where that is not one number within each, or is not known."""

    @property
    def harmless(self) -> bool:
        """Whether positions are wrong, and the differences of two of them are right."""
        return bool(self.wrong) and self.shift is not None

    @property
    def one_shift(self) -> int:
        """The number by which all positions are shifted; 0 if they are not shifted."""
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
        found = super().together(parts)
        shifts = {p.shift for p in parts if p.checked}
        shift = shifts.pop() if len(shifts) == 1 else None
        # Several parts may hold rows of one sequence.
        if shift is not None and len(parts) > 1 and shift[0] != shift[1]:
            shift = None
        return found.model_copy(update={"shift": shift})


BoundaryRecord = Measured[WrongBoundary]
"""Whether sequences begin where they should for the attention."""


class PartRecord(Record):
    """part-N.json: what one process wrote of a pass; gone when the pass is complete."""

    sites: dict[str, SiteRecord]
    positions: PositionRecord
    boundaries: BoundaryRecord
    overwritten: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    held: list[HeldRows] = Field(default_factory=list)
    seconds: float


class PassRecord(Record):
    """pass.json."""

    sites: dict[str, SiteRecord]
    positions: PositionRecord = PositionRecord()
    boundaries: BoundaryRecord = BoundaryRecord()
    unexposed: dict[str, str] = Field(default_factory=dict)
    """Sites that the engine cannot show, each with its reason."""
    overwritten: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """How many live rows of each site an intervention overwrote."""
    held: list[HeldRows] = Field(default_factory=list)
    """Which rank has which rows of the sites that are not in the trace's `shards`; empty where each
    rank has them all."""
    graphs: GraphReplays | None = None
    """The CUDA graphs that a production pass replayed; None where the engine has none."""
    parted: list[Cell] = Field(default_factory=list)
    """Where a production decode sampled another token than the batch has, by sample: its log-probs
    end before that."""
    files: dict[str, FileRecord]
    """Every other file of the pass."""
    seconds: float
    """Wall time of the engine's work in this pass, taps included, writing the trace excluded
    only where it runs after the pass."""


TRACE_FILES = ("trace.json", "prompts.jsonl", "tokens.parquet", "weights.parquet")
"""What every trace holds beside its passes."""


class TraceRecord(Record):
    """trace.json."""

    schema_id: Literal["rlk-align/trace/2"] = "rlk-align/trace/2"
    key: str
    """A digest of everything that decides what the capture holds."""
    engine: str
    version: str
    options: dict[str, Any]
    model: str
    shape: ModelShape
    dtype: str
    """What the engine computed in."""
    environment: dict[str, str]
    attributes: dict[str, Any]
    code: dict[str, CodePlace] = Field(default_factory=dict)
    """Site -> where it is in the engine's code."""
    kernels: dict[str, str] = Field(default_factory=dict)
    """Site -> the implementation of rlk_kernels that computed it, or `own`; empty without them."""
    shards: dict[str, list[tuple[int, int, int]]] = Field(default_factory=dict)
    """Site -> (rank, first feature, feature after the last) of what each rank holds of it; without
    the sites of which each rank holds every feature."""
    stages: dict[str, list[int]] = Field(default_factory=dict)
    """Site -> the ranks of the pipeline's stage that computes it; empty where all ranks do."""
    experts: list[list[int]] = Field(default_factory=list)
    """For each expert the ranks that have it; empty where all ranks have all of them."""
    prompt_ids: dict[str, list[int]]
    """Prompt id -> the ids that this side's own tokenizer gives its text."""


def checked_trace(folder: Path) -> Checksums:
    """The checksums of a trace whose records and tables, each pass.json included, are what was
    written; what the passes hold is compared where it is read. Raises CorruptTrace."""
    checksums = read_checksums(folder)
    checksums.check(folder, (*TRACE_FILES, *checksums.files))
    return checksums


def finished_passes(checksums: Checksums) -> list[str]:
    """The passes of a trace, by its checksums."""
    return [str(Path(name).parent) for name in checksums.files if Path(name).name == "pass.json"]


def check_trace(folder: Path) -> None:
    """Raises CorruptTrace where any file of a trace is missing or is not what was written."""
    for name in finished_passes(checked_trace(folder)):
        record = load_record(PassRecord, folder / name / "pass.json")
        check_files(folder / name, record.files)


def passes_in(folder: Path) -> list[str]:
    """The finished passes of a trace that may not be there yet. Raises CorruptTrace for one that
    is not what was written."""
    return finished_passes(checked_trace(folder)) if (folder / CHECKSUMS).is_file() else []
