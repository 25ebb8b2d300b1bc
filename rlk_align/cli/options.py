"""Flags that several commands share, each named after its parameter."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rlk_align.text import line, printable

Model = Annotated[
    str | None,
    typer.Option(
        metavar="M",
        help="Checkpoint folder or hub id.",
        show_default="the embedded model; a replay's own",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="F",
        help="JSON Lines or text, one prompt a line.",
        show_default="the embedded prompts",
    ),
]
RunDir = Annotated[
    Path | None, typer.Option(metavar="D", help="The run's folder.", show_default="below rlk-runs")
]
ContractName = Annotated[
    str | None,
    typer.Option(
        metavar="C", help="Built-in id or TOML file.", show_default="by the lower-precision dtype"
    ),
]
RunContractName = Annotated[
    str, typer.Option(metavar="C", help="The built-in contract for runs, or a TOML file.")
]
JsonOutput = Annotated[
    list[str] | None,
    typer.Option(metavar="FMT=PATH", help="Also write the findings, as json=PATH."),
]
ExplainedOutput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FMT=PATH",
        help="Also write the verdict, as json, markdown or html; PATH - is stdout.",
    ),
]
Output = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FMT=PATH",
        help="Also write the verdict, as json, markdown, junit, github or html; PATH - is stdout.",
    ),
]


Attribute = Annotated[
    bool,
    typer.Option(
        "--attribute", help="Also measure what each introducer contributes to the log-probs."
    ),
]
ReplayRouting = Annotated[
    bool,
    typer.Option(
        "--replay-routing",
        help="Sparse models: also run each edge's second engine with the first engine's experts.",
    ),
]


FLAGS: dict[str, Any] = {
    "model": Model,
    "rollout": Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Rollout engine, NAME[:key=value,...].",
            show_default="vllm, else hf",
        ),
    ],
    "train": Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Training engine, NAME[:key=value,...].",
            show_default="megatron, else hf",
        ),
    ],
    "prompts": Prompts,
    "contract": ContractName,
    "kernels": Annotated[
        str | None,
        typer.Option(
            metavar="rlk|off",
            help="Compute every operator of the engines with rlk_kernels.",
            show_default="off",
        ),
    ],
    "max_new_tokens": Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens to sample after each prompt.")
    ],
    "seed": Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the sampling.")],
    "run_dir": RunDir,
    "allow_mismatch": Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND", help="Compare although these differ: tokens, weights or attributes."
        ),
    ],
    "fresh": Annotated[bool, typer.Option("--fresh", help="Repeat captures that exist already.")],
    "layers": Annotated[
        str | None, typer.Option(metavar="A-B", help="Keep values only of these layers.")
    ],
    "sites": Annotated[
        str | None,
        typer.Option(metavar="S,...", help="Keep values only of these sites or operators."),
    ],
    "edges": Annotated[
        str | None, typer.Option(metavar="E,...", help="Edges to judge.", show_default="all three")
    ],
    "production": Annotated[
        bool | None,
        typer.Option(
            "--production/--no-production",
            help="Also score in the rollout engine's compiled mode.",
            show_default="on GPUs",
        ),
    ],
    "perturb_lora": Annotated[
        bool,
        typer.Option(
            "--perturb-lora",
            help="Give both sides adapters (lora=PATH) with numbers in each B that is all zeros.",
        ),
    ],
    "trace_budget": Annotated[
        str, typer.Option(metavar="SIZE", help="Largest size of the values that one capture keeps.")
    ],
}
"""Field of a request -> its flag, in the order of --help."""


def command_line() -> list[str]:
    """Returns the command line of this process; characters that cannot be printed are escaped."""
    return ["rlk-align", *map(printable, sys.argv[1:])]


def warn(text: str) -> None:
    """Prints a warning on stderr."""
    Console(stderr=True, highlight=False).print(line(f"warning: {text}"), soft_wrap=True)
