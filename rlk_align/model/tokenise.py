"""Prompts -> token ids, by the checkpoint's tokenizer and chat template."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rlk_align.errors import ModelError, PromptError
from rlk_align.model.checkpoint import GIVE_IDS
from rlk_align.model.prompts import Prompt
from rlk_align.text import one_line


def tokenise(model: Path, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """The ids of each prompt. The tokenizer adds its default special tokens, except to text that a
    chat template rendered, which includes them. Prompts with ids are returned as they are.

    Raises ModelError if the tokenizer cannot be loaded.
    """
    return {p.id: list(p.ids) if p.ids else _tokens_of(model, p) for p in prompts}


def _tokens_of(model: Path, prompt: Prompt) -> list[int]:
    tokenizer = _tokenizer(model)
    special = not prompt.rendered
    return tokenizer(prompt.text, add_special_tokens=special, verbose=False)["input_ids"]


def rendered(model: Path, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, with messages rendered by the model's chat template, up to the beginning of the
    answer.

    Raises ModelError if the model has no chat template, PromptError if it rejects messages."""
    return [_rendered(model, p) if p.messages else p for p in prompts]


def _rendered(model: Path, prompt: Prompt) -> Prompt:
    # The files are checked first, because the import of transformers takes seconds.
    if not _may_have_template(model) or not _tokenizer(model).chat_template:
        raise ModelError(
            f"{model} has no chat template, and prompt {prompt.id!r} is given as messages",
            'give the text that the model has to continue: {"prompt": "..."}',
        )
    tokenizer = _tokenizer(model)
    messages = [*(prompt.messages or ())]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        # A template's own code may raise any exception for messages that it does not support.
        what = f"the chat template of {model} does not accept prompt {prompt.id!r}"
        raise PromptError(f"{what}: {one_line(error)}") from error
    if not text:
        raise PromptError(f"the chat template of {model} does not render prompt {prompt.id!r}")
    return replace(prompt, text=text, messages=None, rendered=True)


def _may_have_template(model: Path) -> bool:
    """Whether a file of the model may have a chat template."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    config = model / "tokenizer_config.json"
    return any((model / name).exists() for name in files) or (
        config.is_file() and b'"chat_template"' in config.read_bytes()
    )


def fast_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, which loads fast, without transformers and its changes.

    Raises ModelError if there is no tokenizer.
    """
    path = model / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain exceptions, even for a missing file
        raise ModelError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=2)
def _tokenizer(model: Path) -> Any:
    """The model's tokenizer in transformers, loaded once in a process."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:
        # A tokenizer's own code may raise any exception for files that it cannot read.
        what = f"{model}: transformers cannot load its tokenizer: {one_line(error)}"
        raise ModelError(what, GIVE_IDS) from error
