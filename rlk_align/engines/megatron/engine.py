"""Megatron-core: GPTModel from its own layer specs, tensor parallel, teacher-forced."""

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlk_align.engines.base import Engine, Logprobs, SamplesDone, SiteValue
from rlk_align.engines.common.attributes import processing
from rlk_align.engines.common.code import code_places
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.parameters import (
    LiveParameter,
    ParameterRecord,
    record_parameter,
)
from rlk_align.engines.common.places import shards_of
from rlk_align.engines.common.user_patch import apply_patch
from rlk_align.engines.info import OptionValue
from rlk_align.engines.megatron.attributes import megatron_attributes, rotation, stage_facts
from rlk_align.engines.megatron.experts import corrections
from rlk_align.engines.megatron.grid import Grid
from rlk_align.engines.megatron.input import ModelInput, packed_input, padded_input
from rlk_align.engines.megatron.layout import padded_vocab
from rlk_align.engines.megatron.model import (
    Checkpoint,
    Settings,
    build,
    read_checkpoint,
)
from rlk_align.engines.megatron.places import megatron_places
from rlk_align.engines.megatron.stages import Stage
from rlk_align.engines.megatron.taps import MegatronTaps
from rlk_align.engines.megatron.weights import (
    live_parameters,
    load,
    merge_records,
    parameter_plan,
)
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.sites import model_sites
from rlk_align.results import CodePlace
from rlk_align.trace.writer import PassWriter

CHUNK = 1024
"""The number of rows whose log-probs, from a float32 copy, are computed at a time."""


