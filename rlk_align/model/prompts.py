"""Prompts -> TokenBatch: the token ids that both engines get."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlk_align.errors import CorruptTrace, PromptError
from rlk_align.files import read_text, whole_file
from rlk_align.text import short_printable


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text, the messages of a chat, or token ids."""

    id: str
    text: str | None
    ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    """The messages of a chat; None after the model's chat template has rendered them as `text`."""
    rendered: bool = False
    """Whether a chat template rendered `text`, which then includes special tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence: a prompt and the response that was sampled after it."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    counted: tuple[bool, ...] | None = None
    """Whether the log-prob of each response id counts, by the mask of a dump; None if all count."""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids

    @property
    def sampled_positions(self) -> range:
        """The positions whose next token was sampled, and so has a log-prob."""
        return range(len(self.prompt_ids) - 1, len(self.ids) - 1)


RENDERED = "chat_template"
"""The key that marks a recorded prompt as rendered by a chat template."""

_DIGEST = b"blake2b"
_SCHEMA = pa.schema(
    [
        ("sample", pa.int32()),
        ("prompt_id", pa.string()),
        ("position", pa.int32()),
        ("token", pa.int32()),
        ("sampled", pa.bool_()),
    ]
)


_COUNTED = pa.field("counted", pa.bool_())


def _counted(sample: Sample) -> tuple[bool, ...]:
    """Whether the log-prob of each id of a sample counts."""
    response = sample.counted or (True,) * len(sample.response_ids)
    return (False,) * len(sample.prompt_ids) + response


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The sequences of a run, in order; sample i is `samples[i]`."""

    samples: tuple[Sample, ...]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s.response_ids) for s in self.samples)

    @property
    def counted_tokens(self) -> int:
        """Sampled tokens whose log-prob counts."""
        return sum(
            len(s.response_ids) if s.counted is None else sum(s.counted) for s in self.samples
        )

    def with_responses(self, responses: Sequence[Sequence[int]]) -> "TokenBatch":
        """The same prompts, followed by these sampled ids."""
        pairs = zip(self.samples, responses, strict=True)
        return TokenBatch(tuple(replace(s, response_ids=tuple(r), counted=None) for s, r in pairs))

    def save(self, path: Path) -> None:
        """Writes a table with a row for each token: sample, prompt_id, position, token, sampled;
        and counted, if a sample has a mask."""
        rows = [
            (i, s.prompt_id, p, token, p >= len(s.prompt_ids))
            for i, s in enumerate(self.samples)
            for p, token in enumerate(s.ids)
        ]
        named = [dict(zip(_SCHEMA.names, row, strict=True)) for row in rows]
        table = pa.Table.from_pylist(named, _SCHEMA)
        if self._masked:
            counted = [c for s in self.samples for c in _counted(s)]
            table = table.append_column(_COUNTED, pa.array(counted, _COUNTED.type))
        table = table.replace_schema_metadata({_DIGEST: self._digest()})
        with whole_file(path) as partial:
            pq.write_table(table, partial, write_page_checksum=True)

    @property
    def _masked(self) -> bool:
        return any(s.counted is not None for s in self.samples)

    def _digest(self) -> bytes:
        """A digest of the table's contents, since the footer of a Parquet file has no checksum."""
        text = repr([(s.prompt_id, s.prompt_ids, s.response_ids) for s in self.samples])
        if self._masked:
            text += repr([_counted(s) for s in self.samples])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest().encode()

    @classmethod
    def load(cls, path: Path) -> "TokenBatch":
        """Reads a table of `save`. Raises CorruptTrace for any other file."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CorruptTrace(f"{path} cannot be read: {error}") from error
        masked = table.schema.equals(_SCHEMA.append(_COUNTED))
        if not masked and not table.schema.equals(_SCHEMA):
            raise CorruptTrace(f"{path} does not have the columns of a batch of tokens")
        parts: dict[int, tuple[str, list[int], list[int]]] = {}
        counted: dict[int, list[bool]] = {}
        for row in table.to_pylist():
            _, prompt, response = parts.setdefault(row["sample"], (row["prompt_id"], [], []))
            if row["position"] != len(prompt) + len(response):
                raise CorruptTrace(f"{path}: sample {row['sample']} lacks a position")
            (response if row["sampled"] else prompt).append(row["token"])
            if masked and row["sampled"]:
                counted.setdefault(row["sample"], []).append(row[_COUNTED.name])
        if sorted(parts) != list(range(len(parts))) or not parts:
            raise CorruptTrace(f"{path}: samples are missing")
        batch = cls(
            tuple(
                Sample(name, tuple(p), tuple(r), tuple(counted.get(k, ())) if masked else None)
                for k, (name, p, r) in sorted(parts.items())
            )
        )
        if (table.schema.metadata or {}).get(_DIGEST) != batch._digest():
            raise CorruptTrace(f"{path} was changed after it was written")
        return batch


def load_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON Lines (`{"prompt": text}`, `{"messages": [...]}` or `{"ids": [...]}`, and
    an optional `id`), or from any other text file, in which each line is a prompt.

    Raises PromptError, which names the line, for a missing, empty or malformed file.
    """
    if path.exists() and not path.is_file():
        raise PromptError(
            f"prompts are read more than once, and {path} is not a regular file", "save them as one"
        )
    try:
        text = read_text(path)
    except OSError as error:
        raise PromptError(f"prompts cannot be read: {path}: {error.strerror}") from error
    except ValueError as error:
        raise PromptError(f"prompts cannot be read: {path}: {error}") from error
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise PromptError(f"no prompts in {path}", "give at least one prompt")
    if path.suffix not in (".jsonl", ".json"):
        return [Prompt(f"line{n}", line) for n, line in lines]
    prompts = [_parse_line(path, n, line) for n, line in lines]
    ids: set[str] = set()
    for (number, _), prompt in zip(lines, prompts, strict=True):
        if prompt.id in ids:
            raise PromptError(f"{path}:{number}: id {prompt.id!r} already exists")
        ids.add(prompt.id)
    return prompts


