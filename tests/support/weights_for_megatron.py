"""Loads a checkpoint of Qwen3, dense or sparse, into a GPTModel of megatron-core, or into a rank's
part of it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


@torch.no_grad()
def load(model: Any, folder: Path, tp: int, first: int) -> None:
    """first: the number of this stage's first layer."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    of_experts = parallel_state.get_expert_model_parallel_rank()
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())

    def part(name: str, dim: int = 0) -> torch.Tensor:
        return tensors[f"{name}.weight"].chunk(tp, dim)[rank]

    for number, layer in enumerate(model.decoder.layers, first):
        here = f"model.layers.{number}"
        attention, mlp = layer.self_attention, layer.mlp
        # The queries of each key-value group, then its key and its value.
        qkv = [tensors[f"{here}.self_attn.{x}_proj.weight"] for x in "qkv"]
        groups = [x.unflatten(0, (config["num_key_value_heads"], -1)) for x in qkv]
        attention.linear_qkv.weight.copy_(torch.cat(groups, 1).flatten(0, 1).chunk(tp)[rank])
        attention.linear_proj.weight.copy_(part(f"{here}.self_attn.o_proj", 1))
        mlps = {f"{here}.mlp": mlp}
        if hasattr(mlp, "router"):
            mlp.router.weight.copy_(tensors[f"{here}.mlp.gate.weight"])
            own = mlp.experts.local_experts
            mlps = {f"{here}.mlp.experts.{len(own) * of_experts + e}": x for e, x in enumerate(own)}
        for path, each in mlps.items():
            gate, up = (part(f"{path}.{x}_proj") for x in ("gate", "up"))
            each.linear_fc1.weight.copy_(torch.cat([gate, up]))
            each.linear_fc2.weight.copy_(part(f"{path}.down_proj", 1))
        for module, name in (
            (attention.q_layernorm, "self_attn.q_norm"),
            (attention.k_layernorm, "self_attn.k_norm"),
            (layer.input_layernorm, "input_layernorm"),
            (layer.pre_mlp_layernorm, "post_attention_layernorm"),
        ):
            module.weight.copy_(tensors[f"{here}.{name}.weight"])
    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(part("model.embed_tokens"))
    if model.post_process:
        model.decoder.final_layernorm.weight.copy_(tensors["model.norm.weight"])
        if model.output_layer.weight is not None:
            tied = config["tie_word_embeddings"]
            model.output_layer.weight.copy_(part("model.embed_tokens" if tied else "lm_head"))
