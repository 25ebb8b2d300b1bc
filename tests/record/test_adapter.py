"""The LoRA adapter of a live trainer: which forwards count, what is written, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora import write_adapter

from rlk_align import record
from rlk_align.data import data_path
from rlk_align.errors import BadOption
from rlk_align.model.adapter import read_settings
from rlk_align.record.shared.layout import ADAPTER, step_folder
from rlk_align.trace.reader import Trace
from rlk_align.trace.writer import one_thread

pytestmark = pytest.mark.whole_matrix
peft = pytest.importorskip("peft")
PROMPT, RESPONSE = [5, 40, 300, 7], [30, 31, 32]


def trainer(adapter: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype="bfloat16")
    return peft.PeftModel.from_pretrained(model, adapter)


def score(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([PROMPT + RESPONSE]), use_cache=False).logits


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "one"
    return write_adapter(folder, data_path("model"), rank=3, alpha=5.0, use_rslora=True)


def test_forwards_of_the_policy_count_and_those_of_the_reference_do_not(
    adapter: Path, tmp_path: Path
) -> None:
    model = trainer(adapter)
    recorder = record.trainer(model, str(tmp_path), every=1, weights=False)
    with one_thread(), torch.no_grad():
        with recorder.step(0, [PROMPT]):
            with model.disable_adapter():
                reference = score(model)
            policy = score(model)
        with (
            pytest.raises(BadOption, match="1 had another adapter"),
            recorder.step(1, [PROMPT]),
            model.disable_adapter(),
        ):
            score(model)
    trace = Trace(step_folder(tmp_path, 0) / "rank-0")
    reader = trace.read_pass("prefill")
    rows = reader.rows("logits")
    assert rows is not None
    values = reader.values("logits", rows, rows.position * 0 + range(len(rows.position)))
    at = torch.from_numpy(rows.position)
    assert torch.equal(values, policy[0, at])
    assert not torch.equal(values, reference[0, at])
    [written] = trace.record.adapters
    assert written is not None
    assert len(written.modules) == 28
    # The copy is what the engine computes with, in PEFT's layout.
    copy = step_folder(tmp_path, 0) / "rank-0" / ADAPTER
    assert read_settings(str(copy)) == read_settings(str(adapter))
    [again] = trainer(copy).peft_config.values()
    assert (again.r, again.lora_alpha, again.use_rslora) == (3, 5.0, True)
    assert torch.equal(score(trainer(copy)), policy)


def second(model: Any, **settings: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], **settings))
    model.set_adapter("other")


def several(model: Any) -> None:
    second(model)
    model.base_model.set_adapter(["default", "other"])


def scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


CHANGES: dict[str, Callable[[Any], None]] = {
    "several active adapters": several,
    "merged into the weights": lambda model: model.merge_adapter(),
    "DoRA": lambda model: second(model, use_dora=True),
    "whose scale was set": scaled,
    "with biases": lambda model: second(model, lora_bias=True),
    "several ranks or scales": lambda model: second(
        model, rank_pattern={"layers.0.self_attn.q_proj": 2}
    ),
    "ModulesToSaveWrapper": lambda model: second(model, modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("said", CHANGES)
def test_what_is_more_than_one_lora_is_refused_by_name(
    adapter: Path, tmp_path: Path, said: str
) -> None:
    model = trainer(adapter)
    CHANGES[said](model)
    recorder = record.trainer(model, str(tmp_path), every=1, weights=False)
    with pytest.raises(BadOption, match=f"{said}.* is not recorded"), recorder.step(0, [PROMPT]):
        score(model)
