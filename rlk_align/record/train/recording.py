"""The forwards of one step of a trainer, of which some sequences are recorded."""

from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.errors import BadOption
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.record.shared.choose import Key, Lowest, Prompts, prefix_hash
from rlk_align.record.shared.shard import Shard, sequence_name
from rlk_align.record.train.live import ForwardInput, Live
from rlk_align.record.train.segments import Chosen, Segment
from rlk_align.trace.writer import PassWriter


class Recording:
    """Records the forwards of a live model while it is attached."""

    def __init__(
        self, live: Live, prompts: Prompts, sequences: int, writers: dict[str, PassWriter]
    ) -> None:
        self._live, self._prompts, self._writers = live, prompts, writers
        self._count, self._lowest = sequences, Lowest(sequences)
        self._samples: list[Sample] = []
        self._numbers: dict[Key, int] = {}
        self._seen: set[Key] = set()
        self._here: list[Chosen] = []
        self._input: ForwardInput | None = None
        """The input of the forward that runs, if a rank records a sequence of it."""
        self._taps: Hooks | None = None
        self._unexposed: dict[str, str] = {}
        self._repeating = False
        self._uncounted = 0
        """The number of forwards that were not those of the policy."""

    def attach(self) -> Hooks:
        """Hooks on the model, which the caller closes."""
        hooks = self._live.see_forwards()
        model = self._live.model
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        hooks.callback(before.remove)
        after = model.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        hooks.callback(after.remove)
        return hooks

    def _before(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._repeating:
            return
        self._here, self._input = [], None
        if not self._live.counts():
            self._uncounted += 1
            return
        found = self._live.input(args, kwargs)
        known = [(key, s, n) for s in found.segments for key, n in self._key(s)]
        every = self._live.keys_of_all([key for key, _, _ in known])
        new = self._lowest_of(every)
        own = {key for place, key in new if place == self._live.place}
        for key, segment, length in known:
            # A sequence may be in the forward twice.
            if key in own:
                own.remove(key)
                self._here.append(self._chosen(key, segment, length))
        self._input = found if new else None
        self._taps = self._tapped("prefill")

    def _key(self, segment: Segment) -> list[tuple[Key, int]]:
        """The key of a sequence and the length of its prompt; empty if it continues no prompt."""
        prompt = self._prompts.of(segment.ids)
        if prompt is None:
            return []
        return [((prompt[0], prefix_hash(segment.ids)), prompt[1])]

    def _lowest_of(self, every: list[list[Key]]) -> set[tuple[int, Key]]:
        """(place of a rank, key) of each new sequence of a forward that is among the lowest; of
        several ranks with a sequence, the first records it."""
        offered = []
        for place, keys in enumerate(every):
            for key in keys:
                if key not in self._seen:
                    self._seen.add(key)
                    if self._lowest.offer(key):
                        offered.append((place, key))
        return {(place, key) for place, key in offered if key in self._lowest.keys}

    def _chosen(self, key: Key, segment: Segment, length: int) -> Chosen:
        number = self._numbers[key] = len(self._samples)
        ids = segment.ids
        self._samples.append(Sample(sequence_name(ids), ids[:length], ids[length:]))
        return Chosen(number, length, segment)

    def _tapped(self, name: str) -> Hooks | None:
        """Installs taps on the rows of the next forward, if this rank has to tap it."""
        if self._input is None or not (self._here or self._live.taps_together):
            return None
        return self._live.taps(self._writers[name], self._here, self._input)

    def _after(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._repeating or self._input is None:
            return
        taps, self._taps = self._taps, None
        if taps is not None:
            taps.close()
            self._unexposed |= self._live.unexposed(taps)
        if output is None:  # the forward raised an error
            return
        self._log("prefill", output)
        self._repeating = True
        try:
            # What is random draws the same numbers afterwards as without the controls.
            with self._live.undisturbed():
                untapped = model(*args, **kwargs)
                self._log("prefill.untapped", untapped)
                self._log_passed_on("prefill.untapped", untapped)
                taps = self._tapped("prefill.repeat")
                try:
                    self._log("prefill.repeat", model(*args, **kwargs))
                finally:
                    if taps is not None:
                        taps.close()
        finally:
            self._repeating = False

    @torch.no_grad()
    def _log(self, name: str, output: Any) -> None:
        """Records the log-probs of the sampled tokens."""
        assert self._input is not None
        for chosen in self._here:
            found = self._live.logprobs(output, chosen, self._input)
            if found is None:
                continue
            position, logprobs = found
            rows = torch.from_numpy(np.asarray(logprobs, dtype=np.float32)).reshape(-1, 1)
            self._writers[name]("logprob", rows, np.full(len(position), chosen.number), position)

    @torch.no_grad()
    def _log_passed_on(self, name: str, output: Any) -> None:
        """Records what this stage sends on: without taps it has to have the same bits."""
        assert self._input is not None
        found = self._live.passed_on(output, self._here, self._input) if self._here else None
        if found is not None:
            site, rows, which = found
            self._writers[name](site, rows, which.sample, which.position)

    def finish(self, shard: Shard) -> None:
        """Completes the shard, without a message to other ranks: one of them may have died. Raises
        BadOption if no sequence was recorded."""
        if not self._lowest.keys and self._live.alone:
            others = f" ({self._uncounted} had another adapter)" if self._uncounted else ""
            raise BadOption(
                "no forward of the step had a sequence that begins with one of its prompts"
                + others,
                "give the token ids of the prompts as the model reads them, without padding; enter "
                "the step with the adapter that its forwards compute with",
            )
        for writer in self._writers.values():
            writer.finish(self._unexposed)
        chosen = sorted(self._numbers[key] for key in self._lowest.keys if key in self._numbers)
        shard.finish(TokenBatch(tuple(self._samples)), chosen, self._count, len(self._seen))
