"""Two engines with the kernels on one model, for the pairs of `engine_pairs.py`: no bit differs, at
any site of any row, and every token goes to the same experts. Without the kernels:
`tests/real_runs/test_healthy_pairs.py`."""

from pathlib import Path

import pytest
from bit_equal import assert_equal
from command import Cli
from engine_pairs import DEFAULT, MODELS, WHOLE, cases


@pytest.mark.parametrize("name", cases("rlk"))
def test_no_bit_differs(cli: Cli, folder: Path, name: str) -> None:
    pair = WHOLE[name]
    assert_equal(pair.compared(cli, folder), 40, sparse=MODELS[pair.model].sparse)


def test_the_default_pairs_cover_every_two_values() -> None:
    """The axes of `Pair.goals`; the whole matrix is far larger."""
    default = [WHOLE[name] for name in DEFAULT]
    reached = frozenset().union(*(pair.goals for pair in default))
    for name, pair in WHOLE.items():
        assert pair.goals <= reached, name
    assert {pair.model for pair in default} == MODELS.keys()
    assert len(default) < len(WHOLE) / 15
