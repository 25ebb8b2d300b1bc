"""Records the requests of a live `vllm.LLM`, whose model is in this process or in its ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rlk_align.engines.vllm.worker import TapPlan
from rlk_align.errors import BadOption
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.record.rollout.settings import Settings
from rlk_align.record.rollout.vllm.engine import adapter_number, live_engine
from rlk_align.record.rollout.vllm.worker import RecordingTaps
from rlk_align.record.rollout.window import write_logprobs
from rlk_align.record.shared.choose import Key, Lowest, lowest_prompts, prefix_hash
from rlk_align.record.shared.layout import ADAPTER
from rlk_align.record.shared.shard import SCORED, SideFolder, sequence_name
from rlk_align.trace.writer import PassWriter

UNASKED = "the job did not ask vLLM for log-probs: SamplingParams(logprobs=0)"


class RolloutRecorder:
    """Records some requests of some runs of a live LLM."""

    def __init__(self, llm: Any, settings: Settings) -> None:
        """Raises BadOption for a model that is not recorded yet."""
        self._llm, self._settings = llm, settings
        self._engine = live_engine(llm, llm.llm_engine.vllm_config)
        self._folder = SideFolder(settings.folder, "rollout", settings.budget)
        self._runs = 0
        self._scoring = False

    def run(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Runs all waiting requests; returns their outputs."""
        if self._scoring:
            return run()
        number, self._runs = self._runs, self._runs + 1
        if number % self._settings.every or not self._waiting():
            return run()
        return self._recorded(number, run)

    def _waiting(self) -> dict[str, tuple[int, ...]]:
        """The prompts of the waiting requests, by their ids in vLLM's outputs. Raises BadOption for
        a request that is not recorded yet."""
        waiting = {}
        for name, state in self._llm.llm_engine.output_processor.request_states.items():
            if state.parent_req is not None:
                raise BadOption(
                    "RLK_RECORD: requests with n > 1 are not recorded",
                    "give each response a request of its own",
                )
            if state.prompt_token_ids is None:
                raise BadOption("RLK_RECORD: prompts of embeddings are not recorded")
            waiting[str(name).split("-")[0]] = tuple(state.prompt_token_ids)
        return waiting

    def _adapter(self) -> Any:
        """The adapter of the waiting requests; None for none. Raises BadOption for several."""
        states = self._llm.llm_engine.output_processor.request_states.values()
        by_number = {adapter_number(state): state.lora_request for state in states}
        if len(by_number) > 1:
            raise BadOption(
                "RLK_RECORD: requests with several adapters, or with and without one, in one call "
                "are not recorded",
                "give the requests of each adapter a call of their own",
            )
        [adapter] = by_number.values()
        return adapter

    def _recorded(self, number: int, run: Callable[[], list[Any]]) -> list[Any]:
        waiting = self._waiting()
        names, prompts = list(waiting), list(waiting.values())
        chosen = lowest_prompts(prompts, self._settings.sequences)
        samples = {names[at]: i for i, at in enumerate(chosen)}
        engine = self._engine
        with self._folder.shard(number) as shard:
            engine.use_adapter(self._adapter(), shard.about / ADAPTER)
            shard.describe(engine, [prompts[at] for at in chosen])
            with shard.writer("decode") as writer:
                outputs = self._tapped(writer, samples, [prompts[at] for at in chosen], run)
                batch = self._log_decode(writer, samples, outputs)
                unasked = {} if _all_logged(outputs, samples) else {"logprob": UNASKED}
                writer.finish(engine.unexposed("decode") | unasked)
            self._scoring = True
            try:
                for name in SCORED:
                    self._score(name, shard.writer(name), batch)
            finally:
                self._scoring = False
            lowest = Lowest(self._settings.sequences)
            keys: dict[Key, int] = {}
            for i, sample in enumerate(batch.samples):
                key: Key = prefix_hash(sample.prompt_ids), prefix_hash(sample.ids)
                keys.setdefault(key, i)
                lowest.offer(key)
            kept = sorted(keys[key] for key in lowest.keys)
            shard.finish(batch, kept, self._settings.sequences, len(waiting))
        return outputs

    def _score(self, name: str, writer: PassWriter, batch: TokenBatch) -> None:
        """Scores the recorded sequences again, which is a pass of its own."""
        engine = self._engine
        tapped = not name.endswith(".untapped") and not engine.compiled
        with writer:
            logprobs = engine.score(batch, writer if tapped else None, lambda done: None)
            for i, values in logprobs.items():
                write_logprobs(writer, i, batch.samples[i], values)
            writer.finish(engine.unexposed("prefill"))

    def _tapped(
        self,
        writer: PassWriter,
        samples: dict[str, int],
        prompts: list[tuple[int, ...]],
        run: Callable[[], list[Any]],
    ) -> list[Any]:
        """The outputs of a run whose chosen requests are tapped, unless the code is compiled."""
        if self._engine.compiled:
            return run()
        shape, rpc = self._engine.shape, self._llm.collective_rpc
        sampled = [range(len(ids) - 1, shape.context) for ids in prompts]
        plan = TapPlan(
            writer.part(1), shape, samples, sampled, "decode", TokenBatch(()), None, False,
            RecordingTaps,
        )  # fmt: skip
        rpc("rlk_tap", args=(plan,))
        try:
            return run()
        finally:
            rpc("rlk_untap")

    @staticmethod
    def _log_decode(writer: PassWriter, samples: dict[str, int], outputs: list[Any]) -> TokenBatch:
        """Records what vLLM says of the chosen requests; returns their sequences."""
        found: dict[int, Sample] = {}
        for output in outputs:
            number = samples.get(output.request_id.split("-")[0])
            if number is None:
                continue
            completion, prompt = output.outputs[0], tuple(output.prompt_token_ids)
            ids = tuple(completion.token_ids)
            found[number] = Sample(sequence_name(prompt + ids), prompt, ids)
            writer.took_from_cache(number, output.num_cached_tokens or 0)
            if completion.logprobs:
                chosen = [d[t].logprob for d, t in zip(completion.logprobs, ids, strict=True)]
                write_logprobs(writer, number, found[number], np.array(chosen, dtype=np.float32))
        return TokenBatch(tuple(found[i] for i in range(len(samples))))


def _all_logged(outputs: list[Any], samples: dict[str, int]) -> bool:
    """Whether vLLM returned log-probs of every chosen request."""
    return all(
        output.outputs[0].logprobs
        for output in outputs
        if output.request_id.split("-")[0] in samples
    )
