"""`rlk-align report`: writes a run's results for people; needs neither an engine nor torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rlk_align.cli import options
from rlk_align.cli.compare import WITHOUT
from rlk_align.cli.outputs import check_outputs, make_output, write_run, write_text
from rlk_align.errors import BadOption, TraceNotWritten
from rlk_align.files import whole_file
from rlk_align.logs.diagnose.contract import RUN_CONTRACT
from rlk_align.report.source import ReportSource, load_source
from rlk_align.text import line
from rlk_align.trace.run import is_imported
from rlk_align.trace.run_folder import RunFolder

if TYPE_CHECKING:
    from rlk_align.logs.diagnose.contract import RunContract
    from rlk_align.logs.dumps.imported_run import ImportedRun
    from rlk_align.logs.monitor.history import History

report = typer.Typer(no_args_is_help=True, help="Write a run's results in a format for people.")
"""A command for each format."""
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A compared run's folder, or @last.")]


@report.command()
def html(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Compared runs, or @last.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="PATH", help="The page.")] = Path(
        "report.html"
    ),
    contract: options.ContractName = None,
) -> None:
    """Write one page that can be mailed: it needs no network and no JavaScript.

    Several runs are compared on one page. The page of an imported run shows the verdict
    of `explain` and the metrics over the steps; that of several imported runs, the steps.
    """
    if any(map(is_imported, runs)):
        return _imported_html(runs, out, contract or RUN_CONTRACT)
    from rlk_align.report.html.page import run_page
    from rlk_align.report.html.several import several_page

    sources = [load_source(run, contract) for run in runs]
    page = several_page(sources) if len(sources) > 1 else run_page(sources[0])
    write_report([source.run for source in sources], {out: page})


def _imported_html(runs: list[str], out: Path, contract: str) -> None:
    """Writes the page of imported runs: diagnoses and steps of one run, or the steps of several.
    Raises BadOption where one is a run of engines."""
    from rlk_align.logs.diagnose.contract import load_run_contract
    from rlk_align.logs.diagnose.explain import explain
    from rlk_align.logs.dumps.imported_run import ImportedRun
    from rlk_align.report.explained import explained_document
    from rlk_align.report.html.document import document_page
    from rlk_align.report.html.steps import run_steps, steps_page

    limits = load_run_contract(contract)
    imported = [ImportedRun.open(run) for run in runs]
    histories = {str(run.folder): _history(run, limits) for run in imported}
    if len(imported) > 1:
        page = steps_page(histories)
    else:
        ((folder, history),) = histories.items()
        document = explained_document(explain(imported[0].sequences(), limits), folder)
        page = document_page(document, run_steps(0, folder, history) if history.records else None)
    write_report(imported, {out: page})


def _history(run: "ImportedRun", limits: "RunContract") -> "History":
    """Returns the run's steps, judged by the limits; none where the dump has no steps."""
    from rlk_align.logs.monitor.history import History
    from rlk_align.logs.monitor.run_monitor import RunMonitor

    history = History()
    monitor = RunMonitor(limits, on_step=history.add)
    for step, parts in run.steps():
        monitor.sequences(step, parts)
    return history


def _imported_markdown(name: str, out: str, contract: str) -> None:
    """Writes the explanation of an imported run."""
    from rlk_align.logs.diagnose.contract import load_run_contract
    from rlk_align.logs.diagnose.explain import explain
    from rlk_align.logs.dumps.imported_run import ImportedRun
    from rlk_align.report.document_markdown import document_markdown
    from rlk_align.report.explained import explained_document

    output = make_output("markdown", out)
    run = ImportedRun.open(name)
    check_outputs([output], run)
    explained = explain(run.sequences(), load_run_contract(contract))
    write_text(output.path, document_markdown(explained_document(explained, str(run.folder))))


Out = Annotated[
    str, typer.Option("-o", "--out", metavar="PATH", help="The file.", show_default="stdout")
]


@report.command()
def markdown(run: RunName, out: Out = "-", contract: options.ContractName = None) -> None:
    """Write a comment for a pull request, always below 64 KB."""
    if is_imported(run):
        return _imported_markdown(run, out, contract or RUN_CONTRACT)
    _write_one("markdown", run, out, contract)


@report.command()
def junit(run: RunName, out: Out = "-", contract: options.ContractName = None) -> None:
    """Write JUnit XML: a test case for each limit and class of operators."""
    _write_one("junit", run, out, contract)


