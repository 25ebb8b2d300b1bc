"""The real vLLM by itself: its plugin, its compiler, its overrides, and off means off."""

import math
import struct
import tomllib
from pathlib import Path
from typing import Any

from bit_equal import Bits
from rlk_kernels.integrations.vllm import PLUGIN

ROOT = Path(__file__).resolve().parents[2]


def test_off_is_off(vllm_bits: Bits) -> None:
    """Before the kernels, after them, and with the plugin that nobody switched on."""
    hows = {"own": "off", "on": "registered", "taken out": "off", "plugin": "plugin"}
    every = {"all tokens": True, "options": {"max_logprobs": -1}}
    cases = [{"name": n, "kernels": k} | every for n, k in hows.items()]
    found = vllm_bits(cases, few=True, TORCHDYNAMO_DISABLE="1")
    for how in ("own", "on"):
        check_all_tokens(found[how])
    assert found["taken out"] == found["own"]
    assert found["own"]["ran"] == []
    assert found["plugin"] == found["on"]
    assert found["on"]["ran"] == [
        *("embedding", "linear", "logp", "paged_attention", "rms_norm", "rope", "swiglu"),
        "write_kv_cache",
    ]
    assert found["on"]["decode"] != found["own"]["decode"]
    assert found["on"]["decode"] == found["on"]["prefill"]
    assert found["on"]["hash"] != found["own"]["hash"], "the compile cache tells them apart"


def test_a_model_in_a_process_of_its_own_has_the_kernels_too(vllm_bits: Bits) -> None:
    """As vLLM makes it by default: what is registered here is told to it."""
    here = {"name": "here", "kernels": "registered"}
    found = vllm_bits([here, here | {"name": "apart", "apart": True}], few=True)
    for what in ("tokens", "decode", "prefill"):
        assert found["apart"][what] == found["here"][what]


def check_all_tokens(found: dict[str, Any]) -> None:
    """Log-probs of all tokens, of listed ones and of the largest are one another's, sorted, and
    the sampled one's is that of decoding."""
    asked = found["all tokens"]
    every = asked["all"]["sampled"]
    assert len(every) == len(asked["all"]["prompt"]) == 1024
    for where in ("sampled", "prompt"):
        values = [value(bits) for bits, _ in asked["all"][where].values()]
        assert abs(sum(map(math.exp, values)) - 1) < 1e-5
        for token, (bits, rank) in asked["three"][where].items():
            assert asked["all"][where][token] == [bits, rank]
    (sampled,) = asked["sampled"]["sampled"]
    assert sampled == str(found["tokens"][1][0])
    assert every[sampled] == [found["decode"][1][:8], 1]
    assert set(asked["listed"]["sampled"]) == {sampled, "11", "7", "500"}
    assert set(asked["fewer listed"]["sampled"]) == {sampled, "7"}
    for name in ("listed", "fewer listed"):
        for token, (bits, _) in asked[name]["sampled"].items():
            assert bits == every[token][0]


def value(bits: str) -> float:
    (number,) = struct.unpack("f", bytes.fromhex(bits))
    return number


def test_the_plugin_is_what_vllm_is_told_of() -> None:
    import importlib

    text = (ROOT / "kernels" / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    ((plugin, target),) = project["entry-points"]["vllm.general_plugins"].items()
    assert plugin == PLUGIN
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_compiled_code_is_loaded_where_it_belongs(tmp_path: Path, vllm_bits: Bits) -> None:
    """One compile cache, written without the kernels, then with them, then without again: each has
    its own bits, and the kernels' are those of eager code."""
    eager = vllm_bits(
        [{"name": "eager", "kernels": "registered"}], few=True, TORCHDYNAMO_DISABLE="1"
    )
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    compiled = {"options": {"enforce_eager": False}}
    found = {
        name: vllm_bits([{"name": name, "kernels": how} | compiled], few=True, **cache)[name]
        for name, how in {"own": "off", "on": "registered", "again": "off"}.items()
    }
    assert found["again"] == found["own"]
    assert found["own"]["ran"] == []
    for what in ("tokens", "decode", "prefill"):
        assert found["on"][what] == eager["eager"][what]
    # Where nobody looks at the norms of q and k, they and the rotation are one operator.
    assert "norm_rope" not in eager["eager"]["ran"]
    assert found["on"]["ran"] == sorted([*eager["eager"]["ran"], "norm_rope"])
    warm = vllm_bits([{"name": "warm", "kernels": "registered"} | compiled], few=True, **cache)[
        "warm"
    ]
    assert warm == found["on"]


def test_a_rope_that_an_override_stretches(vllm_bits: Bits) -> None:
    """Eager and compiled, where its factor goes through the compiler's graph."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    stretched = {"hf_overrides": {"rope_parameters": rope | {"rope_theta": 10000.0}}}
    cases = [
        {"name": name, "kernels": "registered", "options": options}
        for name, options in {"plain": {}, "eager": stretched}.items()
    ]
    found = vllm_bits(cases, few=True, TORCHDYNAMO_DISABLE="1")
    compiled = {"name": "compiled", "kernels": "registered"}
    compiled["options"] = stretched | {"enforce_eager": False}
    found |= vllm_bits([compiled], few=True)
    assert found["eager"]["decode"] != found["plain"]["decode"]
    assert found["eager"]["decode"] == found["eager"]["prefill"]
    for what in ("tokens", "decode", "prefill"):
        assert found["compiled"][what] == found["eager"][what]
    assert "norm_rope" in found["compiled"]["ran"]
