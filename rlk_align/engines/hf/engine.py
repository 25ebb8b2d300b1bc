"""HF transformers: any causal LM of a known family."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rlk_align.engines.base import Logprobs, Tap
from rlk_align.engines.common.attributes import (
    activation_name,
    active_dropout,
    corrected_routing,
    norm_attributes,
    norm_epsilons,
    per_layer,
    processing,
    rope_theta,
    rounded_frequencies,
)
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.parameters import LiveParameter, ParameterRecord, record_parameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows, padded_grid
from rlk_align.engines.common.site_hooks import ForwardHooks
from rlk_align.engines.common.user_patch import apply_patch
from rlk_align.engines.forward_engine import ForwardEngine
from rlk_align.engines.hf.experts import corrections, expert_weights, sparse_blocks
from rlk_align.engines.hf.places import hf_places
from rlk_align.engines.hf.taps import Tapped
from rlk_align.errors import ModelError
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.rotary import checkpoint_rotary
from rlk_align.text import one_line


class HFEngine(ForwardEngine):
    """`hf:attn=eager|sdpa|...,batch=N,padding=right|left,temperature=T`.

    Scores teacher-forced, N sequences a forward (1, and so no padding, by default), and decodes
    incrementally with a KV cache.
    """

    _unexposed: dict[str, str]

    def open(self) -> None:
        here = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(self.spec.device or here)
        self.model = self.load(self.compute_dtype).to(self.device)

    @property
    def compute_dtype(self) -> str:
        """The spec's dtype, or the checkpoint's own."""
        return self.spec.dtype(self.shape.dtype)

    def load(self, dtype: str) -> Any:
        """The model on the CPU, patched, in evaluation mode; raises errors that the user can
        correct."""
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.model_path,
                dtype=dtype,
                attn_implementation=str(self.spec.option("attn")),
                **self._experts(),
                local_files_only=True,
            )
        except Exception as error:
            # Configs are checked by transformers' own rules, which raise whatever they do.
            raise ModelError(
                f"transformers could not load {self.model_path}: {one_line(error)}"
            ) from error
        if self.kernels is not None:
            self.kernels.in_model(model, model.config.rope_parameters)
        apply_patch(self.spec, model.eval())
        return model

    def _experts(self) -> dict[str, Any]:
        """How the experts of a sparse model are computed."""
        if not self.shape.experts:
            return {}
        return {"experts_implementation": str(self.spec.option("experts"))}

    def weights(self) -> Iterator[ParameterRecord]:
        yield from super().weights()
        for name, value in (*expert_weights(self.model), *corrections(self.model)):
            yield record_parameter(LiveParameter(name, value))

    def version(self) -> str:
        import transformers

        return transformers.__version__

    def dtype(self) -> str:
        return str(self.model.lm_head.weight.dtype).removeprefix("torch.")

    def attributes(self) -> dict[str, Any]:
        return {
            **hf_attributes(self.model),
            **self._rounded_frequencies(),
            **processing(self.temperature),
            # None where a forward has one sequence, and so no padding.
            "padding_side": self.spec.option("padding") if self.batch_size > 1 else None,
        }

    def _rounded_frequencies(self) -> dict[str, Any]:
        """Whoever casts a whole model, its buffers included, rounds these as well."""
        rotary = checkpoint_rotary(self.model_path, self.shape)
        if rotary is None:
            return {}
        live, theta = self.model.model.rotary_emb.inv_freq, self.model.config.rope_parameters
        return rounded_frequencies(live, rotary.inv_freq, float(theta["rope_theta"]))

    def tapped(self, tap: Tap | None, editor: Editor | None) -> Tapped:
        hooks = Tapped(self.model, self.places(), tap, editor)
        self._unexposed = hooks.unexposed
        return hooks

    def unexposed(self, kind: str) -> dict[str, str]:
        """What the latest pass did not show."""
        return dict(self._unexposed)

    def forward(self, batch: TokenBatch, members: Sequence[int], taps: ForwardHooks) -> Logprobs:
        side = str(self.spec.option("padding"))
        grid = padded_grid([(i, batch.samples[i]) for i in members], side)
        taps.at(grid.rows("batch first"), self.device)
        inputs = {"input_ids": torch.from_numpy(grid.ids)}
        if not grid.real.all():
            inputs["attention_mask"] = torch.from_numpy(grid.real.astype(np.int64))
            inputs["position_ids"] = torch.from_numpy(grid.positions)
        inputs = {name: value.to(self.device) for name, value in inputs.items()}
        logits = self.run_model(**inputs, use_cache=False).logits
        logprobs = {}
        for i, (k, first) in zip(members, grid.starts, strict=True):
            s = batch.samples[i]
            at = slice(s.sampled_positions.start + first, s.sampled_positions.stop + first)
            target = torch.tensor(s.response_ids, device=self.device)
            logprobs[i] = self.logprobs(logits[k, at], target)
        return logprobs

    def run_model(self, **inputs: Any) -> Any:
        """What scores calls: the model, or what is around it."""
        return self.model(**inputs)

    def places(self) -> Iterator[Place]:
        return hf_places(self.model)

    @property
    def batch_size(self) -> int:
        return int(self.spec.option("batch") or 1)

    def step(
        self, taps: ForwardHooks, rows: ForwardRows, ids: Sequence[int], cache: Any
    ) -> tuple[torch.Tensor, Any]:
        taps.at(rows, self.device)
        out = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[0], out.past_key_values

    def stop_ids(self) -> set[int]:
        return _eos_ids(self.model)


def _eos_ids(model: Any) -> set[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


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
        **per_layer("sliding_window", [_window(a) for a in attention]),
        "rope_type": rope["rope_type"],
        "rope_theta": rope_theta(rotary.inv_freq) if unscaled else float(rope["rope_theta"]),
        "rope_dim": 2 * rotary.inv_freq.numel(),
        **norm_attributes(norm_epsilons(model, hf_places(model))),
        **per_layer("activation", [_activation(layer.mlp, dtype) for layer in layers]),
        **_routing([block for _, block in sparse_blocks(model)]),
        "tie_word_embeddings": (model.lm_head.weight is model.model.embed_tokens.weight),
        **active_dropout(model),
    }


def _window(attention: Any) -> int | None:
    """Some families keep it in the attention, others ask the config at every call."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None)


def _heads(projection: Any, head_dim: int) -> int | None:
    width = getattr(projection, "out_features", None)
    return None if width is None else width // head_dim


def _routing(blocks: list[Any]) -> dict[str, Any]:
    """How the sparse layers route; nothing for a dense model."""
    # Mixtral's router has no such switch: it always divides by the sum.
    norm = [bool(getattr(b.gate, "norm_topk_prob", True)) for b in blocks]
    corrected = [b.gate for b in blocks if hasattr(b.gate, "e_score_correction_bias")]
    return {
        **corrected_routing(
            groups=[g.num_group for g in corrected],
            top_groups=[g.topk_group for g in corrected],
            scale=[g.routed_scaling_factor for g in corrected],
        ),
        **per_layer("experts_per_token", [b.gate.top_k for b in blocks]),
        **per_layer("norm_topk_prob", norm),
    }


def _activation(mlp: Any, dtype: torch.dtype) -> str:
    mlp = getattr(mlp, "experts", mlp)
    device = next(mlp.parameters()).device
    return activation_name(lambda x: mlp.act_fn(x.to(device)).cpu(), dtype)
