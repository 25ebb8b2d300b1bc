"""Makes a model by slime's own provider and scores a pack by its own functions, on a CPU, with the
module of docs/fix-path.md, `rlk_slime`, on the path. Needs slime, and Megatron-LM beside
megatron-core, for `megatron.training`."""

import argparse

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training.arguments import add_megatron_arguments
from rlk_kernels.integrations import megatron
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.backends.megatron_utils.model_provider import get_model_provider_func

from rlk_align.engines.megatron.cpu import cpu_stand_ins

ARGUMENTS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 16 --ffn-hidden-size 96 --normalization RMSNorm --swiglu
    --qk-layernorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --bf16
    --max-position-embeddings 64 --rotary-base 10000 --untie-embeddings-and-output-weights
    --spec rlk_slime model --use-cpu-initialization --transformer-impl local --seq-length 64
    --micro-batch-size 1 --position-embedding-type rope --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-persist-layer-norm
"""


def score(model, args, sequences):
    lengths = [len(s) for s in sequences]
    total = sum(lengths)
    ids = torch.nn.functional.pad(torch.cat(sequences), (0, -total % 16))[None]
    cu = torch.tensor([0, *lengths, -total % 16]).cumsum(0).int()
    most = int(cu.diff().max())
    pack = PackedSeqParams(
        cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=most, max_seqlen_kv=most, qkv_format="thd"
    )
    logits = model(ids, position_ids=None, attention_mask=None, packed_seq_params=pack)
    _, found = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=sequences, total_lengths=lengths,
        response_lengths=[n - 1 for n in lengths],
    )  # fmt: skip
    return [row.flatten() for row in found["log_probs"]]


args = add_megatron_arguments(argparse.ArgumentParser()).parse_args(ARGUMENTS.split())
args.padded_vocab_size, args.params_dtype, args.fp8_param_gather = 64, torch.bfloat16, False
args.log_probs_chunk_size, args.allgather_cp, args.rollout_temperature = -1, False, 1.0
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
with cpu_stand_ins():
    torch.manual_seed(0)
    model = get_model_provider_func(args)().bfloat16()
    sequences = [torch.randint(0, 64, (n,)) for n in (7, 20, 12)]
    scored = score(model, args, sequences)
    for ids, found in zip(sequences, scored, strict=True):
        logits = model(ids[None], torch.arange(len(ids))[None], None)[0, :-1]
        assert megatron.token_logprobs(logits, ids[1:]).equal(found)
    sum(row.sum() for row in scored).backward()
assert all(p.grad is not None for p in model.parameters())
megatron.check(megatron.operators(model))
