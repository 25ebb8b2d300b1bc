"""Gradients of the embedded model with the kernels, in every layout: which have the bits of one
rank, and under which condition.

RLK_GRADIENTS=FILE.jsonl collects what was found, for the reports.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command import require_engine
from gloo_ranks import on_ranks
from rlk_kernels.parallel.gradients import (
    MicroBatches,
    OrderedReduceScatter,
    gradient_norm,
    sum_in_pairs,
)
from torch import Tensor

from rlk_align.data import data_path

MODEL = data_path("model")
SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
EMBEDDING = "model.embed_tokens.weight"
whole_matrix = pytest.mark.whole_matrix
SAMPLES, LENGTH = 4, 16
IDS = torch.randint(2, 1000, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))

Gradients = dict[str, Tensor]
"""Tensor of the checkpoint -> its gradient, whole, fp32."""


def of_hf(dtype: str) -> list[Gradients]:
    """The gradients of each sample."""
    from rlk_kernels.integrations import hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype))
    hf.use_kernels(model.train())
    found = []
    for ids in IDS:
        _hf_loss(model, ids[None]).backward()
        found.append({name: p.grad.float() for name, p in model.named_parameters()})
        model.zero_grad(set_to_none=True)
    return found


def _hf_loss(model: Any, ids: Tensor) -> Tensor:
    from rlk_kernels.integrations import hf

    logits = model(ids, use_cache=False).logits[:, :-1]
    return -hf.token_logprobs(logits.flatten(0, 1), ids[:, 1:].flatten()).sum()


def of_fsdp(group: Any, dtype: str, ordered: bool) -> tuple[Gradients, Tensor]:
    """Gradients and their norm in FSDP2, with fp32 weights that compute in `dtype`. Ranks get
    samples in order."""
    from rlk_kernels.integrations import hf
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    hf.use_kernels(model.train())
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (group.size(),))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if ordered:
            module.set_custom_reduce_scatter(OrderedReduceScatter())
    batches = MicroBatches(model.parameters())
    for first in range(0, SAMPLES, group.size()):
        _hf_loss(model, IDS[first + group.rank()][None]).backward()
        batches.add()
    batches.finish()
    # FSDP2 has divided by the number of ranks, a power of two.
    norm = gradient_norm(model.parameters()) * group.size()
    return {n: p.grad.full_tensor() * group.size() for n, p in model.named_parameters()}, norm


def of_megatron(
    group: Any, options: str, samples: int = SAMPLES, micro: int = 1, model: Path = MODEL
) -> Gradients:
    """Gradients of this rank's parameters, after megatron-core's schedule has run and finished
    them. Data-parallel ranks get samples in order, each in `micro` micro-batches."""
    from megatron.core import pipeline_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from rlk_kernels.integrations import megatron as kernels

    from rlk_align.engines.common.weights import canonical
    from rlk_align.engines.megatron.engine import MegatronEngine
    from rlk_align.engines.patch import patch_of
    from rlk_align.engines.process.ranks import Ranks, all_gather
    from rlk_align.engines.spec import EngineSpec
    from rlk_align.model.checkpoint import tensor_name
    from rlk_align.model.shape import read_shape

    spec = EngineSpec.parse(f"megatron:{options}kernels=rlk")
    engine = MegatronEngine(spec, model, read_shape(model))
    engine.ranks = Ranks(group.rank() % spec.ranks, spec.ranks, torch.device("cpu"))
    engine.kernels = patch_of(spec)
    engine.open()
    data, packed = engine.grid.dp, engine.settings.packed
    asked = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=data.world > 1,
        reduce_scatter_with_fp32_accumulation=data.world > 1,
    )
    own = IDS[:samples].chunk(data.world)[data.rank].chunk(micro)
    _counted_on_the_cpu()
    with kernels.ordered_reduce_scatter():
        trained = DistributedDataParallel(engine.model.config, asked, engine.model)
        trained.config.finalize_model_grads_func = finalize_model_grads
        trained.config.no_sync_func = trained.no_sync
        trained.config.batch_p2p_sync = False  # This waits for a GPU.
        pipeline_parallel.get_forward_backward_func()(
            forward_step_func=functools.partial(_megatron_step, packed, micro),
            data_iterator=iter(own),
            model=[trained],
            num_microbatches=micro,
            seq_length=LENGTH * (len(own[0]) if packed else 1),
            micro_batch_size=1 if packed else len(own[0]),
        )
    if data.world > 1:
        # It has divided by the number of ranks, a power of two. Each rank has its part of every
        # bucket, and a tied embedding of several stages has a separate bucket.
        for bucket in (bucket for buffer in trained.buffers for bucket in buffer.buckets):
            share = bucket.grad_data.chunk(data.world)[data.rank].clone()
            bucket.grad_data.copy_(torch.cat(all_gather(share, data)))
        for buffer in (*trained.buffers, *trained.expert_parallel_buffers):
            buffer.grad_data.mul_(data.world)
    live = {engine.stage.whole(n): p.main_grad for n, p in engine.model.named_parameters()}
    plan = [entry for entry in engine.plan if entry.name in live]
    gather = functools.partial(all_gather, ranks=engine.grid.tp)
    every = {tensor_name(p.name): p.value.clone() for p in canonical(plan, live.get, gather)}
    # A tied head is the embedding. The last of several stages has a copy.
    if (head := every.pop("lm_head.weight", None)) is not None:
        every[EMBEDDING] = head
    return every


def _counted_on_the_cpu() -> None:
    """megatron-core's schedules count tokens on a GPU. This changes only the process of a rank."""
    zeros = torch.zeros

    def on_cpu(*size: Any, device: Any = None, **more: Any) -> Tensor:
        return zeros(*size, device="cpu" if device == "cuda" else device, **more)

    torch.zeros = on_cpu


