"""Parts of the integration into Megatron-core: windows, and the stages of a pipeline."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rlk_kernels.integrations import megatron
from rlk_kernels.integrations.errors import NotServed

pytest.importorskip("megatron.core")

IDS = torch.arange(5, 17)[None]
AT = torch.arange(12)[None]


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[None]:
    """megatron-core's process-wide state, of one rank on a CPU."""
    from megatron.core import parallel_state

    from rlk_align.engines.megatron.cpu import cpu_stand_ins

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with cpu_stand_ins():
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config(**more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    usual: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1,
        "kv_channels": 16, "ffn_hidden_size": 48, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**usual | more)


def made(asked: Any, vp_stage: int | None = None, **more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(0)
    spec = megatron.layer_spec(asked, vp_stage=vp_stage)
    also = {"position_embedding_type": "rope", "vp_stage": vp_stage}
    model = GPTModel(asked, spec, 64, 32, **also, **more)
    return megatron.use_kernels(model, {"rope_theta": 10000})


def reached(asked: Any) -> list[int]:
    """The rows whose logits follow the first token."""
    model, other = made(asked), IDS.clone()
    other[0, 0] = 60
    with torch.no_grad():
        rows = [model(ids, AT, None)[0] for ids in (IDS, other)]
    return (rows[0] != rows[1]).any(-1).nonzero().flatten().tolist()


def test_a_window_counts_the_keys_before_a_query() -> None:
    assert reached(config()) == list(range(12))
    assert reached(config(window_size=(4, 0))) == list(range(5))
    # Every second layer sees all, and the first is none of them.
    assert reached(config(window_size=(4, 0), window_attn_skip_freq=2)) == list(range(5))
    assert reached(config(window_size=(4, 0), window_attn_skip_freq=[0])) == list(range(12))


@pytest.mark.parametrize("size", [(4, 1), (-1, 0), (4, -1)])
def test_a_window_behind_a_query_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(NotServed, match=r"window_size=\(.*\) is not served"):
        made(config(window_size=size))


def test_each_virtual_stage_is_its_own_layers() -> None:
    """Of four layers on two ranks this one, the first, has layers 1 and 3; the second stage is made
    with the model's end too."""
    windows = {"window_size": (4, 0), "window_attn_skip_freq": [0, 0, 1, 0]}
    whole = made(config(num_layers=4, **windows))
    states: list[torch.Tensor] = []
    for layer in whole.decoder.layers:
        layer.register_forward_hook(lambda _module, _given, out: states.append(out[0].detach()))
    with torch.no_grad():
        logits = whole.output_layer(whole.decoder.final_layernorm(_after(whole, states)))[0]
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    asked = config(num_layers=4, pipeline_dtype=torch.float32, **pipeline, **windows)
    first = made(asked, 0, pre_process=True, post_process=False)
    second = made(asked, 1, pre_process=False, post_process=True)
    assert [layer.layer_number for layer in first.decoder.layers] == [1]
    assert [layer.layer_number for layer in second.decoder.layers] == [3]
    first.embedding.load_state_dict(whole.embedding.state_dict())
    second.output_layer.load_state_dict(whole.output_layer.state_dict())
    for stage, number in ((first, 0), (second, 2)):
        stage.decoder.layers[0].load_state_dict(whole.decoder.layers[number].state_dict())
    with torch.no_grad():
        assert first(IDS, AT, None).equal(states[0])
        second.set_input_tensor(states[1])
        assert second(None, AT, None).transpose(0, 1).equal(logits)
    names = {name.rpartition(".")[0] for name in megatron.operators(second)}
    assert names == {"layers.2", ""}
    assert set(megatron.operators(first)) & {"embed", "final_norm", "logits"} == {"embed"}
    for stage in (first, second):
        megatron.check(megatron.operators(stage))


def _after(whole: Any, states: list[torch.Tensor]) -> torch.Tensor:
    """What the third layer gives."""
    whole(IDS, AT, None)
    return states[2]
