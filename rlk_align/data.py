"""Finds the shipped data: contracts, the embedded model and the prompts."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = {
    "contracts": "contracts",
    "model": "fixtures/model",
    "prompts.jsonl": "fixtures/prompts.jsonl",
}


def data_path(name: str) -> Path:
    """Returns the path of a shipped file or folder, in an installed wheel or in a checkout.

    A wheel has the data inside the package. An editable install has no such copies and reads the
    folders of the checkout.
    """
    installed = _PACKAGE / "data" / name
    return installed if installed.exists() else _PACKAGE.parent / _CHECKOUT[name]
