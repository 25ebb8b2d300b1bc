"""A loop of training as a user writes it, for megatron-core, that knows rlk-align by three lines.

torchrun --nproc-per-node N megatron_loop.py FOLDER MODEL PROMPTS.json NAME TP PP EP [FAULT]

CHUNKS in the environment: the number of virtual stages of each rank.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from full_disk import fill_disk
from megatron_on_cpu import on_cpu
from torch.nn import functional
from weights_for_megatron import load

from rlk_align import record


def padded(batch: list[list[int]], length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens in batch])
    real = torch.tensor([[1] * len(tokens) + [0] * (length - len(tokens)) for tokens in batch])
    hidden = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    return ids, (real.cumsum(1) - 1) * real, hidden


def packed(batch: list[list[int]], shift: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row, whose mask has a block for each sequence. `shift`: by how much blocks are off."""
    lengths = torch.tensor([len(ids) for ids in batch])
    block = torch.repeat_interleave(torch.arange(len(batch)), lengths).roll(shift)
    hidden = ~(block[:, None] == block[None]).tril()
    ids = torch.tensor([token for ids in batch for token in ids])[None]
    return ids, torch.cat([torch.arange(n) for n in lengths])[None], hidden[None, None]


def forward_step(batches, model):  # type: ignore[no-untyped-def]
    ids, positions, hidden = next(batches)
    output = model(ids, positions, hidden, labels=ids.roll(-1, 1))
    return output, lambda losses: (losses.mean(), {})


folder, checkpoint, prompts = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
name, (tp, pp, ep) = sys.argv[4], map(int, sys.argv[5:8])
fault = (sys.argv[8:] or [""])[0]
chunks = int(os.environ.get("CHUNKS", "1"))
virtual = chunks if chunks > 1 else None
on_cpu()
dist.init_process_group("gloo")

from megatron.core import parallel_state, pipeline_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
)

parallel_state.initialize_model_parallel(tp, pp, virtual, expert_model_parallel_size=ep)
rank, stage = dist.get_rank(), parallel_state.get_pipeline_model_parallel_rank()
hf = json.loads((checkpoint / "config.json").read_text())
experts = hf.get("num_local_experts")
sparse = {
    "num_moe_experts": experts,
    "moe_router_topk": hf.get("num_experts_per_tok"),
    "moe_ffn_hidden_size": hf.get("moe_intermediate_size"),
    "moe_layer_freq": [int(i not in hf.get("mlp_only_layers", [])) for i in range(4)],
    "moe_router_load_balancing_type": "none",
    "expert_model_parallel_size": ep,
}
config = TransformerConfig(
    num_layers=hf["num_hidden_layers"],
    hidden_size=hf["hidden_size"],
    num_attention_heads=hf["num_attention_heads"],
    num_query_groups=hf["num_key_value_heads"],
    kv_channels=hf["head_dim"],
    ffn_hidden_size=hf["intermediate_size"],
    normalization="RMSNorm",
    layernorm_epsilon=hf["rms_norm_eps"],
    gated_linear_unit=True,
    activation_func=functional.silu,
    add_bias_linear=False,
    qk_layernorm=True,
    hidden_dropout=0.0,
    attention_dropout=0.1 if fault == "dropout" else 0.0,
    tensor_model_parallel_size=tp,
    pipeline_model_parallel_size=pp,
    virtual_pipeline_model_parallel_size=virtual,
    pipeline_dtype=torch.bfloat16,
    params_dtype=torch.bfloat16,
    bf16=True,
    use_cpu_initialization=True,
    variable_seq_lengths=True,  # micro-batches of several lengths
    # What two stages need that have two parts each, and so two messages at a time.
    overlap_p2p_comm=bool(virtual),
    batch_p2p_comm=not virtual,
    moe_token_dispatcher_type="alltoall",  # what that setting asks for, in a dense model too
    batch_p2p_sync=False,
    recompute_granularity="full",
    recompute_method="uniform",
    recompute_num_layers=1,
    **(sparse if experts else {}),
)
layer = {"qk_layernorm": True, "normalization": "RMSNorm"}
spec = get_gpt_layer_local_spec(**layer)
if experts:
    of_experts = get_gpt_layer_local_spec(num_experts=experts, **layer)
    specs = [of_experts if kind else spec for kind in config.moe_layer_freq]
    spec = TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


def chunk(number: int) -> GPTModel:
    """The part of the model that is this rank's virtual stage of this number."""
    place = number * pp + stage
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf["rope_parameters"]["rope_theta"] * (4 if fault == "theta" else 1),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        pre_process=place == 0,
        post_process=place == pp * chunks - 1,
        vp_stage=number if virtual else None,
    ).to(torch.bfloat16)
    load(model, checkpoint, tp, place * config.num_layers // (pp * chunks))
    return model


trainer = torch.nn.ModuleList(map(chunk, range(chunks)))
if fault == "stale" and rank == 1:
    # The rows of up_proj follow those of gate_proj.
    mlp = trainer[-1].decoder.layers[-1 if virtual else 1].mlp
    stale = mlp.experts.local_experts[0] if experts else mlp
    stale.linear_fc1.weight.data.chunk(2)[1].mul_(1.03125)
optimizer = torch.optim.SGD(trainer.parameters(), lr=0.0)  # the weights stay those of the rollout
recorder = record.trainer(
    list(trainer)[: 1 if fault == "half" else chunks],
    str(folder / name),
    every=3,
    checkpoint=str(checkpoint),
)
replica, replicas = (
    parallel_state.get_data_parallel_rank(),
    parallel_state.get_data_parallel_world_size(),
)
every = [p + r for p, r in json.loads((folder / "ids.json").read_text())]
for step in range(1, 4):
    # A micro-batch has two sequences of each replica, which all have one length. With virtual
    # stages it has one: there have to be as many as a multiple of the stages.
    size = (1 if virtual else 2) * replicas
    groups = [every[at : at + size] for at in range(0, len(every), size)]
    lengths = [max(map(len, group)) for group in groups]
    mine = [group[replica::replicas] for group in groups]
    batches = [
        packed(group, int(fault == "mask"))
        if fault in ("packed", "mask")
        else padded(group, length)
        for group, length in zip(mine, lengths, strict=True)
    ]
    if step == 3 and fault == "full-weights" and rank == 0:
        fill_disk(10_000)
    with recorder.step(step, json.loads(prompts.read_text())):
        if step == 3 and fault == "full" and rank == 1:
            fill_disk(10_000)
        pipeline_parallel.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in trainer] if virtual else iter(batches),
            model=list(trainer),
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
        )
        if step == 3 and fault == "killed" and rank == 1:
            while not (folder / name / "step-00000003/rank-0").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
