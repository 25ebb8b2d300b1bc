"""The manifest of a capture: the engine's live weights, its attributes, and the environment that it
runs in, written before any pass."""

import importlib.metadata
import platform
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlk_align.engines.base import Engine
from rlk_align.engines.common.parameters import ParameterRecord
from rlk_align.engines.common.quantised import record_quantised
from rlk_align.engines.known_faults import known_faults
from rlk_align.engines.process.job import Job
from rlk_align.engines.process.versions import versions
from rlk_align.engines.tested import untested
from rlk_align.files import whole_file
from rlk_align.model.prompts import RENDERED, load_prompts
from rlk_align.trace.records import save_record, writing
from rlk_align.trace.schema import CUTS, TraceRecord
from rlk_align.trace.tables import WEIGHTS_SCHEMA


def write_manifest(job: Job, engine: Engine, prompt_ids: dict[str, list[int]]) -> None:
    """Writes weights.parquet and trace.json on rank 0; the other ranks take part in gathering."""
    parameters = list(engine.weights())
    attributes, shards, experts = engine.attributes(), engine.shards(), engine.experts()
    adapters, products, cache = engine.adapters(), engine.products(), engine.cache()
    code, replaced = engine.merge_sites(engine.code()), engine.merge_sites(engine.replaced)
    if engine.ranks.rank:
        return
    write_weights(job.folder / "weights.parquet", parameters)
    record = TraceRecord(
        key=job.key,
        engine=engine.spec.name,
        version=engine.version(),
        options=dict(engine.spec.options),
        model=str(job.model),
        shape=engine.shape,
        dtype=engine.dtype(),
        environment=_environment(engine) | _prompts_rendered(job.folder / "prompts.jsonl"),
        attributes=attributes,
        code=code,
        kernels=replaced,
        shards=shards,
        stages=engine.stages(),
        experts=experts,
        adapters=adapters,
        quantised=record_quantised(job.model, engine.shape, engine.dtype()),
        products=products,
        cache=cache,
        prompt_ids=prompt_ids,
        seed=job.seed if job.tokens is None else None,
    )
    save_record(record, job.folder / "trace.json")


def write_weights(path: Path, parameters: list[ParameterRecord]) -> None:
    """Writes weights.parquet."""
    columns = {name: [getattr(p, name) for p in parameters] for name in WEIGHTS_SCHEMA.names}
    with writing(path), whole_file(path) as partial:
        pq.write_table(pa.table(columns, schema=WEIGHTS_SCHEMA), partial, write_page_checksum=True)


def _prompts_rendered(path: Path) -> dict[str, str]:
    """How many of the recorded prompts a chat template rendered; empty if it rendered none."""
    prompts = load_prompts(path)
    count = sum(p.rendered for p in prompts)
    return {RENDERED: f"{count} of {len(prompts)} prompts"} if count else {}


def _environment(engine: Engine) -> dict[str, str]:
    cuda = torch.cuda.is_available()
    installed = versions(engine.spec.info.tested)
    kernels = engine.kernels
    warnings = {
        "untested": untested(installed),
        "known_faults": known_faults(
            installed,
            engine.shape.model_type,
            lambda operator: kernels is None or operator in kernels.excluded,
        ),
    }
    device = torch.device(engine.spec.device or ("cuda" if cuda else "cpu")).type
    feature = engine.spec.info.rounds_with
    own = engine.kernels is None or "except" in engine.spec.options
    cuts = bool(feature) and own and device == "cpu" and not _has(feature)
    return {
        **{name: "; ".join(said) for name, said in warnings.items() if said},
        **({CUTS: f"instead of rounding to bfloat16: no {feature}"} if cuts else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "device_type": device,
        "ranks": str(engine.ranks.world),
        "threads": str(torch.get_num_threads()),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _has(feature: str) -> bool:
    """Whether this processor has a feature of x86 processors; true of any other processor, whose
    engines have other code."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    return bool(getattr(torch.cpu, f"_is_{feature}_supported")())
