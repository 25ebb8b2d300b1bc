"""The formats that a run's verdict is written in. A new one is a line here."""

from collections.abc import Callable
from importlib import import_module

from rlk_align.errors import MissingDependency
from rlk_align.report.source import Source

FORMATS = {
    "json": "rlk_align.report.verdict_json:json_text",
    "markdown": "rlk_align.report.markdown:markdown",
    "junit": "rlk_align.report.junit:junit",
    "github": "rlk_align.report.github:step_summary",
    "html": "rlk_align.report.html.page:run_page",
}
"""By name, `module:function`: from a Source to the text of the file."""


def renderer(name: str) -> Callable[[Source], str]:
    """What writes that format, a key of FORMATS. Raises MissingDependency."""
    module, function = FORMATS[name].split(":")
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the format {name!r} needs {error.name}", f"pip install {error.name}"
        ) from error
