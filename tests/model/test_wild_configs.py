"""Configs as they are published on hubs, with sizes shrunk: each is accepted, or refused by the
name of what is unknown in it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import Cli, require_engine
from wild_models import ACCEPTED, WILD, wild_model

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.config_keys import check_settings
from rlk_align.model.rotary import checkpoint_rotary
from rlk_align.model.shape import read_shape


def warnings_of(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    (folder / "config.json").write_text(json.dumps(config))
    return check_settings(folder, read_config(folder), read_shape(folder).family)


def test_kimi_k2_is_accepted_as_its_publisher_advises_and_kimi_delta_attention_is_not(
    tmp_path: Path,
) -> None:
    kimi = WILD["moonshotai/Kimi-K2-Instruct"]["config"]
    assert len(warnings_of(tmp_path, kimi | {"model_type": "deepseek_v3"})) == 1
    with pytest.raises(ModelError, match=r"it has Kimi delta attention \(KDA\), a delta rule"):
        warnings_of(tmp_path, {"model_type": "kimi_linear"})


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {"use_qk_norm": False}, "use_qk_norm = False"),
        ("MiniMaxAI/MiniMax-M2.5", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ("deepseek-ai/DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("microsoft/Phi-4-mini-instruct", {"full_attn_mod": 2}, "full_attn_mod = 2"),
        ("tencent/HunyuanImage-2.1, reprompt", {"use_cla": True}, "use_cla = True"),
        (
            *("baidu/ERNIE-4.5-0.3B", {"auto_map": {"AutoModelForCausalLM": "m.OtherForCausalLM"}}),
            "auto_map names code in the checkpoint",
        ),
    ],
)
def test_another_form_of_a_published_setting_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        warnings_of(tmp_path, WILD[name]["config"] | changes)


def test_the_rope_of_hunyuan_has_a_larger_theta(tmp_path: Path) -> None:
    """alpha, in a kind of rope that is named dynamic; other families do not know it."""
    config = WILD["tencent/HunyuanImage-2.1, reprompt"]["config"]
    warnings_of(tmp_path, config)
    rotary = checkpoint_rotary(tmp_path, read_shape(tmp_path))
    assert rotary is not None
    theta = 10000.0 * 1000.0 ** (32 / 30)
    assert rotary.inv_freq == pytest.approx([theta ** (-j / 32) for j in range(0, 32, 2)])
    llama = config | {"model_type": "llama", "use_qk_norm": None}
    known = {key: value for key, value in llama.items() if key in HUB or key == "rope_scaling"}
    with pytest.raises(ModelError, match=re.escape("rope_scaling.alpha = 1000.0 may change")):
        warnings_of(tmp_path, known)


HUB = ("hidden_size", "intermediate_size", "max_position_embeddings", "model_type", "vocab_size")
HUB += ("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps")


@pytest.mark.parametrize("name", WILD)
def test_a_published_config_is_accepted_or_refused_by_name(tmp_path: Path, name: str) -> None:
    config, refused = WILD[name]["config"], WILD[name]["refused"]
    assert WILD[name]["source"]
    if not refused:
        said = warnings_of(tmp_path, config)
        assert [w.partition(" ")[0] for w in said] == ["auto_map"] * ("auto_map" in config)
        return
    with pytest.raises(ModelError, match=re.escape(refused)):
        warnings_of(tmp_path, config)


_IN_VLLM = {
    **dict.fromkeys(("deepseek-ai/DeepSeek-V3", "zai-org/GLM-4.7-Flash"), "latent attention"),
    "MiniMaxAI/MiniMax-M2.5": "does not support model_type 'minimax_m2' without the kernels",
    # Its config.json states an architecture that vLLM 0.32 spells otherwise.
    "baidu/ERNIE-4.5-0.3B": "Model architectures ['Ernie4_5_ForCausalLM'] are not supported",
}
"""A model that vLLM does not run on a CPU -> the reason that is named."""


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_published_config_is_compared_by_transformers_and_vllm(
    cli: Cli, few_prompts: Path, tmp_path: Path, name: str
) -> None:
    require_engine("vllm")
    model, train = wild_model(tmp_path, name), "hf:attn=eager,batch=4" if "gpt" in name else "hf"
    for rollout in ("vllm", "hf:attn=eager"):
        done = cli(
            *("compare", "--model", model, "--prompts", few_prompts, "--max-new-tokens", 8),
            *("--rollout", rollout, "--train", train, "--run-dir", tmp_path / rollout[:2]),
        )
        if rollout == "vllm" and name in _IN_VLLM:
            assert done.code == 2
            assert _IN_VLLM[name] in done.err
            continue
        assert done.code == 0, done.out + done.err
        assert done.verdict is not None
        assert done.verdict["divergences"]["prefill_vs_train"]["over_budget"] == []
        return
