"""A live GPTModel of megatron-core, or the part of it that a rank has.

All ranks of a pipeline see the token ids of every micro-batch, and so choose the same sequences
without a message. A stage repeats its forward on the input that it received.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import LiveRows
from rlk_align.engines.info import OptionValue
from rlk_align.engines.megatron.engine import MegatronEngine
from rlk_align.engines.megatron.experts import routers
from rlk_align.engines.megatron.grid import Grid
from rlk_align.engines.megatron.model import Settings, read_checkpoint
from rlk_align.engines.megatron.stages import Stage
from rlk_align.engines.megatron.taps import MegatronTaps
from rlk_align.engines.process.ranks import Ranks, gather
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import EXPERT, resolve_model
from rlk_align.model.shape import ModelShape, read_shape
from rlk_align.record.shared.choose import Key
from rlk_align.record.shared.together import of_all, on_all, on_first
from rlk_align.record.train.hf import refuse_autocast, refuse_replaced, to_numpy
from rlk_align.record.train.live import ForwardInput, Live
from rlk_align.record.train.megatron_limits import check_chunk, check_grid, gpt_models
from rlk_align.record.train.rank_attributes import of_ranks
from rlk_align.record.train.segments import Chosen, rows_of, segments
from rlk_align.record.train.weight_files import WeightFiles, write_index
from rlk_align.trace.records import writing
from rlk_align.trace.writer import PassWriter

_ARGUMENTS = ("input_ids", "position_ids", "attention_mask")
"""The first arguments of a GPTModel's forward."""


