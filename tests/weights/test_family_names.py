"""The names of each family's checkpoints, and what a checkpoint has beside its decoder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from family_models import family_model, with_vision
from safetensors.torch import load_file, save_file

from rlk_align.model.families import FAMILIES
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites, site_parameters
from rlk_align.weights.holder import open_holders
from rlk_align.weights.pipeline import compare_weights

WHOLE = [("gemma3_text", ""), ("gemma3_text", "model."), ("ministral3", ""), ("qwen3_5_text", "")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_parameter_of_a_family_has_its_operators_name(folder: Path, family: str) -> None:
    path = family_model(folder, family)
    shape = read_shape(path)
    named = {p for site in model_sites(shape) for p in site_parameters(site, shape)}
    [holder] = open_holders([(str(path), "train")])
    found = {n.removesuffix(".bias") for n in holder.parameters.keys() - holder.beside}
    tied = {"lm_head"} if holder.tied else set()
    assert found | tied == named | tied


@pytest.mark.parametrize(("family", "start"), WHOLE)
def test_what_a_decoder_alone_lacks_is_left_out_and_said(
    folder: Path, family: str, start: str
) -> None:
    alone = family_model(folder, family)
    whole = with_vision(folder / f"{family}-whole{start}", alone, start)
    said: list[str] = []
    for a, b in ((whole, alone), (alone, whole)):
        report = compare_weights(str(a), str(b), warn=said.append)
        assert report.exit_code == 0
        assert report.counts["equal"] == len(report.findings) > 30
    assert len(said) == 2
    assert all(f"parameters of {whole} are left out" in text for text in said)


def _without(folder: Path, lost: Callable[[str], bool]) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({n: v for n, v in tensors.items() if not lost(n)}, path, {"format": "pt"})


def test_a_part_for_images_that_loses_a_tensor_is_named(tmp_path: Path) -> None:
    alone = family_model(tmp_path, "gemma3_text")
    a, b = (with_vision(tmp_path / name, alone, "") for name in "ab")
    _without(b, lambda name: "mm_soft_emb_norm" in name or "projector" in name)
    [missing] = [f for f in compare_weights(str(a), str(b)).findings if f.status == "missing"]
    assert missing.name.startswith("multi_modal_projector")
