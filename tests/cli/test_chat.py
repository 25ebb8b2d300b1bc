"""Prompts that are messages of a chat: rendered by the model's chat template, and said to be."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Cli, capture_of

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SHORT = ("--max-new-tokens", 12, "--edges", "prefill_vs_train")
PAIR = ("--rollout", "hf", "--train", "hf:attn=eager")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    lines = [
        json.dumps({"id": f"p{i}", "messages": [{"role": "user", "content": f"{i} + {i}"}]})
        for i in range(4)
    ]
    path.write_text("\n".join([*lines, '{"id": "plain", "prompt": "Q: 7"}']) + "\n")
    return path


def test_messages_are_rendered_by_the_chat_template(
    cli: Cli, model_copy: Callable[..., Path], prompts: Path, tmp_path: Path
) -> None:
    model = model_copy()
    (model / "chat_template.jinja").write_text(TEMPLATE)
    run = tmp_path / "run"
    done = cli("compare", "--model", model, "--prompts", prompts, *PAIR, *SHORT, "--run-dir", run)
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.verdict["precheck"]["tokens"] == "equal"
    said = "4 of 5 prompts rendered by the model's chat template"
    assert said in done.err
    assert said in done.out
    for role in ("rollout", "train"):
        trace = capture_of(run, role)
        recorded = (trace.folder / "prompts.jsonl").read_text().splitlines()
        assert json.loads(recorded[1]) == {
            "id": "p1",
            "prompt": "user: 1 + 1\nassistant:",
            "chat_template": True,
        }
        assert json.loads(recorded[4]) == {"id": "plain", "prompt": "Q: 7"}

    # A capture alone, scored elsewhere: by what it recorded, not by a template.
    (model / "chat_template.jinja").unlink()
    rollout = f"replay:path={run}"
    again = cli("compare", "--rollout", rollout, "--train", "hf:attn=eager", *SHORT[2:])
    assert again.code == 0, again.out + again.err
    assert said in again.out


def test_a_model_without_a_chat_template_is_refused(
    cli: Cli, prompts: Path, tmp_path: Path
) -> None:
    done = cli("compare", *PAIR, *SHORT, "--prompts", prompts, "--run-dir", tmp_path / "run")
    assert done.code == 2
    assert "has no chat template, and prompt 'p0' is given as messages" in done.err
    assert not (tmp_path / "run").exists(), "nothing was begun"