class LiveMegatron(Live):
    """A GPTModel with the local spec: tensor, sequence, pipeline and data parallel. With virtual
    stages, one of the chunks of this rank, of which the first knows the others."""

    engine: "_Engine"

    def __init__(
        self, model: Any, checkpoint: str, *, temperature: float, weights: bool, chunk: int = 0
    ) -> None:
        """model: the GPTModel of this rank or, with virtual stages, the list of its chunks;
        checkpoint: the folder of the Hugging Face checkpoint that the model was converted from,
        whose config.json is read; chunk: which of them this is. Raises BadOption for a model that
        is not recorded yet."""
        models = gpt_models(model)
        self.model = models[chunk]
        refuse_replaced(self.model)
        self._temperature, self._weights = temperature, weights
        self._source = resolve_model(checkpoint)
        device = next(self.model.parameters()).device
        self.ranks = Ranks(dist.get_rank(), dist.get_world_size(), device)
        grid = self._grid = Grid.of(self.ranks)
        check_grid(grid)
        self._number, self._chunks = chunk * grid.pp.world + grid.pp.rank, len(models)
        self.replica, self.alone = grid.dp.rank, grid.dp.world == 1
        # Ranks that share experts exchange tokens in each forward.
        self.place, self.taps_together = grid.ep.rank, grid.ep.world > 1
        self._logits: torch.Tensor | None = None
        self._others = [
            LiveMegatron(models, checkpoint, temperature=temperature, weights=weights, chunk=i)
            for i in range(1, len(models))
            if chunk == 0
        ]

    @property
    def parts(self) -> "list[LiveMegatron]":
        return [self, *self._others]

    def open(self, folder: Path, about: Path) -> "_Engine":
        config = folder / "model" / "config.json"
        with writing(config):
            config.parent.mkdir()
            shutil.copyfile(self._source / "config.json", config)
        shape = read_shape(config.parent)
        for part in self.parts:
            part._describe(config.parent, shape)
        engine = self.engine
        engine.parts = [part.engine for part in self.parts]
        if self._weights:
            engine.files = WeightFiles(about / "model", shape.family.modules, self.ranks.rank)
            if self.ranks.rank == 0:
                with writing(engine.files.folder):
                    engine.files.folder.mkdir(exist_ok=True)
                    shutil.copyfile(config, engine.files.folder / "config.json")
        return engine

    def _describe(self, config: Path, shape: ModelShape) -> None:
        """Makes the adapter around this chunk. `config`: the folder with config.json."""
        stage = Stage(self._number, self._chunks * self._grid.pp.world, shape.layers)
        check_chunk(self.model, shape, stage, self._grid)
        spec = EngineSpec("megatron", self._options()).canonical(shape.dtype)
        engine = self.engine = _Engine(spec, config, shape)
        engine.ranks, engine.grid, engine.model = self.ranks, self._grid, self.model
        engine.attach(stage, self._temperature)

    def _options(self) -> dict[str, OptionValue]:
        parameter = next(self.model.parameters())
        options: dict[str, OptionValue] = {
            "tp": self._grid.tp.world,
            "pp": self._grid.pp.world,
            "ep": self._grid.ep.world,
            "sp": bool(self.model.config.sequence_parallel),
            "dtype": str(parameter.dtype).removeprefix("torch."),
        }
        if self._temperature != 1.0:
            options["temperature"] = self._temperature
        return options

    def input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInput:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        ids = given.get("input_ids")
        if ids is None:
            raise BadOption(
                f"rank {self.ranks.rank}: a forward without input_ids is not recorded",
                "give the token ids of a micro-batch to every stage of the pipeline",
            )
        if given.get("inference_context") is not None:
            raise BadOption("a forward with cached keys and values is not recorded")
        refuse_autocast(ids.device)
        packed, boundaries = given.get("packed_seq_params"), None
        if packed is not None:
            ends = getattr(packed, "cu_seqlens_q_padded", None)
            if ends is not None and not torch.equal(ends, packed.cu_seqlens_q):
                raise BadOption("packed sequences with padding between them are not recorded")
            boundaries = to_numpy(packed.cu_seqlens_q)
        positions = to_numpy(given.get("position_ids"))
        if positions is None and boundaries is None:
            raise BadOption(
                "a forward without position_ids is not recorded: they tell sequences from padding",
                "give position ids that start again in each sequence, and are 0 at padding",
            )
        found = list(segments(ids.cpu().numpy(), None, positions, boundaries))
        return ForwardInput(found, (ids.shape[0], ids.shape[1]), ids.device)

    def keys_of_all(self, keys: list[Key]) -> list[list[Key]]:
        return of_all(self._grid.ep, keys)

    def taps(self, tap: PassWriter, chosen: Sequence[Chosen], input: ForwardInput) -> Hooks:
        engine = self.engine
        taps = _Taps(
            self.model, engine.own_places, tap, None, self._grid, engine.stage,
            engine.settings.sequence_parallel,
        )  # fmt: skip
        taps.at(rows_of(chosen, input.shape, "sequence first"), input.device)
        taps.install()
        return taps

    def unexposed(self, taps: Hooks) -> dict[str, str]:
        return self.engine.unexposed("prefill")

    def see_forwards(self) -> Hooks:
        hooks = Hooks()
        if self.model.post_process:
            hooks.on_output(self.model.output_layer, self._keep_logits)
        return hooks

    def _keep_logits(self, output: Any) -> None:
        """Keeps the logits `[S, B, vocabulary / tp]`: the model may return a loss."""
        self._logits = output[0].detach()

    def logprobs(
        self, output: Any, chosen: Chosen, input: ForwardInput
    ) -> tuple[np.ndarray, np.ndarray] | None:
        if not self.engine.stage.is_last:
            return None
        assert self._logits is not None
        position, batch = chosen.sampled, input.shape[0]
        cells = chosen.segment.columns[position] * batch + chosen.segment.row
        rows, targets = (torch.from_numpy(x).to(input.device) for x in (cells, chosen.targets))
        found = self.engine.shared_logprobs(self._logits.transpose(0, 1), rows, targets)
        return (position, found) if self._grid.tp.rank == 0 else None

    def passed_on(
        self, output: Any, chosen: Sequence[Chosen], input: ForwardInput
    ) -> tuple[str, torch.Tensor, ForwardRows] | None:
        stage = self.engine.stage
        if stage.is_last:
            return None
        value = output.detach()
        if self.engine.settings.sequence_parallel:
            parts = gather(value, self._grid.tp)
            value = value if parts is None else torch.cat(parts)
        if self._grid.tp.rank:
            return None
        rows = rows_of(chosen, input.shape, "sequence first")
        at = torch.from_numpy(rows.index).to(value.device)
        site = f"layers.{stage.first + stage.share - 1}.mlp_residual"
        return site, value.flatten(0, 1)[at], rows

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()
        states = tracker.get_states()
        counts = [(c, c.clone()) for c in token_counts(self.model)]
        with super().undisturbed(), kept_losses():
            yield
        if states:
            tracker.set_states(states)
        with torch.no_grad():
            for count, before in counts:
                count.copy_(before)


