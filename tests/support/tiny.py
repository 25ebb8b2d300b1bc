"""Tiny real checkpoints, and what an engine records of them: each operator computed in float64, by
numpy and from the definition, from the recorded inputs, and rounded once to bfloat16.

N = rows of one sample, F = features.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from synthetic import Values

from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.operators import OPERATORS, layer_modules
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
from rlk_align.model.tensors import expected_tensors

Array = np.ndarray
Fault = Callable[[Array, Mapping[str, Array]], Array]
"""(an operator's exact outputs of one sample, all of the sample so far) -> what it has instead."""

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "attention_bias": True, "partial_rotary_factor": 0.5},
    "qwen2": {
        **{"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4},
        **{"max_window_layers": 1, "hidden_act": "gelu_pytorch_tanh"},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 3},
}
"""What is beside the sizes."""
WINDOWS = {"qwen2": {1: 4}, "mistral": {0: 3, 1: 3}}
"""By family and layer."""
SIZES = {
    **{"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 61},
    **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1000.0},
    **{"dtype": "bfloat16", "hidden_act": "silu"},
}
RNG = np.random.default_rng(7)
BATCH = TokenBatch(
    tuple(
        Sample(f"p{i}", tuple(ids[:cut]), tuple(ids[cut:]))
        for i, (n, cut) in enumerate([(40, 10), (33, 1), (25, 24), (38, 3), (30, 8)])
        for ids in [RNG.integers(0, SIZES["vocab_size"], n).tolist()]
    )
)


def checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """config.json and random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SIZES | CONFIGS[family] | changes
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in expected_tensors(config, read_shape(folder)).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        value = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * value
        elif len(shape) == 2 and "embed" not in name:
            value = value / math.sqrt(shape[1])
        tensors[name] = value.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return folder


def live_weights(model: Path) -> dict[str, torch.Tensor]:
    """Canonical parameters, as an engine that loaded the checkpoint holds them."""
    shape = read_shape(model)
    stored = load_file(model / "model.safetensors")
    names = ["embed", "final_norm", "lm_head"]
    weighted = layer_modules(name for name, o in OPERATORS.items() if o.weight)
    for i in range(shape.layers):
        names += [f"layers.{i}.{op}{kind}" for op in weighted for kind in ("", ".bias")]
    found = {n: stored[tensor_name(n)] for n in names if tensor_name(n) in stored}
    return {"lm_head": found["embed"]} | found


def rounded(x: Array, dtype: torch.dtype = torch.bfloat16) -> Array:
    return torch.from_numpy(x).to(dtype).double().numpy()


class Engine:
    """Computes a model's sites, with faults in it."""

    def __init__(self, model: Path, tp: int = 1, norm_twice: bool = False) -> None:
        """`norm_twice`: it rounds before it multiplies by a norm's weight too."""
        self.config = json.loads((model / "config.json").read_text())
        self.sites = model_sites(read_shape(model))
        stored = load_file(model / "model.safetensors")
        self.weights = {k.removeprefix("model."): v.double().numpy() for k, v in stored.items()}
        self.tp, self.norm_twice = tp, norm_twice

    def values(
        self, faults: Mapping[str, Fault] | None = None, batch: TokenBatch = BATCH
    ) -> Values:
        """bfloat16 of every site but the log-probs."""
        samples = [self._sample(s, faults or {}) for s in batch.samples]
        return {
            site.name: torch.from_numpy(np.concatenate([s[site.name] for s in samples])).to(
                torch.float32 if site.op == "logprob" else torch.bfloat16
            )
            for site in self.sites
        }

    def _sample(self, sample: Sample, faults: Mapping[str, Fault]) -> dict[str, Array]:
        ids = np.array(sample.ids)
        seen: dict[str, Array] = {"ids": ids}
        for site in self.sites:
            given = [seen[n] for n in (*site.inputs, *site.prefix_inputs)]
            exact = self._exact(site.name, site.op, site.layer, ids, given)
            if site.name in faults:
                exact = faults[site.name](exact, seen)
            last = torch.float32 if site.op == "logprob" else torch.bfloat16
            seen[site.name] = rounded(exact, last)
        return seen

    def _exact(
        self, name: str, op: str, layer: int | None, ids: Array, given: list[Array]
    ) -> Array:
        c, w = self.config, self.weights
        where = {
            **{"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
            "act": "mlp.",
        }
        part = "mlp." if op in ("gate_proj", "up_proj", "down_proj") else "self_attn."
        module = f"layers.{layer}.{where.get(op, part + op)}"
        if op == "embed":
            return w["embed_tokens.weight"][ids]
        if op.endswith("norm"):
            weight = w["norm.weight" if layer is None else f"{module}.weight"]
            groups = given[0].reshape(len(ids), -1, len(weight))
            square = (groups * groups).sum(-1, keepdims=True) / len(weight)
            normed = groups / np.sqrt(square + c["rms_norm_eps"])
            normed = rounded(normed) if self.norm_twice else normed
            return (normed * weight).reshape(given[0].shape)
        if op in ("q_rope", "k_rope"):
            return self._turned(given[0])
        if op == "attn":
            return self._attended(layer or 0, *given)
        if op.endswith("residual"):
            return given[0] + given[1]
        if op == "act":
            gate = given[0]
            if c["hidden_act"] == "silu":
                return gate / (1 + np.exp(-gate)) * given[1]
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            return gate / 2 * (1 + np.tanh(inner)) * given[1]
        if op == "logprob":
            target = np.roll(ids, -1)
            top = given[0].max(axis=1)
            total = np.log(np.exp(given[0] - top[:, None]).sum(axis=1)) + top
            return (given[0][np.arange(len(ids)), target] - total)[:, None]
        if op == "logits":
            tied = c.get("tie_word_embeddings")
            return given[0] @ w["embed_tokens.weight" if tied else "lm_head.weight"].T
        bias = w.get(f"{module}.bias", 0.0)
        weight = w[f"{module}.weight"]
        if self.tp > 1 and op in ("o_proj", "down_proj"):
            pairs = zip(
                np.split(given[0], self.tp, axis=1), np.split(weight, self.tp, axis=1), strict=True
            )
            return sum(rounded(x @ p.T) for x, p in pairs) + bias
        return given[0] @ weight.T + bias

    def _turned(self, x: Array, ahead: int = 0) -> Array:
        width = self.config["head_dim"]
        turns = int(width * self.config.get("partial_rotary_factor", 1.0)) // 2
        heads = x.reshape(len(x), -1, width)
        speed = self.config["rope_theta"] ** (-np.arange(turns) / turns)
        angle = (np.arange(len(x)) + ahead)[:, None, None] * speed
        pairs = (heads[..., :turns] + 1j * heads[..., turns : 2 * turns]) * np.exp(1j * angle)
        rest = heads[..., 2 * turns :]
        return np.concatenate([pairs.real, pairs.imag, rest], axis=-1).reshape(x.shape)

    def _attended(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        width = self.config["head_dim"]
        window = WINDOWS.get(self.config["model_type"], {}).get(layer, len(q))
        heads, groups = (x.reshape(len(x), -1, width) for x in (q, k))
        values = v.reshape(groups.shape)
        out = np.zeros_like(heads)
        for h in range(heads.shape[1]):
            g = h * groups.shape[1] // heads.shape[1]
            for p in range(len(q)):
                seen = slice(max(0, p - window + 1), p + 1)
                scores = groups[seen, g] @ heads[p, h] / np.sqrt(width)
                weight = np.exp(scores - scores.max())
                out[p, h] = weight @ values[seen, g] / weight.sum()
        return out.reshape(q.shape)
