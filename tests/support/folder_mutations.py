"""Changes to a folder of files: any file, any byte, any field; and what a command may then say."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "250"))
"""How many changes each test of `tests/fuzz` tries."""
Mutation = Callable[[Path, random.Random], str | None]
"""Changes something below a folder; what was done, or None where it does not apply."""


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_dir())


def one_of(rng: random.Random, folder: Path, suffix: str) -> Path | None:
    found = [p for p in files(folder) if p.suffix == suffix]
    return rng.choice(found) if found else None


def flip(folder: Path, rng: random.Random) -> str | None:
    """One bit of one file."""
    path = rng.choice(files(folder))
    data = bytearray(path.read_bytes())
    if not data:
        return None
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"flip {path}"


def truncate(folder: Path, rng: random.Random) -> str | None:
    path = rng.choice(files(folder))
    data = path.read_bytes()
    if not data:
        return None
    path.write_bytes(data[: rng.randrange(len(data))])
    return f"truncate {path}"


def append(folder: Path, rng: random.Random) -> str:
    path = rng.choice(files(folder))
    path.write_bytes(path.read_bytes() + rng.choice([b"\n", b" ", b"\0", b"}", b"PAR1"]))
    return f"append to {path}"


def delete(folder: Path, rng: random.Random) -> str:
    path = rng.choice(files(folder))
    path.unlink()
    return f"delete {path}"


def delete_folder(folder: Path, rng: random.Random) -> str | None:
    if not folders(folder):
        return None
    path = rng.choice(folders(folder))
    shutil.rmtree(path)
    return f"delete {path}"


def replace_by_folder(folder: Path, rng: random.Random) -> str:
    path = rng.choice(files(folder))
    path.unlink()
    path.mkdir()
    return f"a folder for {path}"


def swap(folder: Path, rng: random.Random) -> str | None:
    """Two files; of one name where there are two."""
    one = rng.choice(files(folder))
    alike = [p for p in files(folder) if p.name == one.name and p != one]
    other = rng.choice(alike or files(folder))
    if one.read_bytes() == other.read_bytes():
        return None
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"swap {one} and {other}"


def duplicate(folder: Path, rng: random.Random) -> str | None:
    """One file over another."""
    one, other = rng.choice(files(folder)), rng.choice(files(folder))
    if one.read_bytes() == other.read_bytes():
        return None
    other.write_bytes(one.read_bytes())
    return f"{one} over {other}"


def copy_folder(folder: Path, rng: random.Random) -> str | None:
    """A pass, or a capture, in place of another."""
    found = folders(folder) or [folder]
    one, other = rng.choice(found), rng.choice(found)
    if one in (other, *other.parents) or other in one.parents:
        return None
    shutil.rmtree(other)
    shutil.copytree(one, other)
    return f"{one} in place of {other}"


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**70, 0.0, -0.5, 1e300, "", "NaN", "Infinity", "x", [], {}),
    *([], [[]], {"a": 1}, "../..", "\x1b[31m", "prefill_vs_train", "rlk-align/run/1"),
]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where every value of a JSON document lies."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(inner, (*path, key))
    return found


def change_field(folder: Path, rng: random.Random) -> str | None:
    """One field of one record: another value, gone, or one more beside it."""
    path = one_of(rng, folder, ".json")
    try:
        record = json.loads(path.read_text()) if path else {}
        where = rng.choice(places(record))
    except (ValueError, IndexError):
        return None
    parent = record
    for key in where[:-1]:
        parent = parent[key]
    how, before = rng.choice(["set", "scale", "delete", "add"]), parent[where[-1]]
    if how == "delete":
        del parent[where[-1]]
    elif how == "add" and isinstance(parent, dict):
        parent[f"{where[-1]}_"] = before
    elif how == "scale" and isinstance(before, int | float):
        parent[where[-1]] = before * rng.choice([0, -1, 0.5, 10])
    else:
        parent[where[-1]] = copy.deepcopy(rng.choice(VALUES))
    path.write_text(json.dumps(record, indent=1) + "\n")
    return f"{how} {'.'.join(map(str, where))} of {path}"


def reencode(folder: Path, rng: random.Random) -> str | None:
    """The same record, written otherwise."""
    path = one_of(rng, folder, ".json")
    try:
        record = json.loads(path.read_text()) if path else None
    except ValueError:
        return None
    if path is None:
        return None
    path.write_text(json.dumps(record, indent=rng.choice([None, 0, 4]), sort_keys=True))
    return f"re-encode {path}"


def change_table(folder: Path, rng: random.Random) -> str | None:
    """One table: compressed otherwise, a row less, rows in another order, one cell changed."""
    path = one_of(rng, folder, ".parquet")
    try:
        table = pq.read_table(path) if path else None
    except (OSError, pa.ArrowException):
        return None
    if table is None or not len(table):
        return None
    how = rng.choice(["compress", "drop", "reverse", "cell"])
    if how == "drop":
        table = table.slice(1)
    elif how == "reverse":
        table = table.take(pa.array(range(len(table) - 1, -1, -1)))
    elif how == "cell":
        name = rng.choice(table.column_names)
        column = table[name].to_pylist()
        column[0] = column[-1]
        at = table.column_names.index(name)
        table = table.set_column(at, table.schema.field(name), pa.array(column, table[name].type))
    pq.write_table(table, path, compression=rng.choice(["snappy", "zstd", "none"]))
    return f"{how} {path}"


MUTATIONS: list[Mutation] = [
    *(flip, truncate, append, delete, delete_folder, replace_by_folder, swap, duplicate),
    *(copy_folder, change_field, reencode, change_table),
]


def ended_well(code: int, said: str, done: list[str]) -> None:
    assert code in (0, 1, 2, 3, 4), (code, said, done)
    assert "Traceback" not in said, (said, done)
    assert "bug in rlk-align" not in said, (said, done)
    assert "\x1b" not in said, (said, done)
    if code in (2, 3):
        assert said.count("error: ") == 1, (said, done)
        assert len(said.splitlines()) <= 4, (said, done)
