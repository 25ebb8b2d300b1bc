"""A live causal LM of transformers in one process."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import LiveRows
from rlk_align.engines.hf.experts import sparse_blocks
from rlk_align.engines.hf.taps import HFTaps
from rlk_align.engines.info import OptionValue
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import resolve_model
from rlk_align.model.shape import read_shape
from rlk_align.record.shared.layout import ADAPTER
from rlk_align.record.train.adapter import active_adapter, active_names, inside_peft
from rlk_align.record.train.live import ForwardInput, Live
from rlk_align.record.train.recorded_engine import RecordedHF
from rlk_align.record.train.segments import Chosen, rows_of, segments
from rlk_align.record.train.weight_files import WeightFiles
from rlk_align.trace.records import writing
from rlk_align.trace.writer import PassWriter

_BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens")
"""Arguments of a forward that say where packed sequences begin."""


class LiveHF(Live):
    """A model of transformers, all of it in this process."""

    engine: RecordedHF
    recorded: tuple[str, type[RecordedHF]] = ("hf", RecordedHF)
    """The engine that describes the model, and its name in specs."""

    def __init__(self, model: Any, *, temperature: float, weights: bool) -> None:
        """model: with PEFT's wrapper or without; temperature: divides the logits; weights: whether
        the weights are saved. Raises BadOption for a model that is not recorded yet."""
        self.model = inside_peft(model)
        check_model(self.model)
        self._temperature, self._weights = temperature, weights
        self._source = source_of(self.model)

    def open(self, folder: Path, about: Path) -> RecordedHF:
        config = folder / "model"
        self._save_config(config)
        shape, (name, kind) = read_shape(config), self.recorded
        engine = kind(EngineSpec(name, self._options()).canonical(shape.dtype), config, shape)
        engine.model, engine.ranks = self.model, self.ranks
        engine.device = self.model.lm_head.weight.device
        engine.active, engine.adapter_folder = active_adapter(self.model), about / ADAPTER
        self._adapters = active_names(self.model)
        if self._weights:
            engine.files = WeightFiles(about / "model", shape.family.modules, self.ranks.rank)
            if self.ranks.rank == 0:
                self._save_config(engine.files.folder)
        self.engine = engine
        return engine

    def counts(self) -> bool:
        return active_names(self.model) == self._adapters

    def _save_config(self, folder: Path) -> None:
        """Writes the config.json of the checkpoint that was loaded, or else the model's own."""
        with writing(folder):
            folder.mkdir(exist_ok=True)
            if self._source is not None:
                shutil.copyfile(self._source / "config.json", folder / "config.json")
            else:
                self.model.config.save_pretrained(folder)

    def _options(self) -> dict[str, OptionValue]:
        options: dict[str, OptionValue] = {
            "attn": str(self.model.config._attn_implementation),
            "dtype": self._dtype(),
        }
        if any(sparse_blocks(self.model)):
            options["experts"] = str(self.model.config._experts_implementation)
        if self._temperature != 1.0:
            options["temperature"] = self._temperature
        return options

    def _dtype(self) -> str:
        """The dtype that the model computes in."""
        return str(self.model.lm_head.weight.dtype).removeprefix("torch.")

    def input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInput:
        ids = _ids(args, kwargs)
        at = next((kwargs[name] for name in _BOUNDARIES if kwargs.get(name) is not None), None)
        positions, boundaries = to_numpy(kwargs.get("position_ids")), to_numpy(at)
        mask = _token_mask(kwargs, positions is not None or boundaries is not None)
        found = list(segments(ids.cpu().numpy(), mask, positions, boundaries))
        return ForwardInput(found, (ids.shape[0], ids.shape[1]), ids.device)

    def taps(self, tap: PassWriter, chosen: Sequence[Chosen], input: ForwardInput) -> Hooks:
        taps = _Taps(self.model, self.engine.places(), tap)
        taps.at(rows_of(chosen, input.shape, "batch first"), input.device)
        taps.columns = input.shape[1]
        taps.install()
        return taps

    def unexposed(self, taps: Hooks) -> dict[str, str]:
        assert isinstance(taps, _Taps)
        return taps.unexposed

    def logprobs(
        self, output: Any, chosen: Chosen, input: ForwardInput
    ) -> tuple[np.ndarray, np.ndarray] | None:
        # The logits `[B, N, V]` may be those of the last N columns.
        logits = output.logits
        dropped = input.shape[1] - logits.shape[1]
        position, targets = chosen.sampled, chosen.targets
        columns = chosen.segment.columns[position] - dropped
        position, targets, columns = (x[columns >= 0] for x in (position, targets, columns))
        at, ids = (torch.from_numpy(x).to(logits.device) for x in (columns, targets))
        return position, self.engine.logprobs(logits[chosen.segment.row, at], ids)


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


def _token_mask(kwargs: dict[str, Any], separated: bool) -> np.ndarray | None:
    """The mask of a forward that is 0 at padding, if it has one. `separated`: whether something
    else separates the sequences: then a mask of pairs of tokens, `[B, 1, S, S]`, is not needed.
    Raises BadOption for another mask."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return to_numpy(mask)
    if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 4 and separated):
        return None
    raise BadOption(
        "an attention mask that is not one of tokens, [B, S], is not understood",
        "give zeros and ones for each token; or with a mask for each pair of tokens also position "
        "ids, which start again in each sequence",
    )


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
    refuse_autocast(ids.device)
    return ids


def refuse_autocast(device: torch.device) -> None:
    """Raises BadOption under torch's autocast."""
    if torch.is_autocast_enabled(device.type):
        raise BadOption(
            "a model under autocast is not recorded", "load it in the dtype that it computes in"
        )


def to_numpy(value: Any) -> np.ndarray | None:
    """A tensor's values; None for None."""
    return None if value is None else value.detach().cpu().numpy()


def source_of(model: Any) -> Path | None:
    """The checkpoint that the model was loaded from, if it is a folder here."""
    name = getattr(model.config, "_name_or_path", "")
    return resolve_model(name) if name and (Path(name) / "config.json").is_file() else None


def check_model(model: Any) -> None:
    """Raises BadOption for a model that is not recorded yet."""
    if not hasattr(model, "lm_head") or not hasattr(getattr(model, "model", None), "layers"):
        raise BadOption(
            f"{type(model).__name__} is not a causal LM of transformers",
            "give the model itself, without another wrapper around it than PEFT's",
        )
    refuse_replaced(model)


def refuse_replaced(model: Any) -> None:
    """Raises BadOption for a model with the kernels, or compiled code."""
    if any(type(m).__module__.partition(".")[0] == "rlk_kernels" for m in model.modules()):
        raise BadOption("a model with the kernels is not recorded", "record it without")
    if any(
        # What torch.compile returns, and what module.compile() changes.
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    ):
        raise BadOption(
            "a compiled model is not recorded: taps see eager code", "record it eagerly"
        )
