"""`rlk-align selftest`: plants faults into real engines and checks that each is named."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from rlk_align.api.options import choose_run, names, specs
from rlk_align.api.prompts import RunPrompts
from rlk_align.cli import options
from rlk_align.cli.outputs import check_outputs, parse_outputs, takes_stdout, write_text
from rlk_align.errors import EXIT_FAIL
from rlk_align.progress import show_progress
from rlk_align.text import printable

RESULTS = "selftest.jsonl"
"""The file in the run's folder with a line for each result, which survives an interruption."""


def selftest(
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="E,...",
            help="Engines that get the faults and are compared with one another, with options as "
            "in compare: vllm:tp=2,kernels=rlk,hf.",
            show_default="hf, vllm and megatron, where installed",
        ),
    ] = None,
    faults: Annotated[
        str | None, typer.Option(metavar="F,...", help="Faults to plant.", show_default="all")
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seeds of the comparisons without a fault.")
    ] = 20,
    curves: Annotated[
        bool, typer.Option(help="Also plant weaker faults, to find the weakest that is named.")
    ] = True,
    model: options.Model = None,
    prompts: options.Prompts = None,
    run_dir: options.RunDir = None,
    output: options.JsonOutput = None,
) -> None:
    """Plant known faults into the engines, and report which of them the comparison names."""
    from rlk_align.model.checkpoint import default_model, resolve_model
    from rlk_align.model.shape import read_shape
    from rlk_align.selftest.plan import (
        check_engines,
        check_faults,
        middle,
        pairs,
        scoring_request,
    )

    chosen = check_engines(specs(engines))
    checkpoint = resolve_model(model or default_model())
    planted = check_faults(names(faults), read_shape(checkpoint), chosen)
    outputs = parse_outputs(output, ["json"])
    settings = (tuple(map(str, chosen)), planted, seeds, curves, model, prompts)
    run = choose_run(run_dir, "selftest", *settings)
    check_outputs(outputs, run)

    from rlk_align.capture.check import check_request

    all_prompts = RunPrompts.of(prompts, run)
    medium = replace(all_prompts, prompts=tuple(middle(all_prompts.prompts)))
    requests = [scoring_request(engine, str(checkpoint), medium.path) for engine in chosen]
    samples = pairs(chosen)[0][0]
    checked = [check_request(request, request.engine == samples) for request in requests]
    fitting = medium.fitting(checked, run, options.warn)
    fitting.save()

    from rlk_align.selftest.fault_trials import SelfTestRequest, selftest
    from rlk_align.selftest.record import CleanPair, Detection
    from rlk_align.selftest.table import lines

    request = SelfTestRequest(
        engines=chosen,
        faults=planted,
        seeds=seeds,
        curves=curves,
        model=str(checkpoint),
        prompts=fitting.path,
    )
    results = run.folder / RESULTS
    results.unlink(missing_ok=True)

    def record(one: Detection | CleanPair) -> None:
        with results.open("a", encoding="utf-8") as file:
            file.write(one.model_dump_json() + "\n")

    with show_progress("selftest") as progress:
        report = selftest(request, run, progress, record)
    for text in lines(report):
        print(printable(text), file=sys.stderr if takes_stdout(outputs) else sys.stdout)
    for output_ in outputs:
        write_text(output_.path, report.model_dump_json(indent=1) + "\n")
    sys.exit(0 if report.passed else EXIT_FAIL)
