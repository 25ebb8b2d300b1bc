"""HF transformers: any causal LM of a known family, one sequence at a time, no padding."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from rlk_align.engines.base import (
    Engine,
    PassResult,
    Progress,
    Sampling,
    Tap,
    activation_name,
    norm_eps,
    per_layer,
    rope_theta,
)
from rlk_align.engines.hf_taps import LAYER_MODULES, Tapped
from rlk_align.engines.patching import apply_patch
from rlk_align.errors import BadOption, ModelError
from rlk_align.prompts import TokenBatch


class HFEngine(Engine):
    """`hf:attn=eager|sdpa|...`: teacher-forced prefill, and incremental decode with a KV cache."""

    def open(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention = str(self.spec.options.get("attn", "sdpa"))
        if attention != "eager" and attention not in ALL_ATTENTION_FUNCTIONS:
            raise BadOption(
                f"engine 'hf': attn={attention} is unknown",
                f"known: eager, {', '.join(sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()))}",
            )
        dtype = str(self.spec.options.get("dtype", "auto"))
        self.device = torch.device(
            str(self.spec.options.get("device", "cuda" if torch.cuda.is_available() else "cpu"))
        )
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                self.model_path,
                dtype=self.shape.dtype if dtype == "auto" else dtype,
                attn_implementation=attention,
                local_files_only=True,
            )
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"transformers could not load {self.model_path}: {error}") from error
        self.model.to(self.device).eval()
        apply_patch(self.spec, self.model)

    def version(self) -> str:
        import transformers

        return transformers.__version__

    def dtype(self) -> str:
        return str(self.model.lm_head.weight.dtype).removeprefix("torch.")

    def attributes(self) -> dict[str, Any]:
        return hf_attributes(self.model)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from hf_weights(self.model)

    @torch.inference_mode()
    def score(self, batch: TokenBatch, tap: Tap | None, progress: Progress) -> PassResult:
        logprobs = []
        with Tapped(self.model, self.shape, tap) as taps:
            for i, s in enumerate(batch.samples):
                taps.at(i, 0, len(s.ids), s.sampled_positions)
                ids = torch.tensor([s.ids], device=self.device)
                logits = self.model(input_ids=ids, use_cache=False).logits[0]
                wanted = s.sampled_positions
                target = torch.tensor(s.response_ids, device=self.device)
                logprobs.append(_logprob(logits[wanted.start : wanted.stop], target))
                progress(i + 1)
        return PassResult([list(s.response_ids) for s in batch.samples], logprobs)

    @torch.inference_mode()
    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: Tap | None,
        progress: Progress,
    ) -> PassResult:
        responses, logprobs = [], []
        with Tapped(self.model, self.shape, tap) as taps:
            for i, s in enumerate(batch.samples):
                ids, lp = self._decode(i, s.prompt_ids, sampling, taps)
                responses.append(ids)
                logprobs.append(np.concatenate(lp))
                progress(i + 1)
        return PassResult(responses, logprobs)

    def _decode(
        self, sample: int, prompt: tuple[int, ...], sampling: Sampling, taps: Tapped
    ) -> tuple[list[int], list[np.ndarray]]:
        """One response. Its noise depends on (seed, sample) alone, not on its neighbours."""
        generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + sample)
        stop = _eos_ids(self.model)
        cache, new, response, logprobs = None, list(prompt), [], []
        position = 0
        for _ in range(sampling.max_new_tokens):
            last = position + len(new) - 1
            taps.at(sample, position, len(new), range(last, last + 1))
            out = self.model(
                input_ids=torch.tensor([new], device=self.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits = out.past_key_values, out.logits[0]
            probs = torch.softmax(logits[0].float(), dim=-1).cpu()
            token = int(torch.multinomial(probs, 1, generator=generator))
            logprobs.append(_logprob(logits, torch.tensor([token], device=self.device)))
            response.append(token)
            position, new = last + 1, [token]
            if token in stop:
                break
        return response, logprobs


def _logprob(logits: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """log softmax(logits)[target] in float32: `[N, V]`, `[N]` -> `[N]`."""
    logprob = torch.log_softmax(logits.float(), dim=-1)
    return logprob.gather(-1, target[:, None]).squeeze(-1).cpu().numpy()


def _eos_ids(model: Any) -> set[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


def hf_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical parameters of a live HF model; biases as `layers.i.op.bias`."""

    def module_weights(name: str, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        # A patch may have put something without a plain weight there: it is then missed by name.
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            yield name, module.weight.detach()
        if getattr(module, "bias", None) is not None:
            yield f"{name}.bias", module.bias.detach()

    yield from module_weights("embed", model.model.embed_tokens)
    for i, layer in enumerate(model.model.layers):
        for op, path in LAYER_MODULES.items():
            module = _submodule(layer, path)
            if module is not None:
                yield from module_weights(f"layers.{i}.{op}", module)
    yield from module_weights("final_norm", model.model.norm)
    yield from module_weights("lm_head", model.lm_head)


def hf_attributes(model: Any) -> dict[str, Any]:
    """What decides a live HF model's numbers beside its weights."""
    layers, config = list(model.model.layers), model.config
    attention = [layer.self_attn for layer in layers]
    rotary = model.model.rotary_emb
    rope = config.rope_parameters
    unscaled = rope["rope_type"] == "default"
    dtype = model.lm_head.weight.dtype
    return {
        "layers": len(layers),
        "hidden_size": model.model.embed_tokens.weight.shape[1],
        "vocab_size": model.model.embed_tokens.weight.shape[0],
        **per_layer("heads", [_heads(a.q_proj, a.head_dim) for a in attention]),
        **per_layer("kv_heads", [_heads(a.k_proj, a.head_dim) for a in attention]),
        **per_layer("head_dim", [a.head_dim for a in attention]),
        **per_layer("attention_scale", [float(f"{a.scaling:.6g}") for a in attention]),
        **per_layer("sliding_window", [getattr(a, "sliding_window", None) for a in attention]),
        "rope_type": rope["rope_type"],
        "rope_theta": rope_theta(rotary.inv_freq) if unscaled else float(rope["rope_theta"]),
        "rope_dim": 2 * rotary.inv_freq.numel(),
        **per_layer("norm_eps", [norm_eps(layer) for layer in layers]),
        "final_norm_eps": model.model.norm.variance_epsilon,
        **per_layer("activation", [_activation(layer.mlp, dtype) for layer in layers]),
        "tie_word_embeddings": (
            model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        ),
        "temperature": 1.0,
        "logprobs": "raw",
    }


def _heads(projection: Any, head_dim: int) -> int | None:
    width = getattr(projection, "out_features", None)
    return None if width is None else width // head_dim


def _activation(mlp: Any, dtype: torch.dtype) -> str:
    device = next(mlp.parameters()).device
    return activation_name(lambda x: mlp.act_fn(x.to(device)).cpu(), dtype)


def _submodule(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer
