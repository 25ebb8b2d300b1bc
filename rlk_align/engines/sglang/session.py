"""SGLang's scheduler and model runner in this process: requests in, results out, no sockets."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlk_align.engines.process.ranks import Ranks
from rlk_align.errors import EngineFailed


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue."""

    rid: str
    ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Of top_k, top_p and min_p, those that are set."""
    seed: int | None = None
    ignore_eos: bool = False
    logprobs_from: int = -1
    """The position after which log-probs of the sequence itself are wanted; -1 for none."""
    salt: str = ""
    """Prefixes are shared only among requests with the same salt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What SGLang reports of one request."""

    ids: list[int]
    logprobs: list[float]
    """Of `ids`."""
    sequence_logprobs: list[float | None]
    """Of the sequence's own tokens from `logprobs_from` on, the first of which is None."""
    cached: int
    """The number of the sequence's first tokens that came from the radix cache."""


class Session:
    """The scheduler as its process would run it, without overlap. Each of several ranks has one,
    and they get the same requests."""

    def __init__(self, ranks: Ranks, graphs: bool, prefill_graphs: bool, **settings: Any) -> None:
        """`graphs`, `prefill_graphs`: whether steps of decode and prefills replay CUDA graphs;
        `settings`: those of SGLang's ServerArgs. `sglang` must be ready to be imported."""
        from sglang.srt.server_args import ServerArgs

        args = ServerArgs(
            skip_tokenizer_init=True,
            tp_size=ranks.world,
            disable_overlap_schedule=True,
            disable_cuda_graph=not graphs,
            disable_prefill_cuda_graph=not prefill_graphs,
            # SGLang's own sums over the ranks need memory that GPUs share, and sums that are fused
            # with the next norm pass no module.
            disable_custom_all_reduce=True,
            enforce_disable_flashinfer_allreduce_fusion=True,
            log_level="warning",
            **settings,
        )
        self._scheduler = _scheduler(args, ranks)
        self._outputs: list[Any] = []
        self._scheduler.output_streamer.send_to_detokenizer = self

    @property
    def runner(self) -> Any:
        """SGLang's model runner."""
        return self._scheduler.tp_worker.model_runner

    def send_output(self, output: Any, *_: Any) -> None:
        """Takes results in the place of the socket to SGLang's detokenizer."""
        self._outputs.append(output)

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers, in the order of the requests. Raises EngineFailed if SGLang refuses one."""
        scheduler = self._scheduler
        found: dict[str, Answer] = {}
        scheduler.process_input_requests([tokenized(r) for r in requests])
        with torch.no_grad():
            while len(found) < len(requests):
                plan = scheduler.get_next_batch_to_run(
                    running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
                )
                scheduler.running_batch = plan.running_batch
                batch = scheduler.last_batch = plan.batch_to_run
                if batch:
                    scheduler.process_batch_result(batch, scheduler.run_batch(batch))
                found |= self._finished()
                if not batch and len(found) < len(requests):
                    raise EngineFailed(
                        f"SGLang scheduled no batch with {len(requests) - len(found)} of "
                        f"{len(requests)} requests unanswered",
                        "raise mem_fraction or lower max_running_requests",
                    )
        return [found[r.rid] for r in requests]

    def _finished(self) -> dict[str, Answer]:
        answers = {}
        for output in self._outputs:
            for i, rid in enumerate(output.rids):
                reason = output.finished_reasons[i]
                if reason is None:
                    continue
                if reason.get("type") == "abort":
                    raise EngineFailed(f"SGLang refused a request: {reason.get('message')}")
                answers[rid] = Answer(
                    list(output.output_ids[i]),
                    list(output.output_token_logprobs_val[i]),
                    list(output.input_token_logprobs_val[i] or []),
                    output.cached_tokens[i],
                )
        self._outputs.clear()
        return answers


def _scheduler(args: Any, ranks: Ranks) -> Any:
    """SGLang communicates in the process group that the ranks have joined."""
    from sglang.srt.managers import scheduler
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs

    ports = PortArgs.init_new(args)
    if hasattr(scheduler, "SpawnRanks"):
        place = scheduler.SpawnRanks(ranks.rank, None, ranks.rank)
        publish(args, role="scheduler", ranks=place)
        return scheduler.Scheduler(args, ports)
    # SGLang 0.5.17 takes the places themselves. A rank's GPU has its number.
    publish(args, role="scheduler")
    others = ("moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank")
    places = dict.fromkeys(others, 0) | {"gpu_id": ranks.rank, "tp_rank": ranks.rank}
    return scheduler.Scheduler(args, ports, **places, dp_rank=None)


def tokenized(request: Request) -> Any:
    """The request as SGLang's scheduler takes it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        sampling_seed=request.seed,
        **request.limits,
        ignore_eos=request.ignore_eos,
    )
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=request.rid,
        input_text="",
        input_ids=array("q", request.ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=request.logprobs_from,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=request.salt,
    )