class MegatronEngine(Engine):
    """`megatron:tp=N,sp=0|1,cp=N,pp=N,ep=N,spec=local|te,input=padded|packed,padding=right|left,batch=N`.

    The default, right-padded with the local spec, runs only megatron-core's own modules.
    """

    intervenes = True
    grid: Grid
    stage: Stage

    def open(self) -> None:
        self._undo = ExitStack()
        settings = self._settings()
        checkpoint = read_checkpoint(self.model_path, self.shape, self._live_option)
        self._start(settings)
        self.settings, self.grid = settings, Grid.of(self.ranks)
        self.stage = replace(self.stage, experts=self.held_experts())
        self.model = build(self.shape, checkpoint, settings, self.kernels)
        self.find(checkpoint)
        modules = self.shape.family.modules
        own = [p for p in self.plan if self.stage.holds(p.layout.ops[0])]
        load(self.live(), self.model_path, own, self.grid.tp.rank, modules, checkpoint.tied)
        apply_patch(self.spec, self.model)

    def held_experts(self) -> range:
        """The experts of each sparse layer that this rank has."""
        share = self.shape.experts // self.grid.ep.world
        return range(self.grid.ep.rank * share, (self.grid.ep.rank + 1) * share)

    def find(self, checkpoint: Checkpoint) -> None:
        """Finds the operators and the parameters of the built model."""
        settings = self.settings
        self.rope = checkpoint.rope
        self.rotation = rotation(self.model)
        # The last stage of several has a copy of the embedding as its head.
        te, tied = settings.spec == "te", checkpoint.tied and self.stage.count == 1
        self.places = list(
            megatron_places(self.shape, settings.tp, te, tied, self.kernels is not None)
        )
        self.own_places = self.stage.places(self.places)
        self.plan = parameter_plan(self.places, self.shape, settings.tp, checkpoint.biased)

    def live(self) -> dict[str, torch.Tensor]:
        """This stage's parameters and corrections of scores, by their names in the whole model."""
        every = dict(self.model.named_parameters()) | dict(corrections(self.model))
        return {self.stage.whole(name): p for name, p in every.items()}

    def _live_option(self, name: str) -> OptionValue | None:
        """The value of an option in this process, whose device and packages are known."""
        known = {"device": self.ranks.device.type, "python": None}
        return known[name] if name in known else self.spec.option(name)

    def _settings(self) -> Settings:
        option = self.spec.option
        assert self.spec.ranks == self.ranks.world
        stages = int(option("pp") or 1)
        size = self.ranks.world // stages
        self.stage = Stage(self.ranks.rank // size, stages, self.shape.layers)
        self.batch = int(option("batch") or 1)
        self.temperature = float(option("temperature") or 1.0)
        return Settings(
            tp=int(option("tp") or 1),
            cp=int(option("cp") or 1),
            ep=int(option("ep") or 1),
            stage=self.stage,
            device=self.ranks.device,
            dtype=getattr(torch, self.spec.dtype(self.shape.dtype)),
            spec=str(option("spec")),
            sequence_parallel=bool(option("sp")),
            packed=option("input") == "packed",
            padding=str(option("padding")),
            dispatcher=str(option("dispatcher")),
        )

    def _start(self, settings: Settings) -> None:
        """Sets up megatron-core's process-wide state, which `close` undoes."""
        from megatron.core import parallel_state, tensor_parallel

        from rlk_align.engines.megatron.cpu import (
            cpu_stand_ins,
            expert_stand_ins,
            latent_stand_ins,
        )

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tp,
            context_parallel_size=settings.cp,
            pipeline_model_parallel_size=settings.stage.count,
            expert_model_parallel_size=settings.ep,
        )
        self._undo.callback(parallel_state.destroy_model_parallel)
        if settings.device.type == "cpu":
            for stand_in in self._undo.enter_context(cpu_stand_ins()):
                print(f"megatron on the CPU: {stand_in}")
        else:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        if self.shape.experts:
            on_cpu = settings.device.type == "cpu"
            for stand_in in self._undo.enter_context(expert_stand_ins(on_cpu)):
                print(f"megatron's sparse layers: {stand_in}")

        if self.shape.latent:
            for stand_in in self._undo.enter_context(latent_stand_ins()):
                print(f"megatron's latent attention: {stand_in}")

    def version(self) -> str:
        import megatron.core

        spec = f"{self.settings.spec} spec"
        if self.settings.spec == "te":
            spec += f", TransformerEngine {importlib.metadata.version('transformer_engine')}"
        return f"{megatron.core.__version__} ({spec})"

    def dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def facts(self) -> list[dict[str, Any]]:
        """Those of all stages, in their order; called on every rank."""
        own = stage_facts(
            self.model, self.own_places, self.shape, self.settings.tp, self.rope, self.rotation
        )
        return self.grid.of_all_stages(own)

    def attributes(self) -> dict[str, Any]:
        padded = not self.settings.packed and self.batch > 1
        return {
            **megatron_attributes(self.facts()),
            **processing(self.temperature),
            "padding_side": self.settings.padding if padded else None,
        }

    def code(self) -> dict[str, CodePlace]:
        here = code_places(self.model, self.own_places)
        return {
            site: place.model_copy(update={"module": self.stage.whole(place.module)})
            for site, place in here.items()
        }

    def computes(self, site: str) -> bool:
        return self.stage.computes(site)

    def merge_sites(self, values: Mapping[str, SiteValue]) -> dict[str, SiteValue]:
        stages = self.grid.of_all_stages(dict(values))
        return {site: value for of_stage in stages for site, value in of_stage.items()}

    def shards(self) -> dict[str, list[tuple[int, int, int]]]:
        return {
            site: self.grid.shards(shards, self.stage.of(site))
            for site, shards in shards_of(self.places).items()
        }

    def stages(self) -> dict[str, list[int]]:
        if self.stage.count == 1:
            return {}
        sites = [site.name for site in model_sites(self.shape)]
        return {site: self.grid.stage(self.stage.of(site)) for site in sites}

    def experts(self) -> list[list[int]]:
        if self.settings.ep == 1:
            return []
        every: list[Any] = [None] * self.ranks.world
        dist.all_gather_object(every, self.stage.experts)
        return [
            [rank for rank, held in enumerate(every) if expert in held]
            for expert in range(self.shape.experts)
        ]

    def weights(self) -> Iterator[ParameterRecord]:
        records = [record_parameter(p) for p in self.whole_parameters()]
        yield from merge_records(records, self.grid)

    def whole_parameters(self) -> Iterator[LiveParameter]:
        """Every canonical parameter of this stage. All ranks call this, and the first of those that
        share the weights yields."""
        yield from live_parameters(self.live(), self.plan, self.grid.tp)

    def own_samples(self, batch: TokenBatch) -> Sequence[int]:
        if not self.stage.is_last:
            return ()
        return range(self.grid.dp.rank, len(batch.samples), self.grid.dp.world)

    def unexposed(self, kind: str) -> dict[str, str]:
        return {site: p.unexposed for p in self.places if p.unexposed for site in p.sites}

    @torch.no_grad()
    def score(
        self,
        batch: TokenBatch,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Logprobs:
        scored: Logprobs = {}
        samples = list(enumerate(batch.samples))
        sharded_rows = self.settings.sequence_parallel
        editor = Editor.of(intervention, batch)
        hooks = MegatronTaps(
            self.model, self.own_places, tap, editor, self.grid, self.stage, sharded_rows
        )
        with hooks as taps:
            step = self.batch * self.grid.dp.world
            for first in range(0, len(samples), step):
                some = samples[first : first + step]
                inputs = self._input(some)
                taps.at(inputs.rows, self.ranks.device)
                output = self._forward(inputs)
                done(first + len(some))
                if not self.stage.is_last:
                    continue
                logprobs = self._of_all_slices(
                    self.shared_logprobs(output, inputs.sampled, inputs.targets), inputs
                )
                own = some[self.grid.dp.rank :: self.grid.dp.world]
                ends = np.cumsum([len(s.response_ids) for _, s in own])
                scored |= zip([i for i, _ in own], np.split(logprobs, ends)[:-1], strict=True)
        return scored if self.grid.reports else {}

    def _forward(self, inputs: ModelInput) -> torch.Tensor:
        """The model's output: logits, or the residual stream of a stage before the last, which is
        sent to the next stage."""
        pipeline, step = self.grid.pp, len(self.grid.stage(0))
        if pipeline.rank:
            rows = inputs.ids.shape[1]
            if self.settings.sequence_parallel:
                rows //= self.settings.tp
            received = torch.empty(
                rows,
                len(inputs.ids),
                self.shape.hidden,
                dtype=self.settings.dtype,
                device=self.ranks.device,
            )
            dist.recv(received, self.ranks.rank - step)
            self.model.set_input_tensor(received)
        output = self.model(
            inputs.ids, inputs.positions, inputs.mask, packed_seq_params=inputs.packed
        )
        if not self.stage.is_last:
            dist.send(output.contiguous(), self.ranks.rank + step)
        return output

    def _input(self, samples: list[tuple[int, Any]]) -> ModelInput:
        # Context parallelism cuts a sequence into twice as many parts as there are ranks; sequence
        # parallelism cuts a rank's rows into as many parts as there are ranks.
        multiple = self.settings.tp if self.settings.sequence_parallel else 1
        if self.settings.cp > 1:
            multiple *= 2 * self.settings.cp
        if self.settings.packed:
            return packed_input(samples, multiple, self.grid.dp, self.grid.cp)
        return padded_input(samples, self.settings.padding, multiple, self.grid.dp, self.grid.cp)

    def _of_all_slices(self, logprobs: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """The log-probs of all sampled ids of the input, from those that this rank computed."""
        if self.settings.cp == 1:
            return logprobs
        # Each element has bits from one rank only; adding zeros does not change them.
        bits = torch.zeros(inputs.total, dtype=torch.int32)
        bits[torch.from_numpy(inputs.number)] = torch.from_numpy(logprobs).view(torch.int32)
        bits = bits.to(self.ranks.device)
        dist.all_reduce(bits, group=self.grid.cp.group)
        return bits.cpu().view(torch.float32).numpy()

    def shared_logprobs(
        self, logits: torch.Tensor, sampled: torch.Tensor, targets: torch.Tensor
    ) -> np.ndarray:
        """float32 log-probs `[N]` of `targets`, int64 `[N]`, at the rows `sampled`, int64 `[N]`, of
        a `[S, B]` output, from this rank's logits `[B, S, vocabulary / tp]`, by megatron-core's
        vocabulary-parallel cross entropy or the kernels."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        tp = self.grid.tp
        step = padded_vocab(self.shape.vocab, tp.world) // tp.world
        real = min(max(self.shape.vocab - tp.rank * step, 0), step)
        batch = len(logits)
        out = []
        for chunk, target in zip(sampled.split(CHUNK), targets.split(CHUNK), strict=True):
            local = logits[chunk % batch, chunk // batch].float()
            # The padding of the vocabulary must have no probability.
            local[:, real:] = -torch.inf
            logprob = None
            if self.kernels is not None:
                logprob = self.kernels.logprobs(local, target, self.temperature, tp.group)
            if logprob is None:
                if self.temperature != 1.0:
                    local /= self.temperature
                logprob = -vocab_parallel_cross_entropy(local, target)
            out.append(logprob)
        return torch.cat(out).cpu().numpy()

    def close(self) -> None:
        self._undo.close()
