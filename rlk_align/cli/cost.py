"""Compares the time of a run's un-tapped passes and production passes without and with the kernels.
None of these passes is the first forward of its engine, which compiles."""

from collections.abc import Iterator

from rlk_align.trace.records import load_record
from rlk_align.trace.run import Role, Run
from rlk_align.trace.schema import PassRecord

PASSES: tuple[tuple[Role, str], ...] = (
    ("rollout", "decode.untapped"),
    ("rollout", "prefill.untapped"),
    ("train", "prefill.untapped"),
    ("rollout", "decode.production"),
    ("rollout", "prefill.production"),
)


def cost_lines(off: Run, on: Run) -> Iterator[str]:
    """Yields a line for each side and pass that both runs have."""
    for role, name in PASSES:
        paths = [run.capture_folder(role) / name / "pass.json" for run in (off, on)]
        if all(path.is_file() for path in paths):
            without, with_them = (load_record(PassRecord, path).seconds for path in paths)
            kind = name.removesuffix(".untapped").replace(".", ", ")
            yield f"{role} {kind}: {without:.2f} s without, {with_them:.2f} s with the kernels"
