"""A private API of an engine that has moved: the message says so, and for what it was tested."""

from pathlib import Path

from command import Cli

PATCH = """
def take_away(model):
    import transformers.models.qwen3.modeling_qwen3 as modeling

    del modeling.apply_rotary_pos_emb
"""


def test_the_message_names_the_tested_range(cli: Cli, few_prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "moved.py").write_text(PATCH)
    args = ("--engine", "hf:patch=moved:take_away", "-o", tmp_path / "run")
    env = {"PYTHONPATH": str(tmp_path)}
    done = cli("capture", *args, "--prompts", few_prompts, "--max-new-tokens", 2, env=env)
    assert done.code == 3, done.err
    assert "met an API that differs from the tested one" in done.err
    assert "tested 5.16–5.19" in done.err
    assert "apply_rotary_pos_emb" in done.err
