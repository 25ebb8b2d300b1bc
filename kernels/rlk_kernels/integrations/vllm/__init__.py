"""The kernels in vLLM: a general plugin, switched on by the environment variable RLK_KERNELS=1.

    RLK_KERNELS=1 vllm serve MODEL

`RLK_KERNELS_EXCEPT=attn,act` leaves operators to vLLM. A model or setting without a kernel raises
NotServed where vLLM builds it; `check(llm)` returns what was replaced, and raises for operators
that were not replaced or never ran. Everything uses vLLM's extension points, except the log-prob,
which has none: `logprobs.py` patches the function that computes it. Tensor-parallel ranks copy to
each other and add nothing up: the bits are those of one rank.
"""

import os
from collections.abc import Iterable
from typing import Any

from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.operators import NORMS

ENVIRONMENT, EXCEPT = "RLK_KERNELS", "RLK_KERNELS_EXCEPT"
PLUGIN = "rlk_kernels"
"""The name of the entry point."""

__all__ = [
    "ENVIRONMENT",
    "EXCEPT",
    "check",
    "leave",
    "operators",
    "plugin",
    "register",
    "unregister",
]


def plugin() -> None:
    """vLLM calls this in each of its processes where the package is installed."""
    asked = os.environ.get(ENVIRONMENT, "")
    if asked not in ("", "0", "1"):
        raise NotServed(f"{ENVIRONMENT}={asked}: 1 switches the kernels on, and 0 off")
    if asked == "1":
        register(filter(None, os.environ.get(EXCEPT, "").split(",")))


def register(excluded: Iterable[str] = ()) -> None:
    """Have every model that this process, or a process that it starts, builds from now on use the
    kernels, except for the `excluded` operators. A second call with the same ones does nothing.
    Raises NotServed where only some of the norms are excluded (see `leave`), and where
    VLLM_PLUGINS keeps the kernels out of the processes that vLLM starts."""
    from rlk_kernels.integrations.vllm.registry import register

    excluded = frozenset(excluded)
    if (some := excluded & NORMS) and some != NORMS:
        raise NotServed(
            f"{', '.join(sorted(some))} cannot be left: vLLM makes all norms of one class; exclude "
            f"all of {', '.join(sorted(NORMS))}, or none"
        )
    _check_plugins()
    register(excluded)
    # vLLM makes its models in a process of its own, which calls `plugin`.
    os.environ |= {ENVIRONMENT: "1", EXCEPT: ",".join(sorted(excluded))}


def _check_plugins() -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    separate_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"
    if separate_process and allowed is not None and PLUGIN not in allowed.split(","):
        raise NotServed(
            f"VLLM_PLUGINS={allowed} leaves out {PLUGIN}, by which vLLM's other processes get the "
            "kernels: name it there too"
        )


def unregister() -> None:
    """Models that are built from now on are vLLM's own again."""
    from rlk_kernels.integrations.vllm.registry import unregister

    unregister()
    for name in (ENVIRONMENT, EXCEPT):
        os.environ.pop(name, None)


def leave(model: Any, excluded: Iterable[str]) -> None:
    """Restore some of vLLM's own norms in a live model: all norms are of one class, so `register`
    replaces all of them or none. Raises NotServed where the model is compiled."""
    from rlk_kernels.integrations.vllm.registry import leave

    leave(model, excluded)


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> the module that computes it in a live model."""
    from rlk_kernels.integrations.vllm.registry import operators

    return operators(model)


def check(llm: Any) -> Any:
    """What the kernels compute in an LLM whose model is in this process
    (VLLM_ENABLE_V1_MULTIPROCESSING=0); call it after the LLM has generated. Raises NotServed where
    the model is in another process, where an operator that was not excluded is vLLM's own, and
    where a replacement was never called (compiled code counts no calls: see
    `rlk_kernels.backend_calls()`)."""
    from rlk_kernels.integrations.vllm.registry import check

    return check(llm)
