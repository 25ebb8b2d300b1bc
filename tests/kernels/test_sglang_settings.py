"""The settings of SGLang and of its models that the kernels refuse. No SGLang is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlk_kernels.integrations import sglang
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.sglang import settings

CONFIG: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu"},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "mlp_only_layers": []},
    **{"tie_word_embeddings": False, "decoder_sparse_step": 1},
}
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"moe_intermediate_size": 128}
PLAIN = {"tp_size": 1, "kv_cache_dtype": "auto", "disaggregation_mode": "null"}


def of_server(
    device: str = "cpu", version: str = settings.VERSIONS["cpu"], **changed: Any
) -> list[str]:
    args = SimpleNamespace(**PLAIN | changed)
    return list(settings.of_server(args, device, version, "bfloat16"))


def on_a_gpu(prefill: str = "disabled", **changed: Any) -> list[str]:
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=prefill))
    given = {"cuda_graph_config": graphs, "version": settings.VERSIONS["cuda"]} | changed
    return of_server("cuda", **given)


def of_model(**changed: Any) -> list[str]:
    return list(settings.of_model(SimpleNamespace(**CONFIG | changed)))


def of_ranks(ranks: int, device: str = "cpu", **changed: Any) -> list[str]:
    return list(settings.of_ranks(SimpleNamespace(**CONFIG | SIZES | changed), device, ranks))


def test_plain_settings_are_supported() -> None:
    assert of_server() == of_server(tp_size=2) == of_model() == []
    assert of_ranks(1) == of_ranks(2) == []
    assert of_server(kv_cache_dtype="bfloat16") == on_a_gpu() == on_a_gpu(tp_size=2) == []


def test_on_a_gpu_no_fused_sums_and_no_graphs_of_attention_in_prefills() -> None:
    (fused,) = on_a_gpu(tp_size=2, flashinfer_allreduce_fusion_backend="auto")
    assert "pass enforce_disable_flashinfer_allreduce_fusion=True" in fused
    assert on_a_gpu("breakable") == []
    for captured in ("full", "tc_piecewise"):
        (graphs,) = on_a_gpu(captured)
        assert "cuda_graph_backend_prefill='breakable'" in graphs


def test_each_device_has_its_version() -> None:
    (reason,) = on_a_gpu(version="0.5.23")
    assert reason.startswith("device=cuda with SGLang 0.5.23")
    assert "cuda with SGLang 0.5.17" in reason
    (reason,) = of_server(version="0.5.17")
    assert reason.startswith("device=cpu with SGLang 0.5.17")


def test_graphs_that_were_captured_before_are_refused() -> None:
    eager, captured = object(), object()
    runner = SimpleNamespace(
        eager_runner=eager, decode_cuda_graph_runner=eager, prefill_cuda_graph_runner=None
    )
    settings.check_not_captured(runner)
    settings.check_not_captured(SimpleNamespace())
    runner.decode_cuda_graph_runner = captured
    with pytest.raises(NotSupported, match="captured CUDA graphs"):
        settings.check_not_captured(runner)


@pytest.mark.parametrize(
    "changed",
    [
        *({name: 2} for name in settings.ONE),
        *({name: "x"} for name in settings.OFF),
        *({name: "x"} for name in settings.ONLY),
        {"kv_cache_dtype": "fp8_e4m3"},
        {"device": "xpu"},
    ],
    ids=str,
)
def test_a_setting_is_refused_by_name(changed: dict[str, Any]) -> None:
    (name,) = changed
    (reason,) = of_server(**changed)
    assert reason.startswith(f"{name}={changed[name]}")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "phi3"}, "model_type=phi3"),
        ({"architectures": ["Other"]}, "Other of model_type=qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"mlp_bias": True}, "mlp_bias, which SGLang's class ignores"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type=dynamic"),
        (
            {"rope_parameters": CONFIG["rope_parameters"] | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=[0]: SGLang ignores it"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2: SGLang ignores it"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: SGLang ignores it"),
    ],
)
def test_a_model_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    (reason,) = of_model(**changed)
    assert named in reason


@pytest.mark.parametrize(
    ("size", "padded"),
    [
        ({"hidden_size": 129}, {}),
        ({"num_attention_heads": 3}, {"num_attention_heads": 4, "original_num_attention_heads": 3}),
        ({"num_key_value_heads": 1}, {"num_key_value_heads": 2, "original_total_num_kv_heads": 1}),
        (
            {"moe_intermediate_size": 96},
            {"moe_intermediate_size": 128, "original_moe_intermediate_size": 96},
        ),
    ],
    ids=str,
)
def test_sizes_that_ranks_do_not_divide_are_refused(
    size: dict[str, int], padded: dict[str, int]
) -> None:
    """Also after SGLang has padded them."""
    ((name, value),) = size.items()
    for config in filter(None, (size, padded)):
        (reason,) = of_ranks(2, **config)
        assert reason.startswith(f"{name}={value}, which is no multiple of")
    assert of_ranks(1, **size) == []


def test_features_need_no_padding_on_a_gpu() -> None:
    assert of_ranks(2, "cuda", moe_intermediate_size=98) == []
    (reason,) = of_ranks(2, "cuda", moe_intermediate_size=97)
    assert reason == "moe_intermediate_size=97, which is no multiple of 2, with 2 ranks"


def test_settings_are_listed_together() -> None:
    assert len(of_server(pp_size=2, enable_lora=True, quantization="fp8")) == 3


@pytest.mark.parametrize("asked", ["yes", "1"])
def test_the_plug_in_ends_a_process_that_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """SGLang logs the exceptions of plug-ins; SystemExit is none."""
    monkeypatch.setenv("RLK_KERNELS", asked)
    monkeypatch.setenv("SGLANG_PLUGINS", "others")
    with pytest.raises(SystemExit, match=r"SGLANG_PLUGINS=others excludes|RLK_KERNELS=yes"):
        sglang.plugin()


def test_the_plug_in_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLK_KERNELS", raising=False)
    sglang.plugin()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.importlib.metadata, "version", lambda _: "0.5.20")
    with pytest.raises(
        NotSupported, match=r"SGLang 0\.5\.23.*SGLang 0\.5\.17, and this is 0\.5\.20"
    ):
        settings.check_version()
