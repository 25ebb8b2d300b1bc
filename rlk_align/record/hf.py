"""Records the forwards of a live trainer: a causal LM of transformers, in one process."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import LiveRows
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.hf.taps import HFTaps
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import resolve_model
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import read_shape
from rlk_align.record.choose import Key, Lowest, Prompts, prefix_hash
from rlk_align.record.segments import Segment, rows_of, segments
from rlk_align.record.shard import (
    SCORED,
    Shard,
    SideFolder,
    refuse_unless_dense,
    sequence_name,
)
from rlk_align.trace.writer import PassWriter

ENGINES = ("auto", "hf")
_BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens")
"""Arguments of a forward that say where packed sequences begin."""


class Recorder:
    """Records some sequences of some steps of a trainer; `rlk_align.record.trainer` makes one."""

    def __init__(
        self,
        model: Any,
        out: str,
        *,
        engine: str,
        sequences: int,
        every: int,
        temperature: float,
        budget: int,
        weights: bool,
    ) -> None:
        if engine not in ENGINES:
            raise BadOption(
                f"engine {engine!r} is not recorded",
                f"choose from {', '.join(ENGINES)}; Megatron, FSDP2 and DeepSpeed are not built",
            )
        for name, value in {"sequences": sequences, "every": every, "budget": budget}.items():
            if value < 1:
                raise BadOption(f"{name}={value}: it must be at least 1")
        _check_model(model)
        self._model, self._sequences, self._every = model, sequences, every
        self._temperature, self._weights = temperature, weights
        self._source = _source(model)
        self._folder = SideFolder(out, "train", budget)

    def close(self) -> None:
        """Lets another recorder use the folder."""
        self._folder.close()

    @contextmanager
    def step(self, number: int, prompts: Iterable[Sequence[int]]) -> Iterator[None]:
        """Records the forwards in the context, if `number` is a multiple of `every`.

        prompts: the token ids of each prompt of the step. A sequence that begins with one of them
        is seen; the first forward of a sequence counts, so one that gradient checkpointing repeats
        does not. The context has to hold the forwards of the whole step, because the sequences with
        the lowest hashes among all of them are recorded.

        Raises BadOption if the step is recorded already, if the model runs under autocast, or if no
        sequence begins with one of the prompts.
        """
        if number % self._every:
            yield
            return
        known = Prompts(prompts)
        with self._folder.shard(number) as shard:
            with torch.no_grad():
                live = self._live(shard)
                shard.describe(live, known.by_hash.values())
            with ExitStack() as opened:
                writers = {name: opened.enter_context(shard.writer(name)) for name in SCORED}
                recording = _Recording(live, known, self._sequences, writers)
                handles = recording.attach(self._model)
                try:
                    yield
                finally:
                    for handle in handles:
                        handle.remove()
                recording.finish(shard)

    def _live(self, shard: Shard) -> HFEngine:
        """The adapter of HF transformers around the live model."""
        folder = shard.path / "model"
        folder.mkdir()
        if self._weights:
            self._model.save_pretrained(folder)
        if self._source is not None:
            shutil.copyfile(self._source / "config.json", folder / "config.json")
        elif not self._weights:
            self._model.config.save_pretrained(folder)
        shape = read_shape(folder)
        options: dict[str, str | int | float | bool] = {
            "attn": str(self._model.config._attn_implementation),
            "dtype": str(self._model.lm_head.weight.dtype).removeprefix("torch."),
        }
        if self._temperature != 1.0:
            options["temperature"] = self._temperature
        engine = HFEngine(EngineSpec("hf", options).canonical(shape.dtype), folder, shape)
        refuse_unless_dense(engine)
        engine.model, engine.device = self._model, self._model.lm_head.weight.device
        return engine


class _Recording:
    """The forwards of one step."""

    def __init__(
        self,
        engine: HFEngine,
        prompts: Prompts,
        sequences: int,
        writers: dict[str, PassWriter],
    ) -> None:
        self._engine, self._prompts, self._writers = engine, prompts, writers
        self._count, self._lowest = sequences, Lowest(sequences)
        self._samples: list[Sample] = []
        self._numbers: dict[Key, int] = {}
        self._seen: set[Key] = set()
        self._here: list[tuple[int, int, Segment]] = []
        self._taps: _Taps | None = None
        self._unexposed: dict[str, str] = {}
        self._repeating = False

    def attach(self, model: Any) -> list[Any]:
        return [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def _before(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._repeating:
            return
        ids = _ids(args, kwargs)
        at = next((kwargs[name] for name in _BOUNDARIES if kwargs.get(name) is not None), None)
        given = kwargs.get("attention_mask"), kwargs.get("position_ids"), at
        mask, positions, boundaries = map(_numpy, given)
        self._here = []
        for segment in segments(ids.cpu().numpy(), mask, positions, boundaries):
            self._offer(segment)
        if self._here:
            self._shape, self._device = (ids.shape[0], ids.shape[1]), ids.device
            self._taps = self._tapped("prefill")

    def _offer(self, segment: Segment) -> None:
        """Records a sequence if it is among the lowest so far."""
        found = self._prompts.of(segment.ids)
        if found is None:
            return
        name, length = found
        key = (name, prefix_hash(segment.ids))
        if key in self._seen:
            return
        self._seen.add(key)
        if self._lowest.offer(key):
            number = self._numbers[key] = len(self._samples)
            ids = segment.ids
            self._samples.append(Sample(sequence_name(ids), ids[:length], ids[length:]))
            self._here.append((number, length, segment))

    def _tapped(self, name: str) -> "_Taps":
        """Installs taps on the rows of the next forward."""
        taps = _Taps(self._engine.model, self._engine.places(), self._writers[name])
        taps.at(rows_of(self._here, self._shape), self._device)
        taps.columns = self._shape[1]
        taps.install()
        return taps

    def _after(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        taps, self._taps = self._taps, None
        if taps is None:
            return
        taps.close()
        if output is None:  # the forward raised an error
            return
        self._unexposed |= taps.unexposed
        self._log("prefill", output.logits)
        self._repeating = True
        try:
            # What is random draws the same numbers afterwards as without the controls.
            with torch.random.fork_rng():
                self._log("prefill.untapped", model(*args, **kwargs).logits)
                taps = self._tapped("prefill.repeat")
                try:
                    self._log("prefill.repeat", model(*args, **kwargs).logits)
                finally:
                    taps.close()
        finally:
            self._repeating = False

    @torch.no_grad()
    def _log(self, name: str, logits: torch.Tensor) -> None:
        """Records the log-probs of the sampled tokens. logits: `[B, N, V]`, of the last N
        columns."""
        dropped = self._shape[1] - logits.shape[1]
        for number, length, segment in self._here:
            position = np.arange(length - 1, len(segment.ids) - 1)
            columns = segment.columns[position] - dropped
            position, columns = position[columns >= 0], columns[columns >= 0]
            ids = np.array(segment.ids)[position + 1]
            at = torch.from_numpy(columns).to(logits.device)
            targets = torch.from_numpy(ids).to(logits.device)
            values = self._engine.logprobs(logits[segment.row, at], targets)
            rows = torch.from_numpy(np.asarray(values, dtype=np.float32)).reshape(-1, 1)
            self._writers[name]("logprob", rows, np.full(len(position), number), position)

    def finish(self, shard: Shard) -> None:
        """Completes the shard. Raises BadOption if nothing was recorded."""
        if not self._samples:
            raise BadOption(
                "no forward of the step had a sequence that begins with one of its prompts",
                "give the token ids of the prompts as the model reads them, without padding",
            )
        for writer in self._writers.values():
            writer.finish(self._unexposed)
        chosen = sorted(self._numbers[key] for key in self._lowest.keys)
        shard.finish(TokenBatch(tuple(self._samples)), chosen, self._count, len(self._seen))


class _Taps(HFTaps):
    """Taps that are installed while one forward runs."""

    columns: int
    """The columns of the input, of which logits may have the last ones only."""

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows:
        if place.rows == "all":
            return super().live_rows(place, value)
        rows, kept = self._rows, value.shape[1]
        row, column = np.divmod(rows.index, self.columns)
        column = column - (self.columns - kept)
        at = rows.sampled & (column >= 0)
        index = torch.from_numpy((row * kept + column)[at]).to(self._device)
        return LiveRows(index, rows.sample[at], rows.position[at], value.shape[:2].numel())

    @torch.no_grad()
    def observe(self, place: Place, value: torch.Tensor, rows: LiveRows) -> None:
        super().observe(place, value.detach(), rows)


def _ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The token ids `[B, S]` that a forward reads. Raises BadOption for a forward that is not
    recorded."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        raise BadOption("a forward without input_ids is not recorded", "give token ids")
    if kwargs.get("past_key_values") is not None:
        raise BadOption(
            "a forward with cached keys and values is not recorded", "score whole sequences"
        )
    if torch.is_autocast_enabled(ids.device.type):
        raise BadOption(
            "a model under autocast is not recorded", "load it in the dtype that it computes in"
        )
    return ids


def _numpy(value: Any) -> np.ndarray | None:
    return None if value is None else value.detach().cpu().numpy()


def _source(model: Any) -> Path | None:
    """The checkpoint that the model was loaded from, if it is a folder here."""
    name = getattr(model.config, "_name_or_path", "")
    return resolve_model(name) if name and (Path(name) / "config.json").is_file() else None


def _check_model(model: Any) -> None:
    """Raises BadOption for a model that is not recorded yet."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise BadOption(
            f"a trainer of {dist.get_world_size()} ranks is not recorded: one process so far",
            "rlk-align compare --train fsdp:dp=N scores the same ids with ranks of its own",
        )
    if not hasattr(model, "lm_head") or not hasattr(getattr(model, "model", None), "layers"):
        raise BadOption(
            f"{type(model).__name__} is not a causal LM of transformers",
            "give the model itself, without a wrapper or an adapter around it",
        )
    names = {type(module).__module__ for module in model.modules()}
    for package, words in {"peft": "an adapter", "rlk_kernels": "the kernels"}.items():
        if any(name.partition(".")[0] == package for name in names):
            raise BadOption(f"a model with {words} is not recorded", "record it without")
    if any(
        hasattr(module, "_compiled_call_impl") and module._compiled_call_impl is not None
        for module in model.modules()
    ):
        raise BadOption(
            "a compiled model is not recorded: taps see eager code", "record it eagerly"
        )
