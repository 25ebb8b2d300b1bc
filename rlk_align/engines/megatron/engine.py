"""Megatron-core: GPTModel from its own layer specs, tensor parallel, teacher-forced."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlk_align.engines.base import Engine, Logprobs, SamplesDone, Tap
from rlk_align.engines.common.attributes import processing
from rlk_align.engines.common.code import code_places
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.parameters import ParameterRecord, record_parameter
from rlk_align.engines.common.places import shards_of
from rlk_align.engines.common.user_patch import apply_patch
from rlk_align.engines.info import OptionValue
from rlk_align.engines.megatron.attributes import megatron_attributes, rotation
from rlk_align.engines.megatron.grid import Grid
from rlk_align.engines.megatron.input import ModelInput, packed_input, padded_input
from rlk_align.engines.megatron.layout import padded_vocab
from rlk_align.engines.megatron.model import (
    Settings,
    build,
    read_checkpoint,
)
from rlk_align.engines.megatron.places import megatron_places
from rlk_align.engines.megatron.taps import Tapped
from rlk_align.engines.megatron.weights import (
    live_parameters,
    load,
    parameter_plan,
    together,
)
from rlk_align.model.prompts import TokenBatch
from rlk_align.results import CodePlace

CHUNK = 1024
"""Rows whose log-probs are computed at a time: bounds the float32 copy of the logits."""


class MegatronEngine(Engine):
    """`megatron:tp=N,sp=0|1,cp=N,spec=local|te,input=padded|packed,padding=right|left,batch=N`.

    The default, right-padded with the local spec, runs megatron-core's own modules only.
    """

    intervenes = True

    def open(self) -> None:
        self._undo = ExitStack()
        settings = self._settings()
        checkpoint = read_checkpoint(self.model_path, self.shape, self._here)
        self._start(settings)
        self.settings, self.grid = settings, Grid.of(self.ranks)
        self.model = build(self.shape, checkpoint, settings, self.kernels)
        self.rope = checkpoint.rope
        self.rotation = rotation(self.model)
        te, tied = settings.spec == "te", checkpoint.tied
        self.places = list(
            megatron_places(self.shape, settings.tp, te, tied, self.kernels is not None)
        )
        self.plan = parameter_plan(self.places, self.shape, settings.tp, checkpoint.biased)
        modules = self.shape.family.modules
        load(self.model, self.model_path, self.plan, self.grid.tp.rank, modules)
        apply_patch(self.spec, self.model)

    def _here(self, name: str) -> OptionValue | None:
        """An option, as it turned out in this process."""
        known = {"device": self.ranks.device.type, "python": None}
        return known[name] if name in known else self.spec.option(name)

    def _settings(self) -> Settings:
        option = self.spec.option
        assert self.spec.ranks == self.ranks.world
        self.batch = int(option("batch") or 1)
        self.temperature = float(option("temperature") or 1.0)
        return Settings(
            tp=int(option("tp") or 1),
            cp=int(option("cp") or 1),
            device=self.ranks.device,
            dtype=getattr(torch, self.spec.dtype(self.shape.dtype)),
            spec=str(option("spec")),
            sequence_parallel=bool(option("sp")),
            packed=option("input") == "packed",
            padding=str(option("padding")),
            dispatcher=str(option("dispatcher")),
        )

    def _start(self, settings: Settings) -> None:
        """megatron-core's process-wide state, undone by `close`."""
        from megatron.core import parallel_state, tensor_parallel

        from rlk_align.engines.megatron.cpu import cpu_stand_ins, expert_stand_ins

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tp, context_parallel_size=settings.cp
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

    def version(self) -> str:
        import megatron.core

        spec = f"{self.settings.spec} spec"
        if self.settings.spec == "te":
            spec += f", TransformerEngine {importlib.metadata.version('transformer_engine')}"
        return f"{megatron.core.__version__} ({spec})"

    def dtype(self) -> str:
        return str(self.model.decoder.final_layernorm.weight.dtype).removeprefix("torch.")

    def attributes(self) -> dict[str, Any]:
        padded = not self.settings.packed and self.batch > 1
        return {
            **megatron_attributes(
                self.model, self.places, self.shape, self.settings.tp, self.rope, self.rotation
            ),
            **processing(self.temperature),
            "padding_side": self.settings.padding if padded else None,
        }

    def code(self) -> dict[str, CodePlace]:
        return code_places(self.model, self.places)

    def shards(self) -> dict[str, list[tuple[int, int, int]]]:
        return self.grid.holders(shards_of(self.places))

    def weights(self) -> Iterator[ParameterRecord]:
        held = [record_parameter(p) for p in live_parameters(self.model, self.plan, self.grid.tp)]
        yield from together(held, self.grid)

    def unexposed(self, kind: str) -> dict[str, str]:
        return {site: p.unexposed for p in self.places if p.unexposed for site in p.sites}

    @torch.no_grad()
    def score(
        self,
        batch: TokenBatch,
        tap: Tap | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Logprobs:
        scored: Logprobs = {}
        samples = list(enumerate(batch.samples))
        sharded_rows = self.settings.sequence_parallel
        editor = Editor.of(intervention, batch)
        with Tapped(self.model, self.places, tap, editor, self.grid, sharded_rows) as taps:
            for first in range(0, len(samples), self.batch):
                some = samples[first : first + self.batch]
                inputs = self._input(some)
                taps.at(inputs)
                logits = self.model(
                    inputs.ids, inputs.positions, inputs.mask, packed_seq_params=inputs.packed
                )
                logprobs = self._of_all_slices(self._logprobs(logits, inputs), inputs)
                ends = np.cumsum([len(s.response_ids) for _, s in some])[:-1]
                scored |= zip([i for i, _ in some], np.split(logprobs, ends), strict=True)
                done(first + len(some))
        return scored if self.grid.reports else {}

    def _input(self, samples: list[tuple[int, Any]]) -> ModelInput:
        # Context parallelism cuts sequences in twice as many parts as there are ranks, and sequence
        # parallelism what a rank has of them in as many.
        multiple = self.settings.tp if self.settings.sequence_parallel else 1
        if self.settings.cp > 1:
            multiple *= 2 * self.settings.cp
        if self.settings.packed:
            return packed_input(samples, multiple, self.grid.cp)
        return padded_input(samples, self.settings.padding, multiple, self.grid.cp)

    def _of_all_slices(self, logprobs: np.ndarray, inputs: ModelInput) -> np.ndarray:
        """Of every sampled id of the whole input, from those that this rank computed."""
        if self.settings.cp == 1:
            return logprobs
        # Bits, each of one rank: added to zeros they stay what they are.
        bits = torch.zeros(inputs.total, dtype=torch.int32)
        bits[torch.from_numpy(inputs.number)] = torch.from_numpy(logprobs).view(torch.int32)
        bits = bits.to(self.ranks.device)
        dist.all_reduce(bits, group=self.grid.cp.group)
        return bits.cpu().view(torch.float32).numpy()

    def _logprobs(self, logits: torch.Tensor, inputs: ModelInput) -> np.ndarray:
        """float32 log-probs of the sampled ids among this rank's rows, from its `[B, S,
        vocabulary / tp]`, by megatron-core's own cross entropy over vocabulary shards, or the
        kernels' log-prob."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        tp = self.grid.tp
        step = padded_vocab(self.shape.vocab, tp.world) // tp.world
        real = min(max(self.shape.vocab - tp.rank * step, 0), step)
        rows, batch = inputs.sampled, len(inputs.ids)
        out = []
        for chunk, target in zip(rows.split(CHUNK), inputs.targets.split(CHUNK), strict=True):
            local = logits[chunk % batch, chunk // batch].float()
            # Padding of the vocabulary is no token: it takes no probability.
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