def as_prompts(items: Sequence[Any]) -> list[Prompt]:
    """Prompts from Python values: texts, lists of messages, lists of token ids, or records like the
    lines of a file.

    Raises PromptError, which names the entry, for anything else.
    """
    if not items:
        raise PromptError("prompts is an empty list", "give at least one prompt")
    prompts = [
        _parse_record(f"prompts[{i}]", f"prompt{i}", _as_record(i, item))
        for i, item in enumerate(items)
    ]
    ids = Counter(p.id for p in prompts)
    for i, prompt in enumerate(prompts):
        if ids[prompt.id] > 1:
            raise PromptError(f"prompts[{i}]: id {prompt.id!r} is given twice")
    return prompts


def _as_record(index: int, item: Any) -> Mapping[str, Any]:
    if isinstance(item, str):
        return {"prompt": item}
    if isinstance(item, Mapping):
        if "role" in item:
            raise PromptError(
                f"prompts[{index}] is one message, and a chat is a list of them",
                'give a list of lists: [[{"role": "user", "content": "..."}]]',
            )
        return dict(item)
    if isinstance(item, Sequence) and item:
        if all(isinstance(entry, Mapping) for entry in item):
            return {"messages": [dict(entry) for entry in item]}
        return {"ids": list(item)}
    raise PromptError(
        f"prompts[{index}] is {short_printable(repr(item), 44)}, which is not a prompt",
        "give a text, a list of messages, or a list of token ids",
    )