def _megatron_step(packed: bool, micro: int, batches: Any, model: Any) -> tuple[Tensor, Any]:
    """For megatron-core's schedule: the output of this stage, and a function for its loss."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ids = next(batches)
    at, labels, pack = torch.arange(LENGTH).expand(ids.shape), ids.roll(-1, 1), None
    if packed:
        ends = torch.arange(len(ids) + 1, dtype=torch.int32) * LENGTH
        pack = PackedSeqParams("thd", ends, ends, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH)
        ids, at, labels = (x.reshape(1, -1) for x in (ids, at, labels))

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # The last position has no target; the schedule divides by the number of micro-batches.
        return output.view(-1, LENGTH)[:, :-1].sum() * micro, {}

    return model(ids, at, None, labels=labels, packed_seq_params=pack), loss


def together(ranks: list[Gradients]) -> Gradients:
    """Gradients of the whole model. A gradient of several ranks is equal on them."""
    merged = {name: gradient for own in ranks for name, gradient in own.items()}
    assert all(torch.equal(g, merged[name]) for own in ranks for name, g in own.items())
    return merged


def differing(found: Gradients, expected: Gradients) -> list[str]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    # An expert without tokens has no gradient.
    zero = [name for name, g in expected.items() if not g.any()]
    assert all(".experts." in name for name in zero)
    assert len(zero) < len(expected) / 8
    return [name for name, g in expected.items() if not torch.equal(found[name], g)]


def record(layout: str, against: str, found: Gradients, expected: Gradients) -> None:
    if path := os.environ.get("RLK_GRADIENTS"):
        wrong = differing(found, expected)
        said = {"layout": layout, "against": against, "of": len(expected), "differ": len(wrong)}
        with Path(path).open("a") as file:
            file.write(json.dumps(said | {"names": wrong[:6]}) + "\n")


@functools.cache
def _hf_sum(dtype: str) -> Gradients:
    leaves = of_hf(dtype)
    return {name: sum_in_pairs([leaf[name] for leaf in leaves]) for name in leaves[0]}


@functools.cache
def _megatron_alone(
    options: str = "", samples: int = SAMPLES, micro: int = 1, model: Path = MODEL
) -> Gradients:
    require_engine("megatron")
    return on_ranks(1, of_megatron, options, samples, micro, model)[0]


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (2, "bfloat16"),
        *(
            pytest.param(world, dtype, marks=whole_matrix)
            for world in (1, 2, 4)
            for dtype in ("bfloat16", "float32")
            if (world, dtype) != (2, "bfloat16")
        ),
    ],
)
def test_fsdp_has_the_gradients_of_hf(world: int, dtype: str) -> None:
    """For one global batch: ranks get samples in order, and the sample of each backward is a
    leaf."""
    expected = _hf_sum(dtype)
    norms = set()
    for found, norm in on_ranks(world, of_fsdp, dtype, True):
        record(f"FSDP2 dp={world}, {dtype}, ordered", "HF", found, expected)
        assert differing(found, expected) == []
        norms.add(norm.item())
    assert len(norms) == 1
    exact = torch.cat([g.double().flatten() for g in expected.values()]).norm().item()
    assert norms.pop() == pytest.approx(exact, rel=1e-12)


@whole_matrix
def test_the_order_of_the_transport_is_noticed() -> None:
    found, _ = on_ranks(4, of_fsdp, "bfloat16", False)[0]
    record("FSDP2 dp=4, bfloat16, torch's own order", "HF", found, _hf_sum("bfloat16"))
    assert differing(found, _hf_sum("bfloat16"))


@whole_matrix
@pytest.mark.parametrize(
    ("world", "options"), [(2, "tp=2,"), (2, "tp=2,sp=1,"), (4, "tp=4,"), (4, "tp=4,sp=1,")]
)
def test_megatron_has_the_gradients_of_one_rank(world: int, options: str) -> None:
    """What it adds up over ranks included: the norms of heads and, under sequence parallelism, all
    norms. The model has as many key-value heads as ranks; where it has fewer, see
    `tests/kernels/parallel/test_megatron_training.py`."""
    expected, found = _megatron_alone(), together(on_ranks(world, of_megatron, options))
    record(f"Megatron {options.rstrip(',')}", "tp=1", found, expected)
    assert differing(found, expected) == []


@whole_matrix
def test_megatron_and_hf_part_where_products_are_fused() -> None:
    """HF adds up the rounded gradients of the inputs of q, k and v, and of gate and up; Megatron
    has one sum. Other gradients are equal."""
    found, expected = _megatron_alone(samples=1), of_hf("bfloat16")[0]
    record("Megatron tp=1, one sample", "HF", found, expected)
    last = (f"model.layers.3.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    assert expected.keys() - differing(found, expected) == {"model.norm.weight", *last}


@whole_matrix
def test_megatron_data_parallel_has_one_order() -> None:
    """Two micro-batches on a rank, or one, are leaves of one tree: dp=2 and dp=4 agree and, for
    half the samples, dp=1 and dp=2."""
    two, four = (together(on_ranks(n, of_megatron, "", SAMPLES, 4 // n)) for n in (2, 4))
    record("Megatron dp=2, two micro-batches a rank", "dp=4, one", two, four)
    assert differing(two, four) == []
    one, halves = (together(on_ranks(n, of_megatron, "", 2, 2 // n)) for n in (1, 2))
    record("Megatron dp=1, two micro-batches", "dp=2, one a rank", one, halves)
    assert differing(one, halves) == []


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, "pp=2,"),
        pytest.param(4, "pp=4,", marks=whole_matrix),
        pytest.param(4, "tp=2,sp=1,pp=2,", marks=whole_matrix),
    ],
)
def test_pipeline_stages_have_the_gradients_of_one(world: int, options: str) -> None:
    """Except that of a tied embedding: one rank rounds the sum of its two gradients to bf16, and
    stages add them up in fp32."""
    expected, found = _megatron_alone(), together(on_ranks(world, of_megatron, options))
    record(f"Megatron {options.rstrip(',')}", "pp=1", found, expected)
    assert differing(found, expected) == [EMBEDDING]
    rounded = found | {EMBEDDING: found[EMBEDDING].bfloat16().float()}
    assert differing(rounded, expected) == []


@whole_matrix
def test_a_tied_embedding_of_stages_in_fp32() -> None:
    """With one backward, nothing is rounded in between. With two micro-batches, the order differs:
    stages add up all gradients of the head before those of the embedding."""
    for micro, differ in ((1, []), (2, [EMBEDDING])):
        expected = _megatron_alone("dtype=float32,", micro=micro)
        ranks = on_ranks(2, of_megatron, "pp=2,dtype=float32,", SAMPLES, micro)
        found = together(ranks)
        record(f"Megatron pp=2, float32, micro-batches: {micro}", "pp=1", found, expected)
        assert differing(found, expected) == differ


@whole_matrix
@pytest.mark.parametrize(
    ("ranks", "layout", "dtype"),
    [
        (2, "ep=2", "bfloat16"),
        (2, "ep=2", "float32"),
        (4, "ep=4", "bfloat16"),
        (4, "ep=2,pp=2", "bfloat16"),
        (4, "ep=2,pp=2", "float32"),
    ],
)
def test_ranks_that_share_experts_have_gradients_of_one(
    ranks: int, layout: str, dtype: str
) -> None:
    """Those of experts are sums over all samples, as of one backward; all others are sums over each
    rank's samples, added up as of a micro-batch a rank. One rank gives both only in two ways of
    taking the samples, and adds up four micro-batches one by one where ranks add up in pairs."""
    options = f"{layout},dtype={dtype},input=packed,"
    found = together(on_ranks(ranks, of_megatron, options, SAMPLES, 1, SPARSE))
    whole = _megatron_alone(f"dtype={dtype},input=packed,", SAMPLES, 1, SPARSE)
    experts = {name for name in whole if ".experts." in name}
    record(f"Megatron {options[:-1]}", "ep=1, one micro-batch", found, whole)
    wrong = {*differing(found, whole)}
    assert not wrong & experts
    assert wrong - experts, "what the condition excludes"
    for against, parts in _micro_batch_a_rank(layout, dtype).items():
        record(f"Megatron {options[:-1]}", f"{against}, two micro-batches", found, parts)
        # For a tied embedding, stages add up all gradients of the head first.
        tied = {EMBEDDING} if "pp=" in layout and "pp=" not in against else set()
        wrong = {*differing(found, parts)}
        assert wrong - experts == tied
        assert wrong & experts, "what the condition excludes"


def _micro_batch_a_rank(layout: str, dtype: str) -> dict[str, Gradients]:
    """Gradients by layout, of layouts with fewer ranks, where the samples of a rank are a
    micro-batch."""
    options = f"dtype={dtype},input=packed,"
    if layout == "ep=4":
        ranks = on_ranks(2, of_megatron, f"ep=2,{options}", SAMPLES, 2, SPARSE)
        return {"ep=2": together(ranks)}
    one = {"ep=1": _megatron_alone(options, SAMPLES, 2, SPARSE)}
    if layout == "ep=2":
        return one
    ranks = on_ranks(2, of_megatron, f"pp=2,{options}", SAMPLES, 2, SPARSE)
    return one | {"pp=2": together(ranks)}


@whole_matrix
def test_rows_of_experts_without_their_gradient_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault with experts on several ranks: no gradient goes back to the rank of the token."""
    from rlk_kernels.parallel import experts

    def nothing(ctx: Any, dy: Tensor) -> Any:
        back = experts._sent(dy, *ctx.back)
        return torch.zeros_like(back), None, None, None

    options = "dtype=bfloat16,input=packed,"
    expected = _megatron_alone(options, SAMPLES, 2, SPARSE)
    monkeypatch.setattr(experts._Send, "backward", staticmethod(nothing))
    found = together(on_ranks(4, of_megatron, f"ep=2,pp=2,{options}", SAMPLES, 1, SPARSE))
    wrong = {name for name in expected if not torch.equal(found[name], expected[name])}
    assert "model.layers.1.self_attn.o_proj.weight" in wrong
    assert "model.layers.3.self_attn.o_proj.weight" in wrong
