"""A gated delta net in vLLM as CUDA graphs need it: what a graph reads of a batch stays at one
address, and its compiler splits a graph at the operator that reads the batch."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.vllm.delta_net import (
    RlkMetadataBuilder,
    RlkQwenGatedDeltaNetAttention,
    state_dtypes,
    state_shapes,
)
from vllm.compilation.partition_rules import should_split
from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

SLOTS, LAYER = 6, "layers.0.linear_attn"
TEXT = SimpleNamespace(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, linear_conv_kernel_dim=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    made = VllmConfig()
    made.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    made.model_config = SimpleNamespace(hf_text_config=TEXT, dtype=torch.bfloat16)
    return made


def builder_of(config: VllmConfig) -> RlkMetadataBuilder:
    model = config.model_config
    spec = MambaSpec(block_size=256, shapes=state_shapes(TEXT, 1), dtypes=state_dtypes(model.dtype))
    return RlkMetadataBuilder(spec, [LAYER], config, torch.device("cpu"))


def test_ranks_share_the_heads_of_a_slot() -> None:
    whole, half = state_shapes(TEXT, 1), state_shapes(TEXT, 2)
    assert [math.prod(shape) for shape in half] == [math.prod(shape) // 2 for shape in whole]
    with pytest.raises(NotSupported, match="linear_num_key_heads=2, which 4 ranks do not divide"):
        state_shapes(TEXT, 4)


def batch(new: list[int], before: list[int], slots: list[int], rows: int) -> Any:
    """Of requests with `new` rows each, as vLLM's runner gives it to a builder."""
    bounds = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([n + b for n, b in zip(new, before, strict=True)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=bounds, query_start_loc_cpu=bounds, seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths, num_reqs=len(new), num_actual_tokens=rows,
        max_query_len=max(new), max_seq_len=int(lengths.max()),
        block_table_tensor=torch.tensor(slots, dtype=torch.int32)[:, None],
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip


PADDED = batch([1, 1, 0, 0], [64, 7, 0, 0], [3, 5, 0, 0], 4)
"""A step of decode of two requests, in a graph of four."""


def test_what_a_graph_reads_of_a_batch_stays_at_its_address(config: VllmConfig) -> None:
    builder = builder_of(config)
    captured = builder.build_for_cudagraph_capture(batch([1] * 4, [1] * 4, [0] * 4, 4))
    names = "rlk_context", "non_spec_state_indices_tensor", "non_spec_query_start_loc"
    read = [getattr(captured, name) for name in names]
    for step in (PADDED, batch([1, 1, 1], [8, 65, 0], [5, 3, 1], 3)):
        metadata = builder.build(0, step)
        for name, x in zip(names, read, strict=True):
            assert getattr(metadata, name).data_ptr() == x.data_ptr(), name
            assert getattr(metadata, name).dtype == torch.int32, name
    context, slots, bounds = (x.tolist() for x in read)
    assert (context[:3], slots[:3], bounds[:4]) == ([8, 65, 0], [5, 3, 1], [0, 1, 2, 3])
    builder.build(0, PADDED)
    context, slots, bounds = (x.tolist() for x in read)
    assert (context[:2], slots[:2], bounds) == ([64, 7], [3, 5], [0, 1, 2, 2, 2])


class Layer(RlkQwenGatedDeltaNetAttention):
    """The layer between its products, which vLLM tests."""

    def __init__(self, config: VllmConfig, cache: tuple[Tensor, ...]) -> None:
        torch.nn.Module.__init__(self)
        text, made = config.model_config.hf_text_config, torch.Generator().manual_seed(0)
        self.num_k_heads, self.num_v_heads = text.linear_num_key_heads, text.linear_num_value_heads
        self.head_k_dim, self.head_v_dim = text.linear_key_head_dim, text.linear_value_head_dim
        self.conv_dim, self.value_dim = cache[0].shape[-1], self.num_v_heads * self.head_v_dim
        self.gqa_interleaved_layout, self.prefix, self.kv_cache = False, LAYER, cache
        self.tp_size = 1
        dtype = config.model_config.dtype
        self.conv1d = torch.nn.Conv1d(self.conv_dim, self.conv_dim, 4, groups=self.conv_dim)
        self.conv1d.weight.data = torch.randn(self.conv_dim, 1, 4, generator=made).to(dtype)
        self.A_log, self.dt_bias = torch.randn(2, self.num_v_heads, generator=made)

    def in_proj_qkvz(self, x: Tensor) -> tuple[Tensor, None]:
        return x[:, : self.conv_dim + self.value_dim], None

    def in_proj_ba(self, x: Tensor) -> tuple[Tensor, None]:
        return x[:, self.conv_dim + self.value_dim :], None

    def norm(self, x: Tensor, z: Tensor) -> Tensor:
        return x + 0.0 * z

    def out_proj(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


def cache_of(config: VllmConfig) -> tuple[Tensor, ...]:
    model, made = config.model_config, torch.Generator().manual_seed(1)
    shapes, dtypes = state_shapes(TEXT, 1), state_dtypes(model.dtype)
    return tuple(
        torch.randn(SLOTS, *shape, generator=made).to(dtype).mul(0.1)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


@torch.no_grad()
def test_a_compiled_layer_splits_at_vllms_operator_and_has_the_bits_of_eager_code(
    config: VllmConfig,
) -> None:
    """In a padded batch, whose last requests have no rows."""
    layer, expected = Layer(config, cache_of(config)), Layer(config, cache_of(config))
    config.compilation_config.static_forward_context = {LAYER: layer}
    splits: list[str] = []

    def captured(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators = CompilationConfig._attention_ops
        splits.extend(str(n.target) for n in graph.graph.nodes if should_split(n, operators))
        return graph.forward

    width = layer.conv_dim + layer.value_dim + 2 * layer.num_v_heads
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(2))
    x = x.to(config.model_config.dtype)
    run = torch.compile(layer.forward, backend=captured, fullgraph=True)
    with set_forward_context({LAYER: builder_of(config).build(0, PADDED)}, config):
        rows = run(x)
    assert splits == ["vllm.qwen_gdn_attention_core"]
    assert not rows[2:].any()

    b, a = x[:2, -2 * layer.num_v_heads :].chunk(2, -1)
    conv, *chunks = expected.kv_cache
    kept = profile.Kept(conv, tuple(chunks), torch.tensor([3, 5]), torch.tensor([64, 7]))
    net = profile.DeltaNet(
        expected.conv1d.weight.squeeze(1), expected.A_log, expected.dt_bias, layer.num_k_heads,
        layer.num_v_heads, layer.head_k_dim,
    )  # fmt: skip
    alone = expected.rlk_core(net, x[:2, : layer.conv_dim], a, b, torch.tensor([0, 1, 2]), kept)
    assert alone.any()
    assert torch.equal(rows[:2], alone.flatten(1))
    for ours, theirs in zip(layer.kv_cache, expected.kv_cache, strict=True):
        assert torch.equal(ours, theirs)
