"""The formats of reports. A new format is a line here."""

from collections.abc import Callable, Mapping
from importlib import import_module

FORMATS = {
    "json": "rlk_align.report.verdict_json:json_text",
    "markdown": "rlk_align.report.verdict:markdown",
    "junit": "rlk_align.report.junit:junit",
    "github": "rlk_align.report.verdict:markdown",
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

DOCUMENT_FORMATS = {
    "markdown": "rlk_align.report.document_markdown:document_markdown",
    "html": "rlk_align.report.html.document:document_page",
}
"""Format -> `module:function`, which renders a Document."""


def renderer(name: str, formats: Mapping[str, str] = FORMATS) -> Callable[..., str]:
    """Imports the function that renders a format, a key of `formats`."""
    module, function = formats[name].split(":")
    return getattr(import_module(module), function)
