"""Messages by the model's chat template, and ids by its tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlk_align.errors import ModelError, PromptError
from rlk_align.model.prompts import Prompt
from rlk_align.model.tokenise import rendered, tokenise

TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = Prompt("c", None, messages=({"role": "user", "content": "1 + 1"},))


@pytest.fixture
def chat_model(model_copy: Callable[..., Path]) -> Path:
    """A model whose tokenizer and chat template put the same token before a text."""
    model = model_copy("chat")
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    first = {"id": "<|endoftext|>", "type_id": 0}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": first}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": i, "type_id": 0}} for i in "AB"],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return model


def test_messages_become_text_up_to_the_answer(chat_model: Path) -> None:
    text = Prompt("t", "1 + 1")
    [chat, same] = rendered(chat_model, [ASKED, text])
    assert chat == Prompt("c", "<|endoftext|>user: 1 + 1\nassistant:", rendered=True)
    assert same is text


def test_no_special_token_is_doubled(chat_model: Path) -> None:
    prompts = rendered(chat_model, [ASKED, Prompt("t", "1 + 1"), Prompt("i", None, (5, 6))])
    ids = tokenise(chat_model, prompts)
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    by_transformers = tokenizer.apply_chat_template([*ASKED.messages], add_generation_prompt=True)
    assert ids["c"] == by_transformers["input_ids"]
    assert (ids["c"][0], ids["c"].count(0)) == (0, 1)
    assert (ids["t"][0], ids["t"].count(0)) == (0, 1)
    assert ids["i"] == [5, 6]


def test_a_template_that_takes_no_such_messages(chat_model: Path) -> None:
    wrong = Prompt("w", None, messages=({"role": "tool", "content": "2"},))
    with pytest.raises(PromptError, match="does not accept prompt 'w': no role tool"):
        rendered(chat_model, [ASKED, wrong])


def test_a_template_reaches_nothing_but_the_messages(model_copy: Callable[..., Path]) -> None:
    model = model_copy()
    escape = "{{ messages.__class__.__base__.__subclasses__() }}"
    (model / "chat_template.jinja").write_text(escape)
    with pytest.raises(PromptError, match="unsafe"):
        rendered(model, [ASKED])


def test_a_model_without_a_template(model_copy: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="has no chat template, and prompt 'c'") as error:
        rendered(model_copy(), [Prompt("t", "1 + 1"), ASKED])
    assert '{"prompt"' in error.value.fix