def token_counts(model: Any) -> Iterator[torch.Tensor]:
    """The counts of each expert's tokens, by which megatron-core corrects routers as it trains."""
    for router in routers(model):
        if getattr(router, "local_tokens_per_expert", None) is not None:
            yield router.local_tokens_per_expert


@contextmanager
def kept_losses() -> Iterator[None]:
    """Leaves megatron-core's sums of its routers' losses, which it reports, as they were before."""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    tracker = get_moe_layer_wise_logging_tracker()
    sums = {name: x["values"].clone() for name, x in tracker.items() if "values" in x}
    yield
    for name in [*tracker]:
        if name not in sums:
            del tracker[name]
        else:
            tracker[name]["values"].copy_(sums[name])


class _Engine(MegatronEngine):
    """The adapter, which saves parameters as it gathers them."""

    files: WeightFiles | None = None
    parts: "Sequence[_Engine]"
    """The adapters of all chunks of this rank, in their order; the first describes the rank."""

    def attach(self, stage: Stage, temperature: float) -> None:
        """Describes the live model, which is a stage."""
        grid, config = self.grid, self.model.config
        self.stage = replace(stage, experts=self.held_experts())
        self.temperature, self.batch = temperature, 1
        parameter = next(self.model.parameters())
        self.settings = Settings(
            tp=grid.tp.world,
            cp=1,
            ep=grid.ep.world,
            stage=self.stage,
            device=parameter.device,
            dtype=parameter.dtype,
            sequence_parallel=bool(config.sequence_parallel),
        )
        self.find(read_checkpoint(self.model_path, self.shape, self._live_option))

    def whole_parameters(self) -> Iterator[LiveParameter]:
        # Replicas have the same parameters, but for the experts.
        dp, ep = self.grid.dp.rank, self.grid.ep.world
        for parameter in chain.from_iterable(map(MegatronEngine.whole_parameters, self.parts)):
            saves = dp == 0 or (dp < ep and EXPERT.match(parameter.name) is not None)
            if self.files is not None and saves:
                self.files.add(parameter.name, parameter.value)
            yield parameter
        if self.files is None:
            return
        on_all(self.ranks, self.files.finish)
        every = of_all(self.ranks, self.files.written)
        written = {tensor: file for of_rank in every for tensor, file in of_rank.items()}
        on_first(self.ranks, partial(write_index, self.files.folder, written))

    def facts(self) -> list[dict[str, Any]]:
        return [*chain.from_iterable(map(MegatronEngine.facts, self.parts))]

    def attributes(self) -> dict[str, Any]:
        return of_ranks(self.ranks, super().attributes())

    def code(self) -> dict[str, Any]:
        return {site: at for part in self.parts for site, at in MegatronEngine.code(part).items()}


class _Taps(MegatronTaps):
    """Taps that are installed while one forward runs, which may need gradients."""

    @torch.no_grad()
    def observe(self, place: Place, value: torch.Tensor, rows: LiveRows) -> None:
        # The ranks that gather this value have the same sequences.
        if len(self._all.sample):
            super().observe(place, value.detach(), rows)
