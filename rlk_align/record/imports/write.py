"""Source + sequences -> the recording of one side."""

from collections.abc import Iterator
from contextlib import ExitStack
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
from rlk_align.record.imports.passes import ImportedPasses
from rlk_align.record.imports.places import FUSED
from rlk_align.record.imports.sequences import Sequences
from rlk_align.record.imports.source import Source
from rlk_align.record.shared.shard import Shard
from rlk_align.results import SideName
from rlk_align.trace.records import save_record, writing
from rlk_align.trace.schema import TraceRecord


def write_recording(
    shard: Shard, side: SideName, source: Source, sequences: Sequences, model: Path,
    shape: ModelShape, format: str,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Writes the shard, which the caller completes, and returns the sites that it has, and what a
    reader should know. `model`: the checkpoint. Raises DumpError for files that cannot be read, or
    have no row of any site."""
    of_logprobs = "decode" if side == "rollout" else "prefill"
    names = {row.passname for of_forward in sequences.placed for row in of_forward}
    if any(each is not None for each in sequences.logprobs):
        names.add(of_logprobs)
    checks = checks_of(model, shape)
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                shard.open_pass(name, _keep_all, checks=checks, vocab=shape.vocab)
            )
            for name in sorted(names)
        }
        passes = ImportedPasses(source, sequences, shape, writers)
        for forward, placed in zip(source.forwards, sequences.placed, strict=True):
            if placed:
                passes.add(forward, placed)
        if of_logprobs in writers:
            passes.add_logprobs(of_logprobs)
        if not passes.sites:
            raise DumpError(
                f"no tensor of {source.tool} is one of this model's: {passes.unmapped()}",
                "modules need the names of the Hugging Face checkpoint; see docs/import.md",
            )
        for name, writer in writers.items():
            writer.finish(passes.unexposed(name))
    _describe(shard, side, source, passes.dtype, model, shape, format)
    batch = TokenBatch(tuple(sequences.samples))
    chosen = range(len(batch.samples))
    with writing(shard.about):
        save_prompts(
            [Prompt(s.prompt_id, None, s.prompt_ids) for s in batch.samples],
            shard.about / "prompts.jsonl",
        )
    shard.finish(batch, chosen, sequences=len(chosen), seen=len(chosen))
    return passes.sites, passes.notes


def _keep_all(_site: str, sample: np.ndarray, _position: np.ndarray) -> np.ndarray:
    return np.ones(len(sample), dtype=bool)


def _describe(
    shard: Shard, side: SideName, source: Source, dtype: str, model: Path, shape: ModelShape,
    format: str,
) -> None:  # fmt: skip
    """Writes the digests of the parameters that the files have, and what they say of the side."""
    parameters = list(_parameters(source, shape))
    with writing(shard.about):
        write_weights(shard.about / "weights.parquet", parameters)
    record = TraceRecord(
        key=f"{side}, imported from {format}",
        engine=format,
        version="imported",
        options={"tp": source.tp} if source.tp > 1 else {},
        model=str(model),
        shape=shape,
        dtype=dtype,
        environment={},
        attributes=dict(source.attributes),
        shards=_shards(shape, source.tp),
        prompt_ids={},
        imported=source.tool,
    )
    save_record(record, shard.about / "trace.json")


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
