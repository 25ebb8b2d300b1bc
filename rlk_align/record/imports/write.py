"""Source + sequences -> the recording of one side."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from rlk_align.engines.common.layout import of_outputs
from rlk_align.engines.common.parameters import LiveParameter, ParameterRecord, record_parameter
from rlk_align.engines.manifest import write_weights
from rlk_align.engines.row_checks import checks_of
from rlk_align.errors import DumpError
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.prompts import Prompt, TokenBatch, save_prompts
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import model_sites, site_parameters
from rlk_align.record.imports.places import FUSED, choose, places_of
from rlk_align.record.imports.sequences import Placed, Sequences
from rlk_align.record.imports.source import Forward, Source
from rlk_align.record.imports.values import OtherValues, read_place
from rlk_align.record.shared.shard import Shard
from rlk_align.results import SideName
from rlk_align.trace.records import save_record, writing
from rlk_align.trace.schema import TraceRecord, copy_name
from rlk_align.trace.writer import PassWriter


def write_recording(
    shard: Shard, side: SideName, source: Source, sequences: Sequences, model: Path,
    shape: ModelShape, format: str,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Writes the shard, which the caller completes, and returns the sites that it has, and what a
    reader should know. `model`: the checkpoint. Raises DumpError for files that cannot be read, or
    have no row of any site."""
    batch = TokenBatch(tuple(sequences.samples))
    of_logprobs = "decode" if side == "rollout" else "prefill"
    names = {row.passname for of_forward in sequences.placed for row in of_forward}
    if any(each is not None for each in sequences.logprobs):
        names.add(of_logprobs)
    checks = checks_of(model, shape)
    writers = {
        name: shard.open_pass(name, _keep_all, checks=checks, vocab=shape.vocab)
        for name in sorted(names)
    }
    imported = _Imported(source, sequences, shape, writers)
    for forward, placed in zip(source.forwards, sequences.placed, strict=True):
        if placed:
            imported.add(forward, placed)
    if of_logprobs in writers:
        imported.add_logprobs(writers[of_logprobs], of_logprobs)
    if not any(imported.written.values()):
        raise DumpError(
            f"no tensor of {source.tool} is one of this model's: {imported.unmapped()}",
            "modules need the names of the Hugging Face checkpoint; see docs/import.md",
        )
    for name, writer in writers.items():
        writer.finish(imported.unexposed(name))
    parameters = list(_parameters(source, shape))
    with writing(shard.about):
        write_weights(shard.about / "weights.parquet", parameters)
        save_prompts(
            [Prompt(s.prompt_id, None, s.prompt_ids) for s in batch.samples],
            shard.about / "prompts.jsonl",
        )
    record = TraceRecord(
        key=f"{side}, imported from {format}",
        engine=format,
        version="imported",
        options={"tp": source.tp} if source.tp > 1 else {},
        model=str(model),
        shape=shape,
        dtype=imported.dtype,
        environment=dict(source.environment),
        attributes=dict(source.attributes),
        shards=_shards(shape, source.tp),
        prompt_ids={},
        imported=source.tool,
    )
    save_record(record, shard.about / "trace.json")
    chosen = range(len(batch.samples))
    shard.finish(batch, chosen, sequences=len(chosen), seen=len(chosen))
    notes = []
    if imported.computed:
        notes.append(
            f"{imported.computed} log-probs are those of the files' logits, in float32, without a "
            "temperature"
        )
    return sorted({site for sites in imported.written.values() for site in sites}), notes


def _keep_all(_site: str, sample: np.ndarray, _position: np.ndarray) -> np.ndarray:
    return np.ones(len(sample), dtype=bool)


