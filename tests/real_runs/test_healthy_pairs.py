"""Two engines with their own kernels on one model, for the pairs of `engine_pairs.py`: the engines
drift, and a healthy pair raises no alarm. In `tests/fix_path/test_pairs.py` the same commands have
the kernels."""

from pathlib import Path

import pytest
from command import Cli, command_line
from engine_pairs import FACTS, WHOLE, cases
from pair_models import MODELS

from rlk_align.trace.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the random models and of the run."""
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


@pytest.mark.parametrize("name", cases("off"))
def test_a_pair_is_healthy(cli: Cli, folder: Path, name: str) -> None:
    pair = WHOLE[name]
    done = pair.compared(cli, folder)
    verdict = done.verdict
    assert verdict is not None
    assert verdict["divergences"]["prefill_vs_train"]["over_budget"] == []
    assert verdict["coverage"]["fraction"] == 1
    if pair.drifts:
        assert done.first is not None
        assert verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 0
    unpaired = {site["site"].rpartition(".")[2] for site in verdict["coverage"]["unpaired"]}
    if not MODELS[pair.model].sparse:
        assert unpaired == set()
    else:
        assert unpaired == set().union(*(FACTS[engine].hidden for engine in pair.engines))
        assert "routing (prefill_vs_train): " in done.out
        routing = verdict["routing"]["prefill_vs_train"]
        assert routing["layers"]
        assert all(layer["largest_gap"] <= 5 for layer in routing["layers"])
        assert routing["flipped_tokens"] < 0.1 * routing["tokens"]
    if pair.model == "embedded" and pair.engines[0] == "vllm" and pair.drifts and not pair.autocast:
        edges = Run.open(str(folder / "run")).comparison.edges
        (edge,) = (edge for edge in edges if edge.name == "prefill_vs_train")
        introducing = {site.op for site in edge.sites if site.introduced}
        assert introducing <= FACTS[pair.engines[1]].other_rounding
