"""Engine specs: accepted texts, and the error for each mistake."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_align.engines.info import EngineInfo
from rlk_align.engines.registry import ENGINES, require_installed, require_kernels
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, MissingDependency, UnknownEngine


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("hf", "hf", {}),
        ("hf:", "hf", {}),
        ("hf:attn=eager,dtype=bf16", "hf", {"attn": "eager", "dtype": "bfloat16"}),
        ("vllm:max_num_seqs=4", "vllm", {"max_num_seqs": 4}),
        ("vllm:kv_cache_gb=0.5", "vllm", {"kv_cache_gb": 0.5}),
        ("vllm:enable_prefix_caching=1", "vllm", {"enable_prefix_caching": True}),
        ("vllm:batch_invariant=False", "vllm", {"batch_invariant": False}),
        ("hf:model=/a=b/c:d", "hf", {"model": "/a=b/c:d"}),
        ("hf:patch=a.b:c_1", "hf", {"patch": "a.b:c_1"}),
        ("hf:fault=norm-eps", "hf", {"fault": "norm-eps"}),
        ("hf:fault=norm-eps@0.5e-4", "hf", {"fault": "norm-eps@5e-05"}),
        # The fault's default strength.
        ("hf:fault=norm-eps@1e-3", "hf", {"fault": "norm-eps"}),
    ],
)
def test_a_spec_is_parsed(text: str, name: str, options: dict) -> None:
    assert EngineSpec.parse(text) == EngineSpec(name, options)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("auto", "auto"),
        ("bf16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("float16", "float16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("float32", "float32"),
    ],
)
def test_dtypes_have_aliases(written: str, meant: str) -> None:
    assert EngineSpec.parse(f"hf:dtype={written}").options == {"dtype": meant}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nope", ["nope", "hf", "vllm"]),
        ("", ["hf", "vllm"]),
        ("HF", ["HF"]),
        (" hf", ["hf"]),
    ],
)
def test_an_unknown_engine_is_refused_with_the_known_ones(text: str, names: list[str]) -> None:
    with pytest.raises(UnknownEngine) as error:
        EngineSpec.parse(text)
    assert all(name in error.value.message for name in names)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf:nope=1", "'nope'"),
        ("hf:fault=nope", "fault=nope is unknown"),
        ("hf:fault=norm-eps@", "a positive number"),
        ("hf:fault=norm-eps@0", "a positive number"),
        ("hf:fault=norm-eps@nan", "a positive number"),
        ("hf:fault=attn-scale-twice@2", "it has no strength"),
        ("megatron:fault=kv-stale", "fault=kv-stale cannot be planted there"),
        ("fsdp:fault=kv-stale", "fault=kv-stale cannot be planted there"),
        ("hf:fault=padding-positions", "needs batch=4, padding=left"),
        ("hf:fault=padding-positions,batch=4", "needs padding=left"),
        (
            "hf:fault=padding-positions,batch=4,padding=left,kernels=rlk",
            "beside the kernels: the kernels refuse positions that count the padding",
        ),
        ("megatron:fault=rope-table-bf16,kernels=rlk", "round the table to the model's dtype"),
        ("hf:fault=proj-tf32", "needs dtype=float32"),
        ("hf:fault=norm-cast-order,dtype=fp32", "changes nothing with dtype=float32"),
        ("megatron:fault=norm-eps@rank0.1", "a positive number"),
        ("megatron:fault=norm-eps@rank1@0.1", "a positive number"),
        ("megatron:fault=attn-scale-twice@2@rank0", "it has no strength"),
        ("megatron:fault=norm-eps@rank1", "tp=1 there is one rank"),
        ("megatron:tp=2,fault=norm-eps@rank2", "tp=2 there is rank0, rank1"),
        ("megatron:cp=2,pp=2,fault=norm-eps@rank4", "tp=1,cp=2,pp=2 there is rank0, rank1, rank2"),
        ("megatron:tp=2,cp=2,fault=logprob-zero@rank3", "rank 2 alone reports logprob"),
        ("megatron:cp=2,input=packed,fault=packed-boundary", "leave cp out"),
        ("megatron:cp=2,padding=left", "leave padding out"),
        ("megatron:cp=2,spec=te", "leave spec out"),
        ("megatron:pp=2,spec=te", "leave spec out"),
        ("megatron:tp=2,fault=logprob-zero@rank1", "rank 0 alone reports logprob"),
        ("vllm:tp=2,fault=logits-fp8@rank1", "rank 0 alone reports logits"),
        ("megatron:tp=2,input=packed,fault=packed-boundary@rank1", "the input of all ranks"),
        ("megatron:spec=te,fault=norm-eps", "local spec"),
        ("hf:max_num_seqs=4", "'max_num_seqs'"),
        ("hf:attn", "attn=VALUE"),
        ("hf:attn=", "attn=VALUE"),
        ("hf:=eager", "''"),
        ("hf: attn=eager", "' attn'"),
        ("vllm:max_num_seqs=0", "positive"),
        ("vllm:max_num_seqs=-1", "positive"),
        ("vllm:max_num_seqs=1.5", "positive"),
        ("vllm:max_num_seqs=１", "positive"),
        ("vllm:enable_prefix_caching=yes", "1 or 0"),
        ("vllm:enable_prefix_caching=2", "1 or 0"),
        ("hf:dtype=int8", "bfloat16"),
        ("hf:dtype=BF16", "bfloat16"),
        ("hf:patch=module", "module:function"),
        ("hf:patch=a:b:c", "module:function"),
        ("hf:patch=a/b.py:c", "module:function"),
    ],
)
def test_a_bad_option_is_named(text: str, says: str) -> None:
    with pytest.raises(BadOption) as error:
        EngineSpec.parse(text)
    assert says in error.value.message + error.value.fix
    assert text.partition(":")[0] in error.value.message


@pytest.mark.parametrize("fault", ["norm-eps", "norm-eps@rank1", "norm-eps@0.5@rank0"])
def test_a_fault_of_one_rank_is_said_as_it_is_written(fault: str) -> None:
    assert EngineSpec.parse(f"vllm:tp=2,fault={fault}").option("fault") == fault


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(BadOption) as error:
        EngineSpec.parse("hf:dtpye=bf16")
    for known in ("attn", "dtype", "device", "model", "python", "patch"):
        assert known in error.value.fix


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(BadOption, match="dtype"):
        EngineSpec.parse("hf:dtype=bf16,dtype=fp32")


word = st.text(st.characters(codec="ascii", exclude_characters=",\n"), min_size=1, max_size=8)
options = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
        "model": word,
        "python": word,
        "block_size": st.integers(1, 10**9),
        "batch_invariant": st.booleans(),
    },
)


@given(options)
def test_a_spec_is_what_its_text_says(given_options: dict) -> None:
    spec = EngineSpec("vllm", given_options)
    assert EngineSpec.parse(str(spec)) == spec


def test_a_missing_package_is_named_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = EngineInfo("x:Y", "no_such_package_anywhere", "pip install it")
    monkeypatch.setitem(sys.modules, "absent_engine", SimpleNamespace(INFO=info))
    monkeypatch.setitem(ENGINES, "absent", "absent_engine:INFO")
    assert not info.installed
    with pytest.raises(MissingDependency, match="no_such_package_anywhere") as error:
        require_installed("absent")
    assert error.value.fix == "pip install it"
    require_installed("hf")


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it were not installed."""
    find = importlib.util.find_spec

    def hide(package: str) -> None:
        def found(name: str, *more: str) -> ModuleSpec | None:
            return None if name == package else find(name, *more)

        monkeypatch.setattr(importlib.util, "find_spec", found)

    return hide


@pytest.mark.parametrize("name", ["hf", "fsdp"])
def test_transformers_without_torch_is_no_engine(name: str, hidden: Callable[[str], None]) -> None:
    require_installed(name)
    hidden("torch")
    with pytest.raises(MissingDependency, match="needs the package 'torch'") as error:
        require_installed(name)
    assert error.value.fix == "pip install 'rlk-align[engines]'"


def test_missing_kernels_are_named_with_their_install_command(
    hidden: Callable[[str], None],
) -> None:
    require_kernels("hf")
    hidden("rlk_kernels")
    with pytest.raises(MissingDependency, match="'hf': kernels=rlk needs the package") as error:
        require_kernels("hf")
    assert error.value.fix == "pip install 'rlk-align[engines]'"
