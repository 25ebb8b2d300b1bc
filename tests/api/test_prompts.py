"""The prompts of a run: a file, a list, or those of the embedded ones that fit the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_align.api.options import Warn
from rlk_align.api.single import PreparedSingle, Single, prepare
from rlk_align.data import data_path
from rlk_align.errors import PromptError
from rlk_align.model.prompts import Prompt, as_prompts, load_prompts

EMBEDDED = load_prompts(data_path("prompts.jsonl"))


def prepared(folder: Path, warn: Warn = pytest.fail, **flags: Any) -> PreparedSingle:
    return prepare(Single(engine="hf", out=folder, **flags), warn)


def test_embedded_prompts_that_do_not_fit_are_left_out_with_a_word(
    tmp_path: Path, model_copy: Callable[..., Path]
) -> None:
    model = model_copy(config={"max_position_embeddings": 512})
    said: list[str] = []
    ready = prepared(tmp_path / "run", said.append, model=str(model), max_new_tokens=32)
    left = [p.id for p in EMBEDDED if p not in ready.prompts.prompts]
    assert left == ["p07"]
    assert said == [
        "1 of the 64 embedded prompts is omitted: the model leaves 512 positions less 32 new "
        "tokens, and the longest prompt has 512 tokens; --prompts names others"
    ]
    assert not (tmp_path / "run").exists(), "nothing is written before the run starts"
    ready.prompts.save()
    assert ready.request.prompts == tmp_path / "run" / "prompts.jsonl"
    assert load_prompts(ready.request.prompts) == [p for p in EMBEDDED if p.id not in left]
    assert "--prompts" not in ready.command, "the same command leaves out the same ones"
    fewer: list[str] = []
    prepared(tmp_path / "other", fewer.append, model=str(model), max_new_tokens=400)
    assert fewer[0].startswith("15 of the 64 embedded prompts are omitted")


def test_all_embedded_prompts_fit_the_embedded_model(tmp_path: Path) -> None:
    ready = prepared(tmp_path / "run")
    assert ready.request.prompts == data_path("prompts.jsonl")
    ready.prompts.save()
    assert not (tmp_path / "run").exists()


def test_a_users_prompts_are_refused_by_name_and_length(
    tmp_path: Path, model_copy: Callable[..., Path]
) -> None:
    model = model_copy(config={"max_position_embeddings": 64})
    path = tmp_path / "mine.jsonl"
    ids = {"one": 65, "two": 64, "fits": 32, "three": 33, "four": 40, "five": 50}
    lines = [json.dumps({"id": name, "ids": [5] * n}) for name, n in ids.items()]
    path.write_text("\n".join([*lines, json.dumps({"prompt": "7 " * 40})]))
    with pytest.raises(PromptError) as error:
        prepared(tmp_path / "run", model=str(model), prompts=path)
    assert error.value.message == (
        "6 prompts are too long: 'one' of 65, 'two' of 64, 'three' of 33, 'four' of 40 tokens and "
        "2 more; each of them and 32 new ones exceed the 64 positions that the engine has for them"
    )


def test_prompts_may_be_a_list(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert as_prompts(["a\nb", chat, [5, 6], {"id": "x", "prompt": "c"}]) == [
        Prompt("prompt0", "a\nb"),
        Prompt("prompt1", None, messages=tuple(chat)),
        Prompt("prompt2", None, (5, 6)),
        Prompt("x", "c"),
    ]
    ready = prepared(tmp_path / "run", prompts=("The capital", [5, 6]))
    own = tmp_path / "run" / "prompts.jsonl"
    assert ready.request.prompts == own
    [flag] = [i for i, word in enumerate(ready.command) if word == "--prompts"]
    assert ready.command[flag + 1] == str(own), "a command that can be given again"
    ready.prompts.save()
    assert load_prompts(own) == [*ready.prompts.prompts]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "prompts is an empty list"),
        ([""], "prompts[0]: 'prompt' is missing or empty"),
        (["a", 7], "prompts[1] is 7, which is not a prompt"),
        (["a", []], "prompts[1] is [], which is not a prompt"),
        ([{"role": "user", "content": "hi"}], "prompts[0] is one message"),
        ([[{"role": "user"}]], "prompts[0]: each message needs"),
        ([[5, -1]], "prompts[0]: 'ids' must be"),
        ([{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}], "id 'x' is given twice"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, items: list[Any], said: str) -> None:
    with pytest.raises(PromptError) as error:
        prepared(tmp_path / "run", prompts=items)
    assert said in error.value.message
    assert not (tmp_path / "run").exists()