class _Imported:
    """Writes rows, and remembers which sites it has and why it lacks others."""

    def __init__(
        self,
        source: Source,
        sequences: Sequences,
        shape: ModelShape,
        writers: dict[str, PassWriter],
    ) -> None:
        self._source, self._sequences, self._shape = source, sequences, shape
        self._writers = writers
        self._places = places_of(shape)
        self.written: dict[str, set[str]] = {name: set() for name in writers}
        """Pass -> its sites."""
        self.computed = 0
        """The number of log-probs that were computed from logits."""
        self._reasons: dict[str, str] = {}
        self._dtypes: Counter[str] = Counter()

    def add(self, forward: Forward, placed: list[Placed]) -> None:
        """Writes the rows of a forward."""
        chosen = choose(self._places, forward.taps)
        for place in dict.fromkeys(chosen.values()):
            wanted = [site for site in place.sites if chosen.get(site) == place]
            try:
                values = read_place(place, forward, self._shape)
            except OtherValues as error:
                self._reasons |= dict.fromkeys(wanted, str(error))
                continue
            last_only = place.tap in forward.of_last
            for site in wanted:
                named = {site: values[site].rows} | {
                    copy_name(site, rank): copy for rank, copy in values[site].copies.items()
                }
                for name, rows in named.items():
                    for passname in self._writers:
                        of_pass = [each for each in placed if each.passname == passname]
                        found = [self._rows(site, forward, each, last_only) for each in of_pass]
                        self._write(passname, site, name, rows, found)

    def _rows(
        self, site: str, forward: Forward, placed: Placed, last_only: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a segment that a site has, int64 `[N]` each: their numbers in the tap's
        values, their samples and their positions."""
        rows, position = placed.segment.rows[placed.new], placed.position
        if last_only:
            at_end = rows == placed.segment.rows[-1]
            position = position[at_end]
            rows = np.full(len(position), forward.segments.index(placed.segment))
        if self._shape.operator_of(site).row == "sampled token":
            sampled = self._sequences.samples[placed.sample].sampled_positions
            there = (position >= sampled.start) & (position < sampled.stop)
            rows, position = rows[there], position[there]
        return rows, np.full(len(rows), placed.sample), position

    def _write(
        self,
        passname: str,
        site: str,
        name: str,
        values: torch.Tensor,
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    ) -> None:
        """`name`: that of the site, or of a rank's copies."""
        if not sum(len(rows) for rows, _, _ in found):
            return
        rows, sample, position = map(np.concatenate, zip(*found, strict=True))
        chosen = values[torch.from_numpy(rows)]
        self._writers[passname](name, chosen, sample, position)
        self.written[passname].add(site)
        self._dtypes[str(values.dtype).removeprefix("torch.")] += len(rows)
        if name == "logits":
            self._add_computed(passname, chosen[:, : self._shape.vocab], sample, position)

    def _add_computed(
        self, passname: str, logits: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        """Writes the log-probs that logits `[N, V]` give, for samples without known ones."""
        unknown = np.array([self._sequences.logprobs[s] is None for s in sample])
        if not unknown.any():
            return
        sample, position = sample[unknown], position[unknown]
        ids = [self._sequences.samples[s].ids[p + 1] for s, p in zip(sample, position, strict=True)]
        logp = torch.log_softmax(logits[torch.from_numpy(unknown)].float(), dim=-1)
        rows = logp.gather(1, torch.tensor(ids).unsqueeze(1))
        self._writers[passname]("logprob", rows, sample, position)
        self.written[passname].add("logprob")
        self.computed += len(rows)

    def add_logprobs(self, writer: PassWriter, passname: str) -> None:
        """Writes the log-probs that are known beside the files."""
        for number, (sample, known) in enumerate(
            zip(self._sequences.samples, self._sequences.logprobs, strict=True)
        ):
            if known is None:
                continue
            position = np.array(sample.sampled_positions)
            value = known[position + 1]
            there = ~np.isnan(value)
            wide = torch.from_numpy(value[there]).unsqueeze(1)
            rows = wide.float() if torch.equal(wide.float().double(), wide) else wide
            if len(rows):
                writer("logprob", rows, np.full(len(rows), number), position[there])
                self.written[passname].add("logprob")

    @property
    def dtype(self) -> str:
        """The dtype of most values."""
        return self._dtypes.most_common(1)[0][0] if self._dtypes else self._shape.dtype

    def unexposed(self, passname: str) -> dict[str, str]:
        """Site -> why a pass has no row of it."""
        nothing = f"the files of {self._source.tool} have no tensor of it"
        return {
            site.name: self._reasons.get(site.name, nothing)
            for site in model_sites(self._shape)
            if site.name not in self.written[passname]
        }

    def unmapped(self) -> str:
        """Why no site was written, or some of the modules that the files have."""
        taps = {tap.module: None for forward in self._source.forwards for tap in forward.taps}
        shown = ", ".join(list(taps)[:_SHOWN])
        return next(iter(self._reasons.values()), f"they have {shown or 'none'}")


_SHOWN = 4


def _shards(shape: ModelShape, tp: int) -> dict[str, list[tuple[int, int, int]]]:
    """As in `TraceRecord.shards`."""
    shards = {}
    for site in model_sites(shape):
        layout = of_outputs((site.name,), shape, tp) if tp > 1 and not site.sparse else None
        if layout is not None:
            shards[site.name] = [(s.rank, s.start, s.stop) for s in layout.shards(site.name, 1)]
    return shards


def _parameters(source: Source, shape: ModelShape) -> Iterator[ParameterRecord]:
    """The canonical parameters that the files have."""
    for site in model_sites(shape):
        for parameter in site_parameters(site, shape):
            value = _parameter(source, parameter, site.name, shape)
            if value is not None:
                yield record_parameter(LiveParameter(parameter, value))


def _parameter(source: Source, name: str, site: str, shape: ModelShape) -> torch.Tensor | None:
    """A canonical parameter in the checkpoint's layout; None if the files lack it in this shape."""
    operator = shape.operator_of(site)
    wanted = tuple(shape.of_site(site).size(d) for d in operator.weight)
    tensor = tensor_name(name, shape.family.modules)
    value: torch.Tensor | None = None
    if tensor in source.parameters:
        value = source.parameters[tensor]()
    else:
        layer, _, op = site.rpartition(".")
        path, _, _ = tensor.rpartition(f".{operator.tensor}")
        for module, ops in FUSED.items():
            fused = ".".join((*path.split(".")[:-1], module, operator.tensor))
            if op in ops and fused in source.parameters:
                layout = of_outputs([f"{layer}.{each}" for each in ops], shape, 1)
                assert layout is not None
                value = layout.assemble(site, [source.parameters[fused]()], 0)
    return value if value is not None and tuple(value.shape) == wanted else None
