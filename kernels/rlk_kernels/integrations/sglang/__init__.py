"""The kernels in SGLang: a plug-in, switched on by the environment variable RLK_KERNELS=1.

    RLK_KERNELS=1 python -m sglang.launch_server --model-path MODEL

`RLK_KERNELS_EXCEPT=attn,act` excludes operators. A setting without a kernel raises NotSupported
before SGLang loads the model. Modules keep their parameters and get another class; attention is a
backend over SGLang's own pool. `check(engine)` returns the replaced operators, and raises if an
operator was not replaced or never ran. `RLK_KERNELS_SAMPLER=1` replaces the sampler too
(`sampling.py`).
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlk_kernels.integrations.errors import NotSupported

if TYPE_CHECKING:
    from rlk_kernels.integrations.handle import Handle
    from rlk_kernels.integrations.operators import Replacement

ENVIRONMENT, EXCEPT, SAMPLER = "RLK_KERNELS", "RLK_KERNELS_EXCEPT", "RLK_KERNELS_SAMPLER"
PLUGIN = "rlk_kernels"
"""The name of the entry point."""

__all__ = [
    "ENVIRONMENT",
    "EXCEPT",
    "SAMPLER",
    "check",
    "operators",
    "plugin",
    "register",
    "unregister",
    "use_kernels",
]


def plugin() -> None:
    """The entry point that SGLang calls in each of its processes. It ends the process where the
    kernels cannot be registered, because SGLang logs a plug-in's exceptions and serves without the
    plug-in."""
    on = {}
    for variable, what in ((ENVIRONMENT, "the kernels"), (SAMPLER, "their sampler")):
        on[variable] = asked = os.environ.get(variable, "")
        if asked not in ("", "0", "1"):
            raise SystemExit(f"{variable}={asked}: 1 switches {what} on, and 0 off")
    if on[ENVIRONMENT] == "1":
        try:
            excluded = filter(None, os.environ.get(EXCEPT, "").split(","))
            register(excluded, on[SAMPLER] == "1")
        except Exception as error:
            raise SystemExit(f"{ENVIRONMENT}=1: {error}") from error


def register(excluded: Iterable[str] = (), sampler: bool = False) -> None:
    """Makes every model that this process, or a process that it starts, loads from now on use the
    kernels, except for the `excluded` operators, and with `sampler` their sampler. A second call
    with the same arguments does nothing. Raises NotSupported for another version of SGLang, and if
    SGLANG_PLUGINS excludes the kernels from the processes that SGLang starts."""
    from rlk_kernels.integrations.sglang.registry import register

    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and PLUGIN not in (name.strip() for name in allowed.split(",")):
        raise NotSupported(
            f"SGLANG_PLUGINS={allowed} excludes {PLUGIN}, which installs the kernels in SGLang's "
            "other processes: add it"
        )
    excluded = frozenset(excluded)
    register(excluded, sampler)
    # SGLang loads its model in a process of its own, which calls `plugin`.
    os.environ |= {ENVIRONMENT: "1", EXCEPT: ",".join(sorted(excluded))}
    os.environ |= {SAMPLER: str(int(sampler))}


def unregister() -> None:
    """Makes models that are loaded from now on use SGLang's own operators again."""
    from rlk_kernels.integrations.sglang.registry import unregister

    unregister()
    for name in (ENVIRONMENT, EXCEPT, SAMPLER):
        os.environ.pop(name, None)


def use_kernels(runner: Any, excluded: Iterable[str] = (), sampler: bool = False) -> "Handle":
    """Replaces the operators of a live ModelRunner by their kernels, except the `excluded` ones,
    and with `sampler` its sampler.

    Returns a handle, which is also a context manager: `close()` restores the model, the attention
    backend and the sampler. Cached keys and values stay: flush the cache when kernels come or go.
    Raises NotSupported, before any change, for a setting or a module that has no kernel, and for a
    ModelRunner that has the kernels already.
    """
    from rlk_kernels.integrations.sglang.replace import use_kernels

    return use_kernels(runner, excluded, sampler)


def operators(runner: Any) -> dict[str, Any]:
    """Canonical operator -> the object that computes it in a live ModelRunner."""
    from rlk_kernels.integrations.sglang.replace import operators

    return operators(runner)


def check(engine: Any) -> "Replacement":
    """The operators that the kernels compute, and those that they do not, in an Engine, a
    Scheduler or a ModelRunner that has generated with log-probs. An Engine asks its scheduler's
    process. Raises NotSupported if SGLang computes an operator that was not excluded, or if a
    replacement was never called."""
    from rlk_kernels.integrations.sglang.registry import check

    return check(engine)
