"""`rlk-align gate`: judge a run again; needs neither an engine nor a GPU nor torch."""

from typing import Annotated

import typer

from rlk_align.cli import options
from rlk_align.cli.output import finish
from rlk_align.judge.contract import default_contract, load_contract
from rlk_align.judge.verdict import judge
from rlk_align.trace.run import Run


def gate(
    run: Annotated[str, typer.Argument(help="A compared run's folder, or @last.")],
    contract: options.ContractName = None,
    output: options.Output = None,
) -> None:
    """Hold a compared run against a contract; the exit code is the gate."""
    outputs = options.parse_outputs(output)
    opened = Run.open(run)
    opened.check_sizes()
    comparison = opened.comparison
    name = contract or default_contract(comparison.dtype)
    finish(judge(comparison, load_contract(name, comparison.dtype)), opened, outputs)
