"""Puts the kernels into the models that SGLang loads, and asks its processes what they computed."""

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Replacement, excluded_operators
from rlk_kernels.integrations.sglang import settings

REPORT = "rlk_report"
"""The method of SGLang's Scheduler that `check(engine)` calls."""

_undo = ExitStack()
_registered: list[tuple[frozenset[str], bool]] = []
"""The excluded operators, and whether the sampler is replaced."""


def register(excluded: frozenset[str], sampler: bool) -> None:
    """See the package."""
    settings.check_version()
    excluded = excluded_operators(excluded)
    if _registered == [(excluded, sampler)]:
        return
    unregister()
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    with ExitStack() as undo:
        _wrap(undo, ModelRunner, "load_model", before=settings.check)
        _wrap(undo, ModelRunner, "init_attention_backends", after=_install)
        setattr(Scheduler, REPORT, _report)
        undo.callback(delattr, Scheduler, REPORT)
        _registered.append((excluded, sampler))
        undo.callback(_registered.clear)
        _undo.push(undo.pop_all())


def unregister() -> None:
    """See the package."""
    _undo.close()


def _wrap(
    undo: ExitStack, owner: type, name: str, *,
    before: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None,
) -> None:  # fmt: skip
    original = vars(owner)[name]

    def wrapped(self: Any, *args: Any, **more: Any) -> Any:
        if before is not None:
            before(self)
        result = original(self, *args, **more)
        if after is not None:
            after(self)
        return result

    undo.callback(setattr, owner, name, original)
    setattr(owner, name, wrapped)


def _install(runner: Any) -> None:
    from rlk_kernels.integrations.sglang.replace import use_kernels

    # The handle is dropped, and the kernels stay.
    use_kernels(runner, *_registered[0])


def _report(scheduler: Any, folder: str) -> None:
    """Writes what `check` says of this rank to a file, because SGLang's calls return no values, and
    errors of the first rank alone."""
    from sglang.srt.distributed import get_tp_group

    try:
        found: dict[str, Any] = {"found": asdict(check(scheduler))}
    except NotSupported as error:
        found = {"refused": str(error)}
    file = Path(folder) / f"rank{get_tp_group().rank_in_group}.json"
    file.write_text(json.dumps(found), encoding="utf-8")


def check(engine: Any) -> Replacement:
    """See the package."""
    if hasattr(engine, "collective_rpc"):
        return _check_apart(engine)
    from rlk_kernels.integrations.sglang import replace

    runner = engine.tp_worker.model_runner if hasattr(engine, "tp_worker") else engine
    return replace.check(runner)


def _check_apart(engine: Any) -> Replacement:
    with tempfile.TemporaryDirectory() as folder:
        try:
            # SGLang waits for all ranks.
            engine.collective_rpc(REPORT, folder=folder)
        except AssertionError as error:
            why = str(error)
            if REPORT in why:
                why = "the kernels are not registered: RLK_KERNELS=1 was not set when it started"
            raise NotSupported(f"in SGLang's scheduler, {why}") from error
        files = [Path(folder) / f"rank{r}.json" for r in range(engine.server_args.tp_size)]
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for rank, written in enumerate(ranks):
        if "refused" in written:
            where = f"on rank {rank}: " if len(ranks) > 1 else ""
            raise NotSupported(f"in SGLang's scheduler, {where}{written['refused']}")
    return Replacement(**{name: tuple(value) for name, value in ranks[0]["found"].items()})
