"""`kernels=rlk[,except=OPERATOR]` and `--kernels`: accepted values, and errors for wrong ones."""

from pathlib import Path

import pytest

from rlk_align.api.options import side
from rlk_align.capture.key import adapter_digest, capture_key
from rlk_align.capture.request import CaptureRequest
from rlk_align.data import data_path
from rlk_align.engines.common.kernels import NOT_FIXED, REPLACEABLE
from rlk_align.engines.registry import ENGINES, load_patch
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.families import FAMILIES
from rlk_align.model.operators import OPERATORS
from rlk_align.model.rotary import FIXED


def test_the_tool_and_the_kernels_name_the_same_operators() -> None:
    """The kernels' package has a copy, because it must not import the tool."""
    from rlk_kernels.integrations import operators as kernels

    assert kernels.OPERATORS == REPLACEABLE
    assert tuple(n for n in REPLACEABLE if OPERATORS[n].part) == kernels.LAYER
    assert {n for n in REPLACEABLE if OPERATORS[n].formula == "rms_norm"} == kernels.NORMS


def test_the_tool_and_the_kernels_name_the_same_families() -> None:
    from rlk_kernels.integrations.families import ARCHITECTURES, DELTA_NETS

    computed = tuple(name for name, f in FAMILIES.items() if "kernels" not in f.refused)
    assert computed == tuple(ARCHITECTURES)
    assert {name for name, f in FAMILIES.items() if f.hybrid} == set(DELTA_NETS)


def test_the_tool_and_the_kernels_refuse_the_same_ropes_for_the_same_reasons() -> None:
    from rlk_kernels.integrations import rotary

    # The tool compares a longrope as far as its original length.
    assert set(FIXED) - NOT_FIXED.keys() == set(rotary.SUPPORTED)
    assert rotary.NOT_FIXED == NOT_FIXED


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_with_kernels_names_its_patch(name: str) -> None:
    from rlk_align.engines.patch import BasePatch

    assert issubclass(load_patch(name), BasePatch)


def test_a_spec_says_which_operators_stay_the_engines_own() -> None:
    spec = EngineSpec.parse("vllm:kernels=rlk,except=logits+act")
    assert spec.options == {"kernels": "rlk", "except": "act+logits"}
    assert EngineSpec.parse("hf").option("kernels") == "off"
    # The canonical spec leaves out the default.
    assert EngineSpec.parse("hf:kernels=off").canonical("bfloat16") == EngineSpec("hf")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf:kernels=on", "choose from off, rlk"),
        ("hf:except=attn", "needs kernels=rlk"),
        ("hf:kernels=off,except=attn", "needs kernels=rlk"),
        ("hf:kernels=rlk,except=attention", "not an operator: attention"),
        ("hf:kernels=rlk,except=attn+", "not an operator"),
        ("hf:kernels=rlk,except=attn,act", "join operators with +: except=attn+act"),
        ("hf:act,kernels=rlk", "known: attn, "),
        ("hf:kernels=rlk,attn=eager", "add except=attn"),
        ("fsdp:kernels=rlk,attn=sdpa", "add except=attn"),
        ("hf:kernels=rlk,experts=eager", "leave experts out"),
        ("megatron:kernels=rlk,spec=te", "leave spec out"),
        ("vllm:kernels=rlk,batch_invariant=1", "leave batch_invariant out"),
    ],
)
def test_an_unsupported_combination_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadOption) as error:
        EngineSpec.parse(text)
    assert says in f"{error.value.message} {error.value.fix}"


@pytest.mark.parametrize(
    ("text", "kernels", "found"),
    [
        ("hf", None, "hf"),
        ("hf", "rlk", "hf:kernels=rlk"),
        ("vllm:dtype=float32", "rlk", "vllm:dtype=float32,kernels=rlk"),
        ("vllm:kernels=off", "rlk", "vllm:kernels=off"),
        ("vllm:kernels=rlk,except=act", "rlk", "vllm:kernels=rlk,except=act"),
    ],
)
def test_the_flag_is_for_engines_that_do_not_say_themselves(
    text: str, kernels: str | None, found: str
) -> None:
    assert side(text, kernels) == EngineSpec.parse(found)


def test_the_flag_has_two_values() -> None:
    with pytest.raises(BadOption, match="--kernels 'on'"):
        side("hf", "on")
    with pytest.raises(BadOption, match="leave batch_invariant out"):
        side("vllm:batch_invariant=1", "rlk")


def test_a_capture_with_kernels_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(text: str) -> str:
        spec = EngineSpec.parse(text)
        request = CaptureRequest(
            engine=spec, model=str(data_path("model")), prompts=data_path("prompts.jsonl")
        )
        return capture_key(request, spec.canonical("bfloat16"), data_path("model"), None)

    texts = ["hf", "hf:kernels=rlk", "hf:kernels=rlk,except=attn", "hf:kernels=rlk,except=act"]
    assert len({key(text) for text in texts}) == 4
    assert key("hf:kernels=off") == key("hf")
    off, on = key("hf"), key("hf:kernels=rlk")
    monkeypatch.setenv("RLK_BACKEND", "torch")
    assert key("hf:kernels=rlk") not in (on, off)


@pytest.mark.parametrize("source", ["rope/operator.py", "hopper/product.cu"])
def test_edited_kernels_make_another_capture(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of captures with the kernels."""
    on, off = EngineSpec.parse("hf:kernels=rlk"), EngineSpec.parse("hf")
    before = adapter_digest(on), adapter_digest(off)
    read = Path.read_bytes

    def edited(path: Path) -> bytes:
        return read(path) + (b"#" if path.as_posix().endswith(source) else b"")

    monkeypatch.setattr(Path, "read_bytes", edited)
    assert adapter_digest(on) != before[0]
    assert adapter_digest(off) == before[1]


def test_on_a_gpu_vllm_is_given_the_backend_that_the_kernels_register() -> None:
    """Not on a CPU, where the kernels replace the only backend, nor with vLLM's own attention."""
    from types import SimpleNamespace

    from rlk_align.engines.vllm.engine import VLLMEngine

    def asked(device: str, kernels: SimpleNamespace | None, latent: int = 0) -> dict[str, str]:
        engine = SimpleNamespace(kernels=kernels, shape=SimpleNamespace(latent=latent))
        return VLLMEngine._attention(engine, device)  # type: ignore[arg-type]

    on, but_attention = (SimpleNamespace(excluded=frozenset(ops)) for ops in ((), ("attn",)))
    assert asked("cuda", on) == {"attention_backend": "CUSTOM"}
    # The kernels replace a latent attention itself.
    assert asked("cuda", on, latent=512) == {}
    assert asked("cuda", None) == asked("cuda", but_attention) == asked("cpu", on) == {}
