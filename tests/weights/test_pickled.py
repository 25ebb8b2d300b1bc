"""A pickle is read as data, and its code is never run."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hostile_pickle import Hostile

from rlk_align.errors import CorruptCheckpoint
from rlk_align.weights.holder import locate
from rlk_align.weights.pickled import Call, Name, NotPlain, read_pickle


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_what_it_was(protocol: int) -> None:
    shared = (1, "x")
    value: Any = {
        "a": [1, -2, 2**70, 2.5, None, True, False],
        "b": (shared, shared, (), ("y",)),
        "c": {"d": b"bytes", 3: {}},
    }
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_a_call_is_a_record(tmp_path: Path) -> None:
    call = read_pickle(pickle.dumps({"x": Hostile(tmp_path / "stolen")}))["x"]
    assert isinstance(call, Call)
    assert call.function == Name(os.mkdir.__module__, "mkdir")
    assert call.arguments == (str(tmp_path / "stolen"),)
    assert not (tmp_path / "stolen").exists()


def test_a_hostile_checkpoint_is_refused_and_does_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "stolen")))
    with pytest.raises(CorruptCheckpoint, match="does not describe a distributed checkpoint"):
        locate(str(folder), "train")
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"]", b"\x80\x04h\x05.", b"0.", b"t.", b"K\x01", pickle.dumps([1, 2])[:-3]],
)
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="pickle"):
        read_pickle(data)


def test_an_instruction_that_data_does_not_need_is_refused() -> None:
    with pytest.raises(NotPlain, match="INST"):
        read_pickle(b"(ios\nmkdir\n.")
