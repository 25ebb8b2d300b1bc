"""Settings of GRPOTrainer with which the policy that is sampled is not the one that is trained."""

from collections.abc import Mapping
from typing import Any

from rlk_kernels.integrations.frameworks import of_family
from rlk_kernels.integrations.hf.adapter import is_adapter
from rlk_kernels.integrations.hf.model import is_sparse

HARMLESS = frozenset(
    ("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens",
     "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "logprobs")
)  # fmt: skip
"""Keys of `generation_kwargs` that leave each token's distribution as it is."""

LOADING = frozenset(
    ("dtype", "revision", "cache_dir", "token", "local_files_only", "subfolder", "use_cache",
     "low_cpu_mem_usage", "attn_implementation", "trust_remote_code", "use_safetensors")
)  # fmt: skip
"""Keys of `model_init_kwargs` that leave the model what transformers makes of the checkpoint."""


def refused(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the arguments of a GRPOTrainer, each with what to do instead.

    `given` holds the arguments of `GRPOTrainer.__init__` by name; `args` is a GRPOConfig.
    """
    args = given["args"]
    wrong = {
        "use_vllm=False: transformers samples; set use_vllm=True": not args.use_vllm,
        f"vllm_mode={args.vllm_mode!r}: the kernels cannot be checked in a server; set "
        "vllm_mode='colocate'": args.use_vllm and args.vllm_mode != "colocate",
        f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}: not run yet; set it to 1": (
            args.vllm_tensor_parallel_size != 1
        ),
        f"vllm_model_impl={args.vllm_model_impl!r}: vLLM's own model has the kernels; set "
        "vllm_model_impl='vllm'": args.vllm_model_impl not in ("vllm", "auto"),
        "vllm_structured_outputs_regex: it masks tokens in vLLM alone; leave it out": (
            args.vllm_structured_outputs_regex is not None
        ),
        "rollout_func: another engine samples; leave it out": given.get("rollout_func") is not None,
        "peft_config: adapters are not supported; train all weights": (
            given.get("peft_config") is not None
        ),
        "quantization_config: quantised weights are not supported; leave it out": (
            given.get("quantization_config") is not None
        ),
        "use_liger_kernel=True: it replaces the trainer's layers; set it to False": (
            args.use_liger_kernel
        ),
        "cast_lm_head_to_fp32=True: vLLM's output layer computes in the model's dtype; set it to "
        "False": args.cast_lm_head_to_fp32,
        "torch_compile=True: not run yet; set it to False": args.torch_compile,
    }
    found = [words for words, is_so in wrong.items() if is_so]
    return found + _sampling(args) + _loading(args) + _processes(args)


def _sampling(args: Any) -> list[str]:
    """The trainer scores the whole distribution, at `temperature`."""
    kwargs = args.generation_kwargs or {}
    whole = {
        "top_p": (args.top_p, (1.0,)),
        "top_k": (args.top_k, (0, -1, None)),
        "min_p": (args.min_p, (0.0, None)),
        "repetition_penalty": (args.repetition_penalty, (1.0,)),
    }
    wrong = [
        f"{name}={value}: vLLM samples from a part of the distribution or a changed one, and TRL "
        f"scores the whole; set it to {accepted[0]}"
        for name, (value, accepted) in whole.items()
        if value not in accepted
    ]
    wrong += [
        f"generation_kwargs {name}={kwargs[name]!r}: it may change the distribution in vLLM alone; "
        "leave it out"
        for name in sorted(kwargs.keys() - HARMLESS)
        if not (name == "temperature" and kwargs[name] == args.temperature)
    ]
    if not args.temperature > 0:
        wrong.append(f"temperature={args.temperature}: log-probs need one above 0")
    return wrong


def _loading(args: Any) -> list[str]:
    kwargs = args.model_init_kwargs or {}
    return [
        f"model_init_kwargs {name}={kwargs[name]!r}: it may change what the trainer computes; "
        "leave it out"
        for name in sorted(kwargs.keys() - LOADING)
    ]


def _processes(args: Any) -> list[str]:
    kind = args.distributed_state.distributed_type.value
    wrong = []
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        wrong.append(f"{kind.lower()} processes: not run yet with TRL; use one process, or DDP")
    if args.deepspeed is not None or args.fsdp:
        wrong.append("fsdp or deepspeed: not run yet with TRL; leave both out, DDP was run")
    return wrong


def of_model(model: Any, args: Any) -> list[str]:
    """What is wrong with a loaded model, before vLLM starts."""
    computed = computing_dtype(model, args)
    stored = str(model.dtype)
    wrong = of_family(model)
    if stored not in ("torch.float32", f"torch.{computed}"):
        wrong.append(
            f"weights in {stored.removeprefix('torch.')} under autocast to {computed}: load the "
            f"model in float32 or {computed}"
        )
    if any(map(is_sparse, getattr(getattr(model, "model", None), "layers", ()))):
        wrong.append("sparse layers: not run yet with TRL; train a dense model")
    if any(map(is_adapter, model.modules())):
        wrong.append("adapters, which TRL merges for vLLM: not supported; train all weights")
    return wrong


def computing_dtype(model: Any, args: Any) -> str:
    """The dtype of the trainer's products: autocast's, or the weights' own."""
    if args.bf16:
        return "bfloat16"
    return "float16" if args.fp16 else str(model.dtype).removeprefix("torch.")