@report.command()
def github(
    run: RunName,
    out: Annotated[
        str,
        typer.Option(
            "-o",
            "--out",
            metavar="PATH",
            help="The step's summary.",
            show_default="$GITHUB_STEP_SUMMARY, where set",
        ),
    ] = "-",
    contract: options.ContractName = None,
) -> None:
    """Write annotations for GitHub Actions to stdout, and a summary of the step."""
    _write_one("github", run, out, contract)


def _write_one(kind: str, run: str, out: str, contract: str | None) -> None:
    output = make_output(kind, out)
    source = load_source(run, contract)
    check_outputs([output], source.run)
    write_run([output], source)


@report.command()
def chart(
    run: RunName,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="PATH", help="A .png, .svg or .pdf file.")
    ] = Path("drift.png"),
    contract: options.ContractName = None,
) -> None:
    """Draw a picture for slides and papers: drift by operator, and a histogram of Δlogp.

    For a run of `compare --kernels rlk` it shows the kernels off and on.
    """
    from rlk_align.report.chart import chart_file, check_chart_path

    check_chart_path(out)
    source = load_source(run, contract)
    plain = _without_kernels(source)
    without = load_source(str(plain), contract) if plain else None
    check_report_path(out, [one.run for one in (source, without) if one])
    picture = chart_file(out.suffix, source, without)
    try:
        with whole_file(out.resolve()) as partial:
            partial.write_bytes(picture)
    except OSError as error:
        raise TraceNotWritten(f"{out} could not be written: {error.strerror}") from error
    Console(highlight=False, soft_wrap=True).print(line(out))


def _without_kernels(source: ReportSource) -> Path | None:
    """Returns the run of the same engines without the kernels, which `compare --kernels rlk` keeps
    inside the run; None without one."""
    with_kernels = any("kernels" in e.options for e in source.verdict.comparison.engines.values())
    plain = source.folder / WITHOUT
    return plain if with_kernels and plain.is_dir() else None


@report.command("model-explorer")
def model_explorer(
    run: RunName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The folder.")] = Path(
        "model-explorer"
    ),
    contract: options.ContractName = None,
) -> None:
    """Write graphs for Google's Model Explorer.

    To open them: pip install ai-edge-model-explorer, then

    model-explorer FOLDER/canonical.json
    --node_data_paths=FOLDER/relative-l2.json,FOLDER/side.json

    with introduced.json and inherited.json too, where the run was probed.

    For both engines side by side, open FOLDER/engines.json, split the pane,
    choose `rollout` on the left and `train` on the right, and for the
    syncing of navigation upload the mapping FOLDER/navigation.json.
    """
    from rlk_align.report.model_explorer import model_explorer_files

    source = load_source(run, contract)
    texts = model_explorer_files(source, _inputs(source))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadOption(f"{out}: the folder cannot be created: {error.strerror}") from error
    write_report([source.run], {out / name: text for name, text in texts.items()})


def _inputs(source: ReportSource) -> dict[str, tuple[str, ...]]:
    """Returns for each site the sites that it reads, by the shapes of both sides' models."""
    from rlk_align.model.sites import model_sites
    from rlk_align.trace.records import load_record
    from rlk_align.trace.schema import TraceRecord

    inputs: dict[str, tuple[str, ...]] = {}
    for role in source.record.captures:
        path = source.run.capture_folder(role) / "trace.json"
        for site in model_sites(load_record(TraceRecord, path).shape):
            inputs.setdefault(site.name, (*site.inputs, *site.prefix_inputs))
    return inputs


def write_report(runs: Sequence[RunFolder], texts: dict[Path, str]) -> None:
    """Writes each file completely or not at all, and prints its path. Raises BadOption for a file
    of the runs, and TraceNotWritten where a file cannot be written."""
    for path in texts:
        check_report_path(path, runs)
    for path, text in texts.items():
        write_text(path, text)
    console = Console(highlight=False, soft_wrap=True)
    for path in texts:
        console.print(line(path))


def check_report_path(path: Path, runs: Sequence[RunFolder]) -> None:
    """Raises BadOption for a file of the runs, and for a path that cannot be written."""
    for run in runs:
        run.check_output(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadOption(f"{path}: no file can be written there", "name another with -o")
