"""Loads contracts: built-in ones by id, others by path, each with the contract that it extends.

id = "ours"
version = "1.0.0"
description = "bf16, tighter in the mean"

[extends]
id = "bf16"
version = "2.0.0"           the built-in version, or an earlier one that is shipped with it
sha256 = "…"                `rlk-align contract show bf16` prints it

[[limits]]                  an entry with an id of the parent replaces its keys
id = "mean-dlogp"
fail = 0.004                tighter is free; looser needs a `reason`
"""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlk_align.data import data_path
from rlk_align.errors import ContractError
from rlk_align.files import read_text
from rlk_align.judge.changes import changes
from rlk_align.judge.contract import Contract, Extends
from rlk_align.text import complaint

BY_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Dtype -> the built-in contract for it."""

OF_RUNS = ("run",)
"""Contracts for imported runs, which are of another kind: `rlk_align.logs.diagnose.contract`."""


def default_contract(dtype: str) -> str:
    """Returns the id of the built-in contract for a dtype. Raises ContractError without one."""
    if dtype not in BY_DTYPE:
        raise ContractError(
            f"there is no built-in contract for {dtype}", "name one with --contract"
        )
    return BY_DTYPE[dtype]


def built_in() -> dict[str, Path]:
    """Returns the files of the built-in contracts, by id."""
    paths = sorted(data_path("contracts").glob("*.toml"))
    return {p.stem: p for p in paths if p.stem not in OF_RUNS}


def load_contract(name: str, dtype: str) -> Contract:
    """Loads a built-in contract by id, or a TOML file by path, for a comparison in `dtype`.

    Raises ContractError if there is no such contract, if it is malformed, or if it does not cover
    the dtype.
    """
    contract = open_contract(name)
    if dtype not in contract.dtypes:
        raise ContractError(
            f"contract {contract.id!r} does not cover {dtype}",
            f"it covers {', '.join(contract.dtypes)}; name another with --contract",
        )
    return contract


def open_contract(name: str) -> Contract:
    """Loads a built-in contract by id, or a TOML file by path. Raises ContractError."""
    shipped = built_in()
    path = Path(name) if name.endswith(".toml") else shipped.get(name)
    if path is None or not path.is_file():
        known = ", ".join(shipped)
        raise ContractError(f"no contract {name!r}", f"built in: {known}; or a path to a .toml")
    contract = _resolved(path, ())
    contract._reference = name
    shadowed = shipped.get(contract.id)
    if name.endswith(".toml") and shadowed and _resolved(shadowed, ()).sha256 != contract.sha256:
        raise ContractError(
            f"{path}: id {contract.id!r} belongs to a built-in contract with other content",
            "give it its own id",
        )
    return contract


def _resolved(path: Path, below: tuple[Path, ...]) -> Contract:
    """Returns the contract of a file, merged with the contracts that it extends."""
    document = _read(path)
    if "extends" not in document:
        return _validated(document, path)
    try:
        pinned = Extends.model_validate(document["extends"])
    except ValidationError as error:
        raise ContractError(f"{path}: extends: {complaint(error)}") from error
    file = path.parent / pinned.file if pinned.file else _shipped(pinned)
    if file is None or not file.is_file():
        raise ContractError(f"{path} extends {pinned.id!r}, which does not exist")
    if file.resolve() in below:
        raise ContractError(f"{path} extends itself, through {file}")
    parent = _resolved(file, (*below, path.resolve()))
    _check_pin(pinned, parent, path)
    contract = _validated(_merged(parent, document), path)
    _check_reasons(parent, contract, path)
    return contract


def _shipped(pinned: Extends) -> Path | None:
    """Returns the file of the pinned built-in contract, which may be an earlier version."""
    earlier = data_path("contracts") / "earlier" / f"{pinned.id}-{pinned.version}.toml"
    return earlier if earlier.is_file() else built_in().get(pinned.id)


def _check_pin(pinned: Extends, parent: Contract, path: Path) -> None:
    for name in ("id", "version", "sha256"):
        if getattr(pinned, name) != getattr(parent, name):
            raise ContractError(
                f"{path} extends {pinned.id} with {name} {getattr(pinned, name)}, but it has "
                f"{getattr(parent, name)}",
                "see what changed with `rlk-align contract diff`, then pin the intended version",
            )


_LISTS = ("limits", "budgets", "regressions")


def _merged(parent: Contract, document: dict[str, Any]) -> dict[str, Any]:
    """Merges the file over its parent; lists are merged entry by entry, by id."""
    base = parent.model_dump(exclude_defaults=True)
    for entry in (e for name in ("limits", "budgets") for e in base.get(name, ())):
        entry.pop("reason", None)
    whole = base | document
    for name in _LISTS:
        entries = document.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            continue
        by_id = {e["id"]: e for e in base.get(name, ())}
        for entry in entries:
            key = str(entry.get("id"))
            by_id[key] = by_id.get(key, {}) | entry
        if by_id:
            whole[name] = [*by_id.values()]
    if "waivers" in base:
        whole["waivers"] = [*base["waivers"], *document.get("waivers", [])]
    return whole


def _check_reasons(parent: Contract, contract: Contract, path: Path) -> None:
    """Raises ContractError for a value that is looser than the parent's and has no reason."""
    assert contract.extends is not None
    reasons = {x.id: x.reason for x in contract.limits} | {b.id: b.reason for b in contract.budgets}
    for change in changes(parent, contract):
        # A waiver always has a reason.
        if change.kind != "loosened" or change.what == "waiver":
            continue
        if not reasons.get(change.entry, contract.extends.reason):
            raise ContractError(
                f"{path}: {change.entry or 'the head'} is looser than in {parent.id} "
                f"{parent.version}: {change}",
                "give it a `reason`, or keep the parent's value",
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except ValueError as error:
        raise ContractError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error


def _validated(document: dict[str, Any], path: Path) -> Contract:
    try:
        return Contract.model_validate(document)
    except ValidationError as error:
        known = "`rlk-align contract schema` prints the fields of a contract"
        raise ContractError(f"{path}: {complaint(error)}", known) from error
