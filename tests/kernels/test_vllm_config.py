"""What the kernels refuse by a VllmConfig, also where no tool has looked at config.json before."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.vllm import config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def vllm_config(rope: dict[str, Any] | None) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(
            logprobs_mode="raw_logprobs",
            quantization=None,
            hf_text_config=SimpleNamespace(rope_parameters=rope),
        ),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        lora_config=None,
    )


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, YARN])
def test_what_is_served_passes(rope: dict[str, Any] | None) -> None:
    config._check(vllm_config(rope))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_follows_the_batch_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked = vllm_config({"rope_type": kind, "factor": 4.0})
    with pytest.raises(NotServed, match=f"rope_type={kind} is not served: its frequencies"):
        config._check(asked)
    monkeypatch.setattr(config, "_left", ["q_rope"])
    config._check(asked)
