"""The kernels in vLLM: a general plugin, switched on by the environment variable RLK_KERNELS=1.

    RLK_KERNELS=1 vllm serve MODEL

`RLK_KERNELS_EXCEPT=attn,act` excludes operators. A model or setting without a kernel raises
NotSupported when vLLM builds it; `check(llm)` returns the replaced operators, and raises if an
operator was not replaced or never ran. All replacements use vLLM's extension points, except the
log-prob, which has none: `logprobs.py` patches the function that computes it. Tensor-parallel ranks
copy values to each other and add up none, so the bits are those of one rank.

`RLK_KERNELS_SAMPLER=1` replaces the sampler too (`sampling.py`): a token then depends on the
request's seed, its position and its logits alone.
"""

import os
from collections.abc import Iterable
from typing import Any

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import NORMS

ENVIRONMENT, EXCEPT, SAMPLER = "RLK_KERNELS", "RLK_KERNELS_EXCEPT", "RLK_KERNELS_SAMPLER"
PLUGIN = "rlk_kernels"
"""The name of the entry point."""

__all__ = [
    "ENVIRONMENT",
    "EXCEPT",
    "SAMPLER",
    "check",
    "leave",
    "operators",
    "plugin",
    "register",
    "unregister",
]


def plugin() -> None:
    """The entry point that vLLM calls in each of its processes."""
    if is_on(ENVIRONMENT, "the kernels"):
        excluded = filter(None, os.environ.get(EXCEPT, "").split(","))
        register(excluded, is_on(SAMPLER, "their sampler"))


def is_on(variable: str, what: str) -> bool:
    """Whether an environment variable is 1. Raises NotSupported if it is neither 1 nor 0."""
    asked = os.environ.get(variable, "")
    if asked not in ("", "0", "1"):
        raise NotSupported(f"{variable}={asked}: 1 switches {what} on, and 0 off")
    return asked == "1"


def register(excluded: Iterable[str] = (), sampler: bool = False) -> None:
    """Makes every model that this process, or a process that it starts, builds from now on use the
    kernels, except for the `excluded` operators, and with `sampler` their sampler. A second call
    with the same arguments does nothing. Raises NotSupported if only some of the norms are excluded
    (see `leave`), or if VLLM_PLUGINS excludes the kernels from the processes that vLLM starts."""
    from rlk_kernels.integrations.vllm.registry import register

    excluded = frozenset(excluded)
    if (some := excluded & NORMS) and some != NORMS:
        raise NotSupported(
            f"{', '.join(sorted(some))} cannot be excluded alone, because all norms of vLLM have "
            f"one class; exclude all of {', '.join(sorted(NORMS))}, or none"
        )
    _check_plugins()
    register(excluded, sampler)
    # vLLM builds its models in a process of its own, which calls `plugin`.
    os.environ |= {ENVIRONMENT: "1", EXCEPT: ",".join(sorted(excluded))}
    os.environ |= {SAMPLER: str(int(sampler))}


def _check_plugins() -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    separate_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"
    if separate_process and allowed is not None and PLUGIN not in allowed.split(","):
        raise NotSupported(
            f"VLLM_PLUGINS={allowed} excludes {PLUGIN}, which installs the kernels in vLLM's other "
            "processes: add it"
        )


def unregister() -> None:
    """Makes models that are built from now on use vLLM's own operators again."""
    from rlk_kernels.integrations.vllm.registry import unregister

    unregister()
    for name in (ENVIRONMENT, EXCEPT, SAMPLER):
        os.environ.pop(name, None)


def leave(model: Any, excluded: Iterable[str]) -> None:
    """Restores some of vLLM's own norms in a live model. All norms have one class, so `register`
    replaces all of them or none. Raises NotSupported if the model is compiled."""
    from rlk_kernels.integrations.vllm.registry import leave

    leave(model, excluded)


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> the module that computes it in a live model."""
    from rlk_kernels.integrations.vllm.registry import operators

    return operators(model)


def check(llm: Any) -> Any:
    """The operators that the kernels compute in an LLM whose model is in this process
    (VLLM_ENABLE_V1_MULTIPROCESSING=0); call it after the LLM has generated. Raises NotSupported if
    the model is in another process, if vLLM computes an operator that was not excluded, or if a
    replacement was never called. Compiled code counts no calls: there it is enough that some kernel
    was called (`rlk_kernels.backend_calls()`)."""
    from rlk_kernels.integrations.vllm.registry import check

    return check(llm)
