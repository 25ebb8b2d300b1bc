"""Gradients of the embedded model with the kernels, in every layout: which have the bits of one
rank, and under which condition.

RLK_GRADIENTS=FILE.jsonl collects what was found, for the reports.
"""

import contextlib
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import require_engine
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
whole_matrix = pytest.mark.whole_matrix
SAMPLES, LENGTH = 4, 16
IDS = torch.randint(2, 1000, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))

Gradients = dict[str, Tensor]
"""Tensor of the checkpoint -> its gradient, whole, fp32."""


def of_hf(dtype: str) -> list[Gradients]:
    """Each sample's by itself."""
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
    """FSDP2, fp32 weights computing in `dtype`; samples are dealt in order. And their norm."""
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
    # FSDP2 has averaged over ranks, by a power of two.
    norm = gradient_norm(model.parameters()) * group.size()
    return {n: p.grad.full_tensor() * group.size() for n, p in model.named_parameters()}, norm


def of_megatron(group: Any, options: str, samples: int = SAMPLES, data: int = 1) -> Gradients:
    """After megatron-core has finished them, of one backward over the samples, or of as many as
    there are for each of `data` ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from rlk_kernels.integrations import megatron as kernels

    from rlk_align.engines.common.weights import canonical
    from rlk_align.engines.megatron.engine import MegatronEngine
    from rlk_align.engines.patch import patch_of
    from rlk_align.engines.process.ranks import Ranks, all_gather
    from rlk_align.engines.spec import EngineSpec
    from rlk_align.model.checkpoint import tensor_name
    from rlk_align.model.families import read_shape

    spec = EngineSpec.parse(f"megatron:{options}kernels=rlk")
    engine = MegatronEngine(spec, MODEL, read_shape(MODEL))
    ranks = Ranks(group.rank(), group.size(), torch.device("cpu"))
    engine.ranks = Ranks(group.rank() // data, group.size() // data, torch.device("cpu"))
    engine.kernels = patch_of(spec)
    engine.open()
    asked = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=data > 1,
        reduce_scatter_with_fp32_accumulation=data > 1,
    )
    with kernels.ordered_reduce_scatter():
        model = DistributedDataParallel(engine.model.config, asked, engine.model)
        own = IDS[:samples].chunk(data)[group.rank() % data]
        batches = own.split(len(own) if data == 1 and samples == SAMPLES else 1)
        for i, ids in enumerate(batches):
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                at = torch.arange(LENGTH).expand(len(ids), LENGTH)
                # The last position is scored against nothing.
                loss = model(ids, at, None, labels=ids.roll(-1, 1))[:, :-1]
                loss.sum().backward()
        finalize_model_grads([model])
    if data > 1:
        for buffer in model.buffers:
            share = buffer.grad_data.chunk(data)[group.rank()].clone()
            buffer.grad_data.copy_(torch.cat(all_gather(share, ranks)) * data)
    live = {name: p.main_grad for name, p in engine.model.named_parameters()}
    plan = [entry for entry in engine.plan if entry.name in live]
    gather = functools.partial(all_gather, ranks=engine.ranks)
    every = {tensor_name(p.name): p.value.clone() for p in canonical(plan, live.get, gather)}
    # A tied head is the embedding.
    return {name: value for name, value in every.items() if name != "lm_head.weight"}


def differing(found: Gradients, expected: Gradients) -> list[str]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    assert all(bool(g.any()) for g in expected.values())
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
def _megatron_alone(samples: int) -> Gradients:
    require_engine("megatron")
    return on_ranks(1, of_megatron, "", samples)[0]


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
    """At one global batch: samples are dealt in order, and each backward's sample is a leaf."""
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
    expected, (found, *_) = _megatron_alone(SAMPLES), on_ranks(world, of_megatron, options)
    record(f"Megatron {options.rstrip(',')}", "tp=1", found, expected)
    assert differing(found, expected) == []


@whole_matrix
def test_megatron_and_hf_part_where_products_are_fused() -> None:
    """HF adds up the rounded gradients of what q, k and v read, and gate and up; Megatron has one
    sum. What is behind no such product is equal."""
    found, expected = _megatron_alone(1), of_hf("bfloat16")[0]
    record("Megatron tp=1, one sample", "HF", found, expected)
    last = (f"model.layers.3.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    assert expected.keys() - differing(found, expected) == {"model.norm.weight", *last}


@whole_matrix
def test_megatron_data_parallel_has_one_order() -> None:
    """Two micro-batches a rank, or one, are leaves of one tree: dp=2 and dp=4 agree, and, of half
    the samples, dp=1 and dp=2."""
    two, four = (on_ranks(n, of_megatron, "", SAMPLES, n)[0] for n in (2, 4))
    record("Megatron dp=2, two micro-batches a rank", "dp=4, one", two, four)
    assert differing(two, four) == []
    one, halves = (on_ranks(n, of_megatron, "", 2, n)[0] for n in (1, 2))
    record("Megatron dp=1, two micro-batches", "dp=2, one a rank", one, halves)
    assert differing(one, halves) == []
