"""The formats that a run's verdict is written in. A new one is a line here."""

from collections.abc import Callable, Mapping
from importlib import import_module

FORMATS = {
    "json": "rlk_align.report.verdict_json:json_text",
    "markdown": "rlk_align.report.markdown:markdown",
    "junit": "rlk_align.report.junit:junit",
    "github": "rlk_align.report.markdown:markdown",
    "html": "rlk_align.report.html.page:run_page",
}
"""Format -> `module:function`, which renders a ReportSource as the text of a file."""

REGRESSION_FORMATS = {
    "json": "rlk_align.report.regression_formats:regression_json",
    "markdown": "rlk_align.report.regression_formats:regression_markdown",
    "junit": "rlk_align.report.regression_formats:regression_junit",
    "github": "rlk_align.report.regression_formats:regression_markdown",
}
"""Format -> `module:function`, which renders a RegressionVerdict."""


EXPLAINED_FORMATS = {
    "json": "rlk_align.report.explained_json:explained_json",
    "markdown": "rlk_align.report.explained_markdown:explained_markdown",
    "html": "rlk_align.report.html.explained:explained_page",
}
"""Format -> `module:function`, which renders an Explanation and its run's folder."""

RESCORED_FORMATS = {
    "json": "rlk_align.report.rescored_json:rescored_json",
    "markdown": "rlk_align.report.rescored_markdown:rescored_markdown",
    "html": "rlk_align.report.html.rescored:rescored_page",
}
"""Format -> `module:function`, which renders a Rescored and the folders of its dump and its run."""


def renderer(name: str, formats: Mapping[str, str] = FORMATS) -> Callable[..., str]:
    """Imports the function that renders a format, a key of `formats`."""
    module, function = formats[name].split(":")
    return getattr(import_module(module), function)
