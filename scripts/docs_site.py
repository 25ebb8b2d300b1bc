"""A hook of mkdocs that gathers the pages of the site and writes its reference from the source.

The pages are copied from their folders in the repository, and their links are turned into links of
the site. `make docs` builds the site.
"""

import html
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / "dist" / "site-pages"
"""The folder that mkdocs reads; it is rebuilt each time."""
SITE_PATHS = {
    "docs": "",
    "reports": "reports",
    "kernels/README.md": "kernels/README.md",
    "kernels/rlk_kernels/PROFILE.md": "kernels/PROFILE.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""A file or folder of the repository -> its path on the site."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
PYTHON = {
    "rlk_align": [
        ("The functions", [f"rlk_align.api.public.{n}" for n in ("compare", "capture", "gate")]),
        (
            "A run that is loaded",
            ["rlk_align.api.public.load_run", "rlk_align.api.loaded.LoadedRun"],
        ),
        (
            "Verdicts",
            ["rlk_align.judge.verdict.Verdict", "rlk_align.judge.regression.RegressionVerdict"],
        ),
        ("Errors", ["rlk_align.errors"]),
        (
            "Writers for training scripts",
            ["rlk_align.logs.writers.trl", "rlk_align.logs.writers.verl"],
        ),
    ],
    "rlk_kernels": [("Operators", ["rlk_kernels"])],
}


def on_config(config: Any) -> Any:
    """Makes mkdocs read the gathered pages."""
    # mkdocs restores the import path that was in force before it loaded the hook.
    sys.path.insert(0, str(ROOT))
    gather(STAGED)
    config.docs_dir = str(STAGED)
    return config


def gather(folder: Path) -> None:
    """Writes every page and file of the site below `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    site = dict(site_files())
    for source, path in site.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            text = (ROOT / source).read_text(encoding="utf-8")
            target.write_text(moved(text, source, site), encoding="utf-8")
        else:
            shutil.copy(ROOT / source, target)
    reference = folder / "reference"
    reference.mkdir()
    for name, text in {**references(), "cli.md": command_line(), "schemas.md": schemas()}.items():
        (reference / name).write_text(text, encoding="utf-8")
    (reference / "contract.schema.json").write_text(json.dumps(contract_schema(), indent=1))


def site_files() -> Iterator[tuple[str, str]]:
    """Yields (path in the repository, path on the site) of each file that the site shows."""
    for name, site_path in SITE_PATHS.items():
        path = ROOT / name
        if path.is_file():
            yield name, site_path
        for file in sorted(path.rglob("*") if path.is_dir() else ()):
            if file.is_file():
                inside = file.relative_to(path).as_posix()
                yield f"{name}/{inside}", f"{site_path}/{inside}".lstrip("/")


def moved(text: str, source: str, site: dict[str, str]) -> str:
    """Turns the links of a page into those of the site.

    A link to a file that only the repository has becomes plain text. A link to a file that does not
    exist stays, so that `mkdocs build --strict` fails.
    """

    def link(match: re.Match[str]) -> str:
        image, words, target, anchor = match.groups(default="")
        if re.match(r"[a-z]+:", target):
            return match[0]
        named = os.path.normpath(f"{os.path.dirname(source)}/{target}".lstrip("/"))
        if named in site:
            start = os.path.dirname(site[source]) or "."
            return f"{image}[{words}]({os.path.relpath(site[named], start)}{anchor})"
        return f"{words} (`{named}`)" if (ROOT / named).exists() else match[0]

    parts = FENCE.split(text)
    return "".join(p if n % 2 else LINK.sub(link, piped(p)) for n, p in enumerate(parts))


def piped(text: str) -> str:
    """Writes code that contains an escaped pipe, as tables on GitHub need it, in HTML, because
    Python-Markdown would show the backslash."""
    return re.sub(r"`([^`\n]*\\\|[^`\n]*)`", lambda m: code(m[1].replace("\\|", "|")), text)


def code(text: str) -> str:
    """Text as code in HTML, which is valid in a table's cell too."""
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def references() -> dict[str, str]:
    """The pages that mkdocstrings fills from docstrings, by file name."""
    pages = {}
    for package, sections in PYTHON.items():
        lines = [f"# {package}", ""]
        for title, names in sections:
            lines += [f"## {title}", "", *(f"::: {name}\n" for name in names)]
        pages[f"{package}.md"] = "\n".join(lines)
    return pages


def command_line() -> str:
    """The page with every command, its arguments and its options, as `--help` shows them."""
    from typer.main import get_command

    from rlk_align.cli.main import app

    lines = [
        "# Command line",
        "",
        "Generated from the program. `rlk-align COMMAND --help` says the same.",
        "",
    ]
    for name, command in commands("rlk-align", get_command(app)):
        lines += [f"## {name}", "", *paragraphs(command.help), *usage(name, command)]
    return "\n".join(lines)


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yields (full name, command) for the command and its subcommands."""
    yield name, command
    for inner, below in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {inner}", below)


def paragraphs(text: str | None) -> list[str]:
    """A help text as Markdown, paragraph by paragraph."""
    return [f"{escaped(' '.join(p.split()))}\n" for p in (text or "").split("\n\n")]


def usage(name: str, command: Any) -> Iterator[str]:
    """The table of a command's arguments and options."""
    if getattr(command, "commands", None):
        return
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    if not shown:
        yield "No options.\n"
        return
    yield "| argument or option | meaning |\n| --- | --- |"
    for parameter in shown:
        if parameter.param_type_name == "argument":
            words = parameter.metavar or parameter.name.upper()
        else:
            words = ", ".join([*parameter.opts, *parameter.secondary_opts])
            words += "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
        yield f"| {code(words)} | {escaped(parameter.help or '')}{default(parameter)} |"
    yield ""


def default(parameter: Any) -> str:
    """The default of an option, as `--help` shows it."""
    shown, value = getattr(parameter, "show_default", None), parameter.default
    if isinstance(shown, str):
        return f" (default: {escaped(shown)})"
    visible = shown and value is not None and not isinstance(value, bool)
    return f" (default: {code(str(value))})" if visible else ""


def escaped(text: str) -> str:
    """Text for a Markdown table, with everything escaped except pairs of backticks."""
    words = re.split(r"`([^`]*)`", " ".join(text.split()))
    plain = (re.sub(r"([|<>*_\[\]`])", r"\\\1", part) for part in words[::2])
    spans = [*map(code, words[1::2]), ""]
    return "".join(part + span for part, span in zip(plain, spans, strict=True))


def contract_schema() -> dict[str, Any]:
    """The JSON Schema of contracts, as `rlk-align contract schema` prints it."""
    from rlk_align.judge.contract import Contract

    return Contract.model_json_schema()


def schemas() -> str:
    """The page of the published schemas: links to the files, and the meaning of each field."""
    verdict = json.loads((ROOT / "docs" / "verdict.schema.json").read_text(encoding="utf-8"))
    lines = [
        "# Schemas\n",
        "- [verdict.schema.json](../verdict.schema.json): what `--output json=PATH` writes",
        "- [contract.schema.json](contract.schema.json): a contract's TOML file",
        "- [logprobs.schema.json](../logprobs.schema.json): the neutral file of log-probs\n",
    ]
    for title, schema in (("The verdict", verdict), ("A contract", contract_schema())):
        lines += [f"## {title}\n", *fields(schema)]
        for name, part in schema.get("$defs", {}).items():
            if part.get("properties"):
                lines += [f"### {title}: {name}\n", *fields(part)]
    return "\n".join(lines)


def fields(schema: dict[str, Any]) -> Iterator[str]:
    """A schema's description and its properties as a table."""
    yield f"{escaped(schema.get('description', ''))}\n"
    yield "| field | type | meaning |\n| --- | --- | --- |"
    required = schema.get("required", ())
    for name, part in schema["properties"].items():
        mark = "" if name in required else ", optional"
        yield f"| `{name}` | {escaped(kind(part))}{mark} | {escaped(part.get('description', ''))} |"
    yield ""


def kind(part: dict[str, Any]) -> str:
    """The type of a property, in a few words."""
    if "$ref" in part:
        return part["$ref"].rpartition("/")[2]
    for several in ("anyOf", "oneOf"):
        if several in part:
            return " or ".join(kind(p) for p in part[several])
    if "const" in part:
        return json.dumps(part["const"])
    if "enum" in part:
        return " or ".join(map(str, part["enum"]))
    if "prefixItems" in part:  # the schemas allow no further items
        return f"({', '.join(map(kind, part['prefixItems']))})"
    if part.get("type") == "array":
        return f"array of {kind(part.get('items', {}))}"
    types = part.get("type", "any")
    return types if isinstance(types, str) else " or ".join(types)
