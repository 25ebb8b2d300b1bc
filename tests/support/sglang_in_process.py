"""The real Scheduler and ModelRunner of SGLang 0.5.23 in this process, or in that of each rank, fed
and read without sockets."""

import sglang_stand_ins  # isort: skip

from array import array
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers import scheduler as managers
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs


class Sink:
    """In the place of the socket to the detokenizer."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def send_output(self, output: Any, *_: Any) -> None:
        self.outputs.append(output)


@dataclass
class Answer:
    """What the scheduler says of one request."""

    tokens: list[int]
    sampled: list[float]
    """The log-probs of `tokens`."""
    prompt: list[float | None]
    """The log-probs of the prompt's tokens, from `start` on; the first has none."""
    cached: int
    """How many of the prompt's tokens came from the cache."""
    top: list[Any]
    """Of each sampled token, the log-probs of the likeliest ones."""


class InProcess:
    def __init__(self, model: str, **settings: Any) -> None:
        usual = {
            **{"model_path": model, "device": "cpu", "skip_tokenizer_init": True},
            **{"disable_overlap_schedule": True, "disable_cuda_graph": True, "random_seed": 0},
            **{
                "tp_size": sglang_stand_ins.RANKS,
                "max_total_tokens": 8192,
                "max_running_requests": 16,
                "log_level": "error",
            },
        }
        args = ServerArgs(**usual | settings)
        ports = PortArgs.init_new(args)
        rank = sglang_stand_ins.RANK
        ranks = managers.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank)
        publish(args, role="scheduler", ranks=ranks)
        self.scheduler = managers.Scheduler(args, ports)
        self.sink = Sink()
        self.scheduler.output_streamer.send_to_detokenizer = self.sink

    @property
    def runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    def generate(
        self, prompts: list[list[int]], key: str, new_tokens: int, temperature: float = 1.0,
        start: int | list[int] = -1, top: int = 0, settings: list[dict[str, Any]] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """key: requests with the same one share their cached prefixes. settings: SamplingParams of
        each request, in the place of the temperature."""
        each = settings or [{"temperature": temperature}] * len(prompts)
        starts = start if isinstance(start, list) else [start] * len(prompts)
        torch.manual_seed(0)
        requests = []
        for i, (ids, first) in enumerate(zip(prompts, starts, strict=True)):
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **each[i])
            params.normalize(None)
            requests.append(
                TokenizedGenerateReqInput(
                    rid=f"{key}-{i}", input_text="", input_ids=array("q", ids), input_embeds=None,
                    mm_inputs=None, token_type_ids=None, sampling_params=params,
                    return_logprob=True, logprob_start_len=first, top_logprobs_num=top,
                    token_ids_logprob=None, stream=False, extra_key=key,
                )
            )  # fmt: skip
        done = self._run(requests)
        return [done[request.rid] for request in requests]

    def _run(self, requests: list[Any]) -> dict[str, Answer]:
        s, done = self.scheduler, {}
        s.process_input_requests(requests)
        with torch.no_grad():
            while len(done) < len(requests):
                plan = s.get_next_batch_to_run(
                    running_batch=s.running_batch, last_batch=s.last_batch
                )
                s.running_batch, batch = plan.running_batch, plan.batch_to_run
                if batch:
                    s.process_batch_result(batch, s.run_batch(batch))
                s.last_batch = batch
                for out in self.sink.outputs:
                    for i, rid in enumerate(out.rids):
                        if out.finished_reasons[i] is not None:
                            done[rid] = _answer(out, i)
                self.sink.outputs.clear()
        return done


def _answer(out: Any, i: int) -> Answer:
    return Answer(
        tokens=list(out.output_ids[i]),
        sampled=list(out.output_token_logprobs_val[i]),
        prompt=list(out.input_token_logprobs_val[i] or []),
        cached=out.cached_tokens[i],
        top=list(out.output_top_logprobs_val[i] or []) if out.output_top_logprobs_val else [],
    )