def save_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Writes prompts as JSON Lines, completely or not at all."""
    lines = "".join(json.dumps(_record(p), ensure_ascii=False) + "\n" for p in prompts)
    with whole_file(path) as partial:
        partial.write_text(lines, encoding="utf-8")


def _record(prompt: Prompt) -> dict[str, Any]:
    """The record that `_parse_line` reads as this prompt."""
    if prompt.ids:
        return {"id": prompt.id, "ids": prompt.ids}
    if prompt.messages:
        return {"id": prompt.id, "messages": prompt.messages}
    marked = {RENDERED: True} if prompt.rendered else {}
    return {"id": prompt.id, "prompt": prompt.text} | marked


def _parse_line(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}:{number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise PromptError(f"{where}: not a JSON object")
    return _parse_record(where, f"line{number}", record)


def _parse_record(where: str, default_id: str, record: Mapping[str, Any]) -> Prompt:
    """A prompt from a record; `default_id`: the id of a prompt without one."""
    name = str(record.get("id", default_id))
    text, ids = record.get("prompt"), record.get("ids")
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(t) is int and t >= 0 for t in ids):
            raise PromptError(f"{where}: 'ids' must be a non-empty list of token ids")
        return Prompt(name, None, tuple(ids))
    if "messages" in record:
        return Prompt(name, None, messages=_parse_messages(where, record))
    if text is not None and not isinstance(text, str):
        raise PromptError(f"{where}: 'prompt' is {text!r}; it must be text")
    if not text:
        raise PromptError(f"{where}: 'prompt' is missing or empty")
    _check_text(where, name + text)
    return Prompt(name, text, rendered=record.get(RENDERED) is True)


def _parse_messages(where: str, record: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    messages = record["messages"]
    if "prompt" in record:
        raise PromptError(f"{where}: 'prompt' and 'messages' are both given", "leave one out")
    if not isinstance(messages, list) or not messages:
        raise PromptError(f"{where}: 'messages' must be a non-empty list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise PromptError(f"{where}: each message needs a 'role' and a 'content', both text")
    _check_text(where, json.dumps(record, ensure_ascii=False))
    return tuple(messages)


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: not text: {error}") from error


_MAX_NAMED = 4
"""The largest number of prompts that an error lists; the others are counted."""


def check_lengths(batch: TokenBatch, context: int, vocab: int, max_new_tokens: int) -> None:
    """Raises PromptError for a prompt that has no tokens or has ids beyond the vocabulary, or that
    does not fit the model's context together with the tokens to sample."""
    check_ids(batch, vocab)
    lengths = {s.prompt_id: len(s.ids) for s in batch.samples}
    long = {name: length for name, length in lengths.items() if length + max_new_tokens > context}
    refuse_long(long, context, max_new_tokens)


def check_ids(batch: TokenBatch, vocab: int) -> None:
    """Raises PromptError for a prompt that has no tokens or has ids beyond the vocabulary."""
    for s in batch.samples:
        if not s.prompt_ids:
            raise PromptError(f"prompt {s.prompt_id!r} has no tokens")
        if max(s.ids) >= vocab:
            raise PromptError(
                f"prompt {s.prompt_id!r} has token id {max(s.ids)}; "
                f"the model's vocabulary has {vocab} entries"
            )


def refuse_long(lengths: Mapping[str, int], context: int, max_new_tokens: int) -> None:
    """Raises PromptError if any prompts do not fit. `lengths`: their numbers of tokens, by id."""
    if not lengths:
        return
    exceed = (
        f"and {max_new_tokens} new ones exceed the {context} positions that the engine has for them"
    )
    if len(lengths) == 1:
        [(name, length)] = lengths.items()
        raise PromptError(
            f"prompt {name!r} is too long: {length} tokens {exceed}",
            "shorten the prompt or lower --max-new-tokens",
        )
    named = ", ".join(f"{n!r} of {k}" for n, k in list(lengths.items())[:_MAX_NAMED])
    more = f" and {len(lengths) - _MAX_NAMED} more" if len(lengths) > _MAX_NAMED else ""
    raise PromptError(
        f"{len(lengths)} prompts are too long: {named} tokens{more}; each of them {exceed}",
        "shorten or remove these prompts, or lower --max-new-tokens",
    )
