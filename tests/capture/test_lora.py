"""What an engine cannot do with an adapter is said before it starts."""

from pathlib import Path

import pytest
from lora import write_adapter

from rlk_align.capture.check import check_lora, check_mixed_lora
from rlk_align.data import data_path
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, MissingDependency, ModelError
from rlk_align.model.adapter import AdapterFile, adapter_paths, fitting_adapter
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import read_shape


def adapter(folder: Path, rank: int) -> AdapterFile:
    model = data_path("model")
    path = write_adapter(folder, model, rank=rank, targets=("q_proj",))
    return fitting_adapter(str(path), read_config(model), read_shape(model))


def test_a_rank_beyond_vllms_is_refused(tmp_path: Path) -> None:
    spec = EngineSpec.parse("vllm:lora=a")
    check_lora(spec, adapter(tmp_path / "a", 512))
    with pytest.raises(ModelError, match="r=513, and engine 'vllm' supports ranks up to 512"):
        check_lora(spec, adapter(tmp_path / "b", 513))


def test_ranks_of_vllm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="tp=2 with lora=a"):
        check_lora(EngineSpec.parse("vllm:tp=2,lora=a"), adapter(tmp_path / "a", 4))


def test_peft_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank_4 = adapter(tmp_path / "a", 4)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="needs the package 'peft'"):
        check_lora(EngineSpec.parse("hf:lora=a"), of_rank_4)
    check_lora(EngineSpec.parse("vllm:lora=a"), of_rank_4)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("fsdp:dp=2,lora=a+b", "lora=a\\+b names several: this engine computes all requests with"),
        ("deepspeed:lora=a+none", "lora=a\\+none names several"),
        ("hf:lora=a+b,merged=1", "lora=a\\+b with merged=1: one adapter can be merged"),
        ("hf:lora=a+b,batch=2", "lora=a\\+b with batch=2: the engine sets the adapter of a whole"),
        ("hf:lora=none", "lora=none names no adapter"),
    ],
)
def test_adapters_in_turn_that_an_engine_does_not_compute_are_refused(spec: str, said: str) -> None:
    parsed = EngineSpec.parse(spec)
    with pytest.raises(BadOption, match=said):
        check_mixed_lora(parsed, adapter_paths(parsed.option("lora")))


def test_adapters_in_turn_are_allowed() -> None:
    for spec in ("vllm:lora=a+b+none", "hf:lora=a+b", "fsdp:dp=2,lora=a", "hf:lora=a,batch=2"):
        parsed = EngineSpec.parse(spec)
        check_mixed_lora(parsed, adapter_paths(parsed.option("lora")))
