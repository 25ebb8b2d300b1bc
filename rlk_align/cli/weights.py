"""`rlk-align weights`: compares the synced weights with the trained ones."""

import json
import sys
from typing import Annotated

import typer

from rlk_align.cli import options
from rlk_align.cli.finish import print_report
from rlk_align.cli.outputs import parse_outputs, takes_stdout, write_text
from rlk_align.progress import show_progress
from rlk_align.report.document_terminal import show_document
from rlk_align.report.weights import weights_document


def weights(
    a: Annotated[
        str, typer.Argument(metavar="A", help="What was trained: a checkpoint, or a run's folder.")
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="What was synced: a checkpoint, or a run's folder.")
    ],
    earlier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CKPT",
            help="A checkpoint of an earlier step; repeatable.",
            show_default="those beside A",
        ),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR", help="A LoRA adapter (PEFT) of A.")
    ] = None,
    output: options.JsonOutput = None,
) -> None:
    """Compare two holders of a model's weights, parameter by parameter.

    Reads safetensors, distributed checkpoints of FSDP and Megatron, DeepSpeed's
    checkpoints, and the weights that a capture recorded of a live engine; none of
    them is unpickled. Each parameter is equal,
    cast (B is A rounded to its dtype), merged (with the adapter), quantised (B is
    A in blocks of fp8, bit by bit), stale (from an earlier step), missing, or
    other. Exit code 0 where all are equal, cast, merged or quantised; 1 where one
    is stale, missing or other; 4 where nothing is comparable.
    """
    outputs = parse_outputs(output, ("json",))
    from rlk_align.weights.pipeline import compare_weights

    with show_progress("weights") as progress:
        report = compare_weights(
            a, b, earlier=earlier or (), adapter=adapter, progress=progress, warn=options.warn
        )
    document = weights_document(report)
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    for target in outputs:
        write_text(target.path, json.dumps(report.to_json(), indent=2) + "\n")
    sys.exit(report.exit_code)
