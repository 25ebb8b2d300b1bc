"""Where the shipped data lies: contracts, the embedded model and the prompts."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = {
    "contracts": "contracts",
    "model": "fixtures/model",
    "prompts.jsonl": "fixtures/prompts.jsonl",
}


def data_path(name: str) -> Path:
    """The shipped file or folder `name`, in an installed wheel or in a checkout.

    A wheel holds the data inside the package; an editable install does not see those
    copies and reads the checkout's own folders.
    """
    installed = _PACKAGE / "data" / name
    return installed if installed.exists() else _PACKAGE.parent / _CHECKOUT[name]
