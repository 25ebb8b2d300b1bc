"""The unmodified vLLM, in this process: 0.26 on GPUs and 0.32 on the CPU.

Code that needs the live model is in `worker.py`, a mixin of vLLM's worker that the setting
`worker_extension_cls` names.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from rlk_align.engines.base import Engine, Logprobs, Sampled, SamplesDone, Sampling
from rlk_align.engines.common.attributes import processing
from rlk_align.engines.common.experts import BY_EXPERT
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.parameters import ParameterRecord
from rlk_align.engines.vllm.delta_net import FUSED_IN_DECODE, HIDDEN_IN_DECODE
from rlk_align.engines.vllm.experts import FUSED, PARTIAL
from rlk_align.engines.vllm.lora import lora_requests, lora_settings
from rlk_align.engines.vllm.mamba import STEPS
from rlk_align.engines.vllm.registered import decoder_alone, register_without_torchvision
from rlk_align.engines.vllm.taps import VLLMTaps
from rlk_align.engines.vllm.worker import TapPlan
from rlk_align.errors import BadOption, EngineFailed, ModelError
from rlk_align.model.adapter import AdapterFile, adapter_paths, fitting_adapter
from rlk_align.model.checkpoint import read_config
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.truncation import truncation
from rlk_align.results import CodePlace
from rlk_align.text import printable
from rlk_align.trace.schema import CacheRecord, LoraRecord, QuantisedProduct
from rlk_align.trace.writer import PassWriter

_ENVIRONMENT = {
    # In one process, so that taps write rows in the process that computes them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM binds each of several ranks to its own NUMA node, and a small machine has too few.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_MIN_MEMORY_SHARE = 0.01
MAX_CPU_CACHE = 1e9
"""The largest cache of keys and values on a CPU, in bytes; a small model needs less."""
_CPU_SEQUENCES = 64
"""The number of sequences, each as long as the context, that the cache of a CPU has room for."""


class VLLMEngine(Engine):
    """`vllm:tp=N,temperature=T,top_k=K,top_p=P,min_p=M,logprobs=raw|processed,kv_cache_gb=G`:
    samples, and prefills the sampled sequences again. `sampler=rlk` samples with the kernels.

    vLLM packs, chunks and batches the requests. A prefill has to sample one token, which takes one
    position of the context. Log-probs are those of the raw distribution unless
    `logprobs=processed`. `kv_cache_gb` limits the cache of keys and values, in units of 1e9 bytes,
    for a GPU that other processes use as well.
    """

    intervenes = True
    taps: type[VLLMTaps] = VLLMTaps
    """The hooks of a pass that is observed."""

    def attach(self, llm: Any) -> None:
        """Describes and runs a live LLM of another program, instead of one that it opens itself.
        Its workers need the methods of `worker.WorkerExtension`."""
        self.llm, self._passes = llm, 0

    def lora_requests(self) -> list[Any]:
        """What names the adapter of each sample in turn in a request, None for none; empty without
        adapters."""
        return lora_requests(self._adapters)

    def open(self) -> None:
        option = self.spec.option
        self._passes = 0
        lora, config = self.spec.option("lora"), read_config(self.model_path)
        self._adapters: list[AdapterFile | None] = [
            None if path is None else fitting_adapter(path, config, self.shape)
            for path in (adapter_paths(lora) if lora is not None else ())
        ]
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not self.production and torch.version.cuda is None:
            # Even in eager mode vLLM compiles a helper of its sampler, which counts ranks: that
            # takes 3 s, and 15 s the first time.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # RLK_KERNELS configures the kernels' vLLM plugin for other programs; here the spec does.
        os.environ.pop("RLK_KERNELS", None)
        # RLK_RECORD records other programs, and not what rlk-align runs itself.
        os.environ.pop("RLK_RECORD", None)
        if self.kernels is not None:
            self.kernels.before_loading()
        if option("batch_invariant"):
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        worker = "worker"
        if self.shape.delta_layers and self.shape.family.hybrid:
            register_without_torchvision()
            worker = "hybrid_worker"
        from vllm import LLM
        from vllm.platforms import current_platform

        here = current_platform.device_type
        if self.spec.device not in (None, here):
            raise BadOption(
                f"engine 'vllm': device={self.spec.device}, but this vLLM computes on {here}",
                "leave `device` out; CUDA_VISIBLE_DEVICES chooses among GPUs",
            )
        passed = (
            *("max_num_batched_tokens", "max_num_seqs", "block_size"),
            *("quantization", "kv_cache_dtype"),
        )
        try:
            self.llm = LLM(
                model=str(self.model_path),
                dtype=self.spec.dtype(self.shape.dtype),
                enforce_eager=not self.production,
                max_model_len=self.shape.context,
                enable_prefix_caching=bool(option("enable_prefix_caching")),
                worker_extension_cls=f"{__package__}.{worker}.WorkerExtension",
                disable_log_stats=True,
                tensor_parallel_size=self._ranks,
                logprobs_mode=f"{option('logprobs')}_logprobs",
                # Mistral publishes its weights in a second form, which vLLM would prefer.
                config_format="hf",
                load_format="safetensors",
                **decoder_alone(self.model_path),
                **lora_settings(self._adapters),
                **{k: option(k) for k in passed if option(k) is not None},
                **self._cache(here),
                **self._attention(here),
            )
        except (ValueError, OSError, SafetensorError) as error:
            raise ModelError(f"vLLM could not load {self.model_path}: {error}") from error
        except Exception as error:
            # An error in a rank's process is in the log, and not in vLLM's exception.
            if reason := self._refused_by_a_rank():
                raise ModelError(
                    f"{self.spec}: {reason}", "leave kernels=rlk out, or add except=OPERATOR"
                ) from error
            raise
        if self.heartbeats is not None and self._ranks > 1:
            self._rpc("rlk_start_heartbeat", self.heartbeats, self.spec.info.waits)
        if self.kernels is not None:
            self.kernels.in_model(self, {})
        for request in filter(None, self.lora_requests()):
            # Before the first request, so that the manifest has it.
            self.llm.llm_engine.add_lora(request)
        self._rpc("rlk_patch", self.spec)

    def _refused_by_a_rank(self) -> str:
        """Why the kernels refused the model in a process of vLLM's; empty if they did not."""
        log = None if self.heartbeats is None else self.heartbeats.with_name("worker.log")
        if self.kernels is None or self._ranks == 1 or log is None or not log.is_file():
            return ""
        reasons = re.findall(r"\bNotSupported: (.+)", log.read_text("utf-8", "replace"))
        return printable(reasons[0]) if reasons else ""

    def version(self) -> str:
        import vllm

        return vllm.__version__

    def dtype(self) -> str:
        return str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")

    def attributes(self) -> dict[str, Any]:
        raw = self.llm.llm_engine.model_config.logprobs_mode == "raw_logprobs"
        return self._rpc("rlk_attributes", self.shape) | (
            processing(1.0) if raw else processing(self._temperature, truncation(self.spec.options))
        )

    def adapters(self) -> list[LoraRecord | None]:
        return [
            request and self._rpc("rlk_adapter", request, request.lora_path, self.shape)
            for request in self.lora_requests()
        ]

    def products(self) -> dict[str, QuantisedProduct]:
        return self._rpc("rlk_products", self.shape) if self._ranks == 1 else {}

    def cache(self) -> CacheRecord | None:
        return self._rpc("rlk_cache")

    def code(self) -> dict[str, CodePlace]:
        return self._rpc("rlk_code", self.shape)

    def unexposed(self, kind: str) -> dict[str, str]:
        reasons = dict.fromkeys(BY_EXPERT, FUSED)
        if self._ranks > 1 and self.shape.shared_intermediate:
            reasons["shared_down_proj"] = PARTIAL
        fused = {
            f"layers.{i}.{op}": reason
            for i in (self.shape.sparse_layers if self.kernels is None else ())
            for op, reason in reasons.items()
        }
        if kind == "decode" and self.kernels is None:
            fused |= {
                f"layers.{i}.{op}": FUSED_IN_DECODE
                for i in self.shape.delta_layers
                for op in (STEPS if self.shape.family.state_space else HIDDEN_IN_DECODE)
            }
        if kind == "decode" or self.attributes()["logprobs"] == "raw":
            return fused
        raw = "vLLM's log-probs of a prompt are raw, even if those of sampled tokens are processed"
        return fused | {"logprob": raw}

    def _cache(self, device: str) -> dict[str, Any]:
        """The settings that limit the cache of keys and values, which otherwise takes all free
        memory of a GPU. On a CPU its zeros are written when the engine starts."""
        limit, shape = self.spec.option("kv_cache_gb"), self.shape
        if limit is not None:
            size = float(limit) * 1e9
        elif device == "cpu":
            heads = (shape.at(i) for i in range(shape.layers))
            # In fp32; a latent attention keeps one latent and one rotated key.
            token = 2 * 4 * sum(each.kv_heads * each.head_dim for each in heads)
            if shape.latent:
                token = 4 * shape.layers * shape.size("latent_and_key")
            size = min(MAX_CPU_CACHE, _CPU_SEQUENCES * shape.context * token)
            if shape.delta_layers:
                # Every sequence has a state in each layer.
                size = MAX_CPU_CACHE
        else:
            return {}
        # vLLM needs this share of the memory to be free when it starts; the cache ignores it.
        return {"kv_cache_memory_bytes": int(size), "gpu_memory_utilization": _MIN_MEMORY_SHARE}

    def _attention(self, device: str) -> dict[str, Any]:
        """The setting for the kernels' attention backend; on CPUs they replace the only one."""
        if self.kernels is None or "attn" in self.kernels.excluded or device == "cpu":
            return {}
        if self.shape.latent:
            return {}  # the kernels replace the layer, whatever backend vLLM has chosen
        return {"attention_backend": "CUSTOM"}

    @property
    def _ranks(self) -> int:
        return int(self.spec.option("tp") or 1)

    @property
    def _temperature(self) -> float:
        return float(self.spec.option("temperature") or 1.0)

    def shards(self) -> dict[str, list[tuple[int, int, int]]]:
        return self._rpc("rlk_shards", self.shape)

    def weights(self) -> Iterator[ParameterRecord]:
        yield from self._rpc("rlk_weights", self.shape)

    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Sampled:
        from vllm import SamplingParams
        from vllm.platforms import current_platform

        # vLLM's CPU sampler draws from torch's global generator and fails with a seed for each
        # request under chunked prefill; its GPU sampler and ours key on the request's own seed.
        keyed = self.spec.option("sampler") == "rlk" or not current_platform.is_cpu()
        self._rpc("rlk_seed", sampling.seed)
        lengths = [
            len(s.response_ids) if sampling.forced else sampling.max_new_tokens
            for s in batch.samples
        ]
        params = [
            SamplingParams(
                temperature=self._temperature,
                **truncation(self.spec.options),
                max_tokens=length,
                logprobs=0,
                detokenize=False,
                seed=sampling.request_seed(i) if keyed else None,
            )
            for i, length in enumerate(lengths)
        ]
        prompts = [s.prompt_ids for s in batch.samples]
        forced = sampling.forced
        outputs = self._generate(prompts, params, "decode", tap, batch, intervention, forced)
        done(len(outputs))
        responses: list[list[int]] = []
        logprobs: Logprobs = {}
        for i, output in enumerate(outputs):
            completion = output.outputs[0]
            ids = list(completion.token_ids)
            responses.append(ids)
            chosen = [d[t].logprob for d, t in zip(completion.logprobs, ids, strict=True)]
            logprobs[i] = np.array(chosen, dtype=np.float32)
        if forced and responses != [list(s.response_ids) for s in batch.samples]:
            raise EngineFailed("vLLM did not sample the forced tokens")
        return Sampled(responses, logprobs)

    def score(
        self,
        batch: TokenBatch,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Logprobs:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        everything = [params.clone() for _ in batch.samples]
        sequences = [s.ids for s in batch.samples]
        outputs = self._generate(sequences, everything, "prefill", tap, batch, intervention)
        done(len(outputs))
        logprobs: Logprobs = {}
        if "logprob" in self.unexposed("prefill"):
            return logprobs
        for i, (s, output) in enumerate(zip(batch.samples, outputs, strict=True)):
            by_position = output.prompt_logprobs
            chosen = [by_position[p + 1][s.ids[p + 1]].logprob for p in s.sampled_positions]
            logprobs[i] = np.array(chosen, dtype=np.float32)
        return logprobs

    def _generate(
        self,
        sequences: list[tuple[int, ...]],
        params: list[Any],
        kind: str,
        tap: PassWriter | None,
        batch: TokenBatch,
        intervention: Intervention | None,
        forced: bool = False,
    ) -> list[Any]:
        """Outputs in the order of `sequences`."""
        # The salt keeps a pass from reusing prefixes that an earlier pass cached: vLLM would not
        # compute them again, and no tap would see them.
        self._passes += 1
        salt = f"rlk-align {self._passes}"
        prompts = [{"prompt_token_ids": list(ids), "cache_salt": salt} for ids in sequences]
        adapters = self.lora_requests()
        mixed = [adapters[i % len(adapters)] for i in range(len(prompts))] if adapters else None
        requests = self.llm.enqueue(prompts, params, lora_request=mixed, use_tqdm=False)
        counts = self.production and torch.cuda.is_available()
        if counts:
            self._rpc("rlk_count_graphs")
        if tap is not None:
            sampled = (
                [range(len(ids) - 1, self.shape.context) for ids in sequences]
                if kind == "decode"
                else [s.sampled_positions for s in batch.samples]
            )
            # The outputs call a request `17`, and the runner calls it `17-8cdd...`.
            samples = {str(r).split("-")[0]: i for i, r in enumerate(requests)}
            plan = TapPlan(
                tap.part(1), self.shape, samples, sampled, kind, batch, intervention, forced,
                self.taps,
            )  # fmt: skip
            self._rpc("rlk_tap", plan)
        try:
            with self._small_batches() if kind == "prefill" and counts else nullcontext():
                outputs = self.llm.wait_for_completion(use_tqdm=False)
        finally:
            if tap is not None:
                self._rpc("rlk_untap")
            if counts:
                ranks = self.llm.collective_rpc("rlk_counted_graphs")
                self.graphs = min(ranks, key=lambda graphs: graphs.total)
        if len(outputs) != len(sequences):
            raise EngineFailed(f"vLLM answered {len(outputs)} of {len(sequences)} requests")
        order = {str(r).split("-")[0]: i for i, r in enumerate(requests)}
        outputs.sort(key=lambda o: order[o.request_id.split("-")[0]])
        if tap is not None:
            for i, output in enumerate(outputs):
                tap.took_from_cache(i, output.num_cached_tokens or 0)
        return outputs

    @contextmanager
    def _small_batches(self) -> Iterator[None]:
        """While entered, no step has more tokens than the largest CUDA graph: longer prompts are
        computed in chunks, each of which replays a graph. This has no effect if vLLM does not chunk
        prompts, or if its scheduler is in another process."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        if core is None or not core.vllm_config.scheduler_config.enable_chunked_prefill:
            yield
            return
        largest = core.vllm_config.compilation_config.max_cudagraph_capture_size
        scheduler = core.scheduler
        usual = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = min(usual, largest or usual)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = usual

    def on_models(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(model, *args)` for each rank's live model, in the process of that rank, which
        finds the function by the name of its module."""
        return self.llm.collective_rpc("rlk_on_model", args=(function, *args))

    def _rpc(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]
