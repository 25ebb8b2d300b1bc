"""HF against HF through the command line: what is equal, what is named, and why."""

from pathlib import Path

import pytest
import torch
from command import Cli
from random_model import write_random_model

EDGE = ("--edges", "prefill_vs_train")
SHORT = ("--max-new-tokens", 6)
PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture
def compare(cli: Cli, few_prompts: Path) -> Cli:
    def run(*args: object, **kwargs: object):
        return cli("compare", "--prompts", few_prompts, *SHORT, *args, env=PATCHES, **kwargs)

    return run


def test_an_engine_equals_itself_bit_for_bit(compare: Cli) -> None:
    done = compare(
        "--rollout", "hf:attn=eager", "--train", "hf:attn=eager", *EDGE, "--contract", "bitwise"
    )
    assert done.code == 0, done.out + done.err
    assert done.first is None
    assert done.verdict["edges"]["prefill_vs_train"]["bit_mismatches"] == 0
    assert done.verdict["edges"]["prefill_vs_train"]["ratio_mean"] == 1.0
    assert done.verdict["controls"]["observer"] == "bitwise"
    assert done.verdict["controls"]["noise_floor"] == {"rollout": "bitwise", "train": "bitwise"}
    coverage = done.verdict["coverage"]
    assert coverage["paired"] == coverage["expected"] > 1000
    assert coverage["unpaired"] == []
    assert done.verdict["breaches"] == []


def test_an_engine_that_compiles_nothing_is_started_once_for_production_too(compare: Cli) -> None:
    sides = ("--rollout", "hf:attn=eager", "--train", "hf:attn=eager")
    done = compare(*sides, "--production", "--contract", "bitwise", shared=False)
    assert done.code == 0, done.out + done.err
    assert done.err.count("rollout: loading hf") == 1
    production = done.verdict["controls"]["production"]
    assert list(production) == ["decode", "prefill"]
    for found in production.values():
        assert found["metrics"]["tokens"] == found["expected"] == done.verdict["tokens"]
        assert found["metrics"]["bit_mismatches"] == found["cuda_graph_replays"] == 0
    assert done.out.count("without CUDA graphs") == 2


def test_eager_against_sdpa_names_the_attention_core(compare: Cli) -> None:
    args = ("--rollout", "hf:attn=eager", "--train", "hf:attn=sdpa", *EDGE)
    done = compare(*args)
    assert done.first == "layers.0.attn", done.out
    assert done.verdict["divergence"]["first_bitwise"]["last_equal"] == "layers.0.k_rope"
    assert done.code == 0, done.out
    strict = compare(*args, "--contract", "bitwise")
    assert strict.code == 1
    assert {b["limit"] for b in strict.verdict["breaches"]} >= {"operator-bits"}


def test_one_changed_weight_is_named(compare: Cli, model_copy) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"][3, 5] += 1.0

    other = model_copy(weights=change)
    args = ("--rollout", "hf:attn=eager", "--train", f"hf:attn=eager,model={other}", *EDGE)
    stopped = compare(*args)
    assert stopped.code == 4
    assert stopped.verdict["precheck"]["weights"] == "mismatch"
    assert [m["name"] for m in stopped.verdict["precheck"]["mismatches"]] == ["layers.2.down_proj"]
    assert stopped.verdict["edges"] == {}
    assert stopped.verdict["divergence"] is None
    assert "layers.2.down_proj" in stopped.out
    measured = compare(*args, "--allow-mismatch", "weights")
    assert measured.first == "layers.2.down_proj"
    assert measured.verdict["precheck"]["weights"] == "mismatch allowed"
    # Each side is held against its own checkpoint, and both are what they say.
    assert measured.verdict["divergence"]["first_over_budget"]["side"] == "neither"
    assert not [n for n in measured.verdict["notes"] if "float64" in n]


@pytest.mark.parametrize(
    ("config", "attribute", "operator"),
    [
        (
            {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}},
            "rope_theta",
            "layers.0.q_rope",
        ),
        ({"rms_norm_eps": 1e-3}, "norm_eps", "layers.0.attn_norm"),
    ],
    ids=["rope", "eps"],
)
def test_another_config_is_named_by_attribute_and_by_operator(
    compare: Cli, model_copy, config: dict, attribute: str, operator: str
) -> None:
    other = model_copy(config=config)
    args = ("--rollout", "hf:attn=eager", "--train", f"hf:attn=eager,model={other}", *EDGE)
    stopped = compare(*args)
    assert stopped.code == 4
    assert stopped.verdict["precheck"]["mismatches"][0]["name"] == attribute
    measured = compare(*args, "--allow-mismatch", "attributes")
    assert measured.first == operator
    assert measured.code == 1, "a wrong config is far beyond the contract"


def test_a_trainer_in_training_mode_is_named(compare: Cli) -> None:
    sides = ("--rollout", "hf", "--train", "hf:patch=patches:training_mode")
    done = compare(*sides, *EDGE)
    assert done.code == 4, done.out
    (mismatch,) = done.verdict["precheck"]["mismatches"]
    where = "0.05 in model.layers.0.self_attn and 3 more modules"
    assert (mismatch["name"], mismatch["rollout"], mismatch["train"]) == ("dropout", "none", where)
    assert "call model.eval()" in done.out
    # Measured across it, the noise is what is said; no row is blamed for another sequence.
    done = compare(*sides, *EDGE, "--allow-mismatch", "attributes")
    assert done.code == 4
    assert "train does not repeat itself" in done.out
    assert "boundar" not in done.out


def small_llama(folder: Path) -> Path:
    """Hidden size 64, heads of 8."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    norms = {"rms_norm_eps": 1e-5, "initializer_range": 0.04}
    return write_random_model(folder, model_type="llama", dtype="float32", **sizes, **norms)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("patch", "operator"),
    [("epsilon_outside_of_the_root", "layers.0.attn_norm"), ("head_of_an_earlier_step", "logits")],
)
def test_faults_that_users_plant_in_a_small_model_are_named(
    compare: Cli, tmp_path: Path, patch: str, operator: str, dtype: str
) -> None:
    sides = ("--rollout", f"hf:dtype={dtype}", "--train", f"hf:dtype={dtype},patch=patches:{patch}")
    done = compare("--model", small_llama(tmp_path / "small"), *sides, *EDGE)
    assert done.code == 1, done.out
    over = done.verdict["divergence"]["first_over_budget"]
    assert (over["site"], over["side"]) == (operator, "train")
    # Not the file of the class, in which nothing is wrong.
    assert over["code"]["train"]["file"].endswith("tests/cli/patches.py")
    assert over["code"]["rollout"]["file"].startswith(("transformers/", "torch/"))


def test_a_token_that_is_never_sampled_is_named(compare: Cli) -> None:
    sides = ("--rollout", "hf", "--train", "hf:patch=patches:vocabulary_shard_off_by_one")
    done = compare(*sides, *EDGE)
    assert done.code == 1, done.out
    edge = done.verdict["edges"]["prefill_vs_train"]
    half = 512
    assert edge["max_abs_dlogp"] < 0.01 < edge["distribution"]["max_abs_dlogp"]
    assert edge["distribution"]["positions"] == edge["tokens"]
    assert edge["distribution"]["worst_token_id"] == edge["distribution"]["largest"][2] == half
    assert "token-excess" in {b["limit"] for b in done.verdict["breaches"]}
    assert f"in the mean token {half} differs most" in " ".join(done.out.split())


def test_positions_that_are_off_by_one_everywhere_name_their_side(
    compare: Cli, tmp_path: Path
) -> None:
    """With heads as small as they are made: the side, and that the attention's output is the
    same."""
    small = small_llama(tmp_path / "small")
    args = ("--model", small, "--rollout", "hf", "--train", "hf:patch=patches:positions_off_by_one")
    stopped = compare(*args, *EDGE)
    assert stopped.code == 4
    (mismatch,) = stopped.verdict["precheck"]["mismatches"]
    assert (mismatch["name"], mismatch["rollout"], mismatch["train"]) == ("position", 0, 1)
    assert "so its output cannot change" in stopped.out
    done = compare(*args, *EDGE, "--allow-mismatch", "attributes")
    over = done.verdict["divergence"]["over_budget"]
    rotations = {f"layers.{i}.{op}" for i in range(2) for op in ("q_rope", "k_rope")}
    named = {o["site"]: o["side"] for o in over if o["site"] in rotations}
    assert named == dict.fromkeys(rotations, "train")
    how = done.verdict["divergence"]["first_over_budget"]["how"]["train"]
    assert how.startswith("turned by positions that are all shifted by +1; attention reads")


def test_a_setting_that_is_not_the_configs_is_shown_beside_it(compare: Cli) -> None:
    """In words, in JSON, and as the thing to do."""
    sides = ("--rollout", "hf", "--train", "hf:patch=patches:larger_epsilon")
    done = compare(*sides, *EDGE, "--allow-mismatch", "attributes")
    over = done.verdict["divergence"]["first_over_budget"]
    assert (done.code, over["site"], over["side"]) == (1, "layers.0.attn_norm", "train")
    setting = {"name": "norm_eps", "live": 0.01, "configured": 0.0001, "differs": True}
    assert over["settings"] == {"train": [setting]}
    assert over["how"]["train"].startswith("norm_eps 0.01 live, 0.0001 in config.json; scaled by")
    assert "train prefill: norm_eps 0.01 live, 0.0001 in config.json" in done.out
    assert "norm_eps 0.0001 as in config.json" in done.out, "the other side's"
    assert "next     give the train side norm_eps 0.0001 at layers.0.attn_norm" in done.out


def test_a_bos_on_one_side_is_shown(compare: Cli, model_copy) -> None:
    import json

    other = model_copy()
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    done = compare("--rollout", "hf", "--train", f"hf:model={other}", *EDGE)
    assert done.code == 4
    assert done.verdict["precheck"]["tokens"] == "mismatch"
    first = done.verdict["precheck"]["mismatches"][0]
    assert (first["kind"], first["sample"], first["position"]) == ("tokens", 0, 0)
    assert (first["rollout"], first["train"]) == ([], [0])


def test_another_activation_in_one_layer_is_named(compare: Cli) -> None:
    patched = "hf:attn=eager,patch=patches:tanh_gelu_in_layer_1"
    args = ("--rollout", "hf:attn=eager", "--train", patched, *EDGE)
    stopped = compare(*args)
    assert stopped.code == 4
    mismatch = stopped.verdict["precheck"]["mismatches"][0]
    assert (mismatch["name"], mismatch["rollout"], mismatch["train"]) == (
        "layers.1.activation",
        "silu",
        "gelu_tanh",
    )
    measured = compare(*args, "--allow-mismatch", "attributes")
    assert measured.first == "layers.1.act"


def test_swapped_heads_are_a_weight_mismatch(compare: Cli) -> None:
    patched = "hf:patch=patches:swap_two_heads"
    done = compare("--rollout", "hf", "--train", patched, *EDGE)
    assert done.code == 4
    assert [m["name"] for m in done.verdict["precheck"]["mismatches"]] == ["layers.1.q_proj"]
    # Across it, what no checkpoint has is held against none.
    args = ("--train", patched, *EDGE, "--allow-mismatch", "weights")
    measured = compare("--rollout", "hf", *args)
    assert measured.first == "layers.1.q_proj"
    assert measured.verdict["divergence"]["first_over_budget"]["side"] is None
    (note,) = [n for n in measured.verdict["notes"] if "float64" in n]
    assert "the layers.1.q_proj in its engine differs from the checkpoint's" in note


def test_nan_fails_and_is_located(compare: Cli) -> None:
    done = compare("--rollout", "hf", "--train", "hf:patch=patches:nan_in_layer_2", *EDGE)
    assert done.code == 1, done.out
    nan = [b for b in done.verdict["breaches"] if b["metric"] == "nonfinite"]
    assert nan[0]["site"] == "layers.2.o_proj"
    assert done.verdict["edges"]["prefill_vs_train"]["max_abs_dlogp"] is None


def test_a_noisy_engine_is_reported_and_its_rows_prove_nothing(compare: Cli) -> None:
    done = compare(
        "--rollout", "hf", "--train", "hf:patch=patches:noisy", *EDGE, "--contract", "bitwise"
    )
    assert done.code == 4, done.out
    assert done.verdict["controls"]["noise_floor"]["train"]["first_site"] == "layers.1.up_proj"
    assert done.verdict["controls"]["noise_floor"]["rollout"] == "bitwise"
    assert done.first != "layers.1.up_proj"


@pytest.mark.whole_matrix
def test_ten_noisy_runs_have_one_verdict(cli: Cli, few_prompts: Path, tmp_path: Path) -> None:
    args = ("--prompts", few_prompts, *SHORT)
    assert cli("capture", "--engine", "hf", "-o", tmp_path / "a", *args).code == 0
    source = ("--rollout", f"replay:path={tmp_path / 'a'}")
    for i in range(10):
        done = cli(
            *("compare", *source, "--train", "hf:patch=patches:loud_noise", *args, *EDGE),
            *("--run-dir", tmp_path / str(i)),
            env=PATCHES,
            shared=False,
        )
        assert done.code == 4, done.out
        [doubt] = done.verdict["doubts"]
        assert "train does not repeat itself" in doubt
        assert "first at layers.0.up_proj" in doubt
        assert done.verdict["controls"]["observer"] != "violated"


def test_a_replay_is_held_against_its_own_model(
    cli: Cli, few_prompts: Path, model_copy, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"].mul_(1.5)

    scaled = model_copy(weights=change)
    rollout, train = tmp_path / "rollout", tmp_path / "train"
    prompts = ("--prompts", few_prompts, *SHORT)
    assert cli("capture", "--engine", "hf", "--model", scaled, *prompts, "-o", rollout).code == 0
    args = (*EDGE, "--contract", "bitwise")
    replayed = cli("compare", "--rollout", f"replay:path={rollout}", "--train", "hf", *args)
    assert replayed.code == 0, replayed.out + replayed.err
    assert replayed.verdict["model"] == str(scaled)
    assert cli("capture", "--engine", "hf", "--tokens", rollout, "-o", train).code == 0
    both = cli("compare", rollout, train, *args)
    assert both.code == 0, both.out + both.err


@pytest.mark.parametrize("patch", ["decode_only_slightly", "decode_only"])
def test_a_fault_of_decode_alone_is_named_on_its_edge(compare: Cli, patch: str) -> None:
    done = compare("--rollout", f"hf:patch=patches:{patch}", "--train", "hf")
    assert done.code == 1, done.out
    divergence = done.verdict["divergence"]
    assert divergence["edge"] == "decode_vs_prefill"
    (over,) = divergence["over_budget"]
    assert (over["site"], over["side"]) == ("layers.1.o_proj", "rollout")
    assert divergence["first_over_budget"] == over
    assert done.verdict["divergences"]["prefill_vs_train"]["first_bitwise"] is None
    assert done.verdict["divergences"]["prefill_vs_train"]["over_budget"] == []
    assert "decode differs from prefill in the rollout engine itself" in done.out
    assert "layers.1.o_proj  the rollout side is off" in done.out
    assert "rollout decode: " in done.out
    assert "compare layers.1.o_proj in the rollout engine's decode and in its prefill" in done.out


def test_decode_against_prefill_alone(compare: Cli) -> None:
    only = ("--edges", "decode_vs_prefill")
    healthy = compare("--rollout", "hf", "--train", "hf", *only)
    assert healthy.code == 0, healthy.out + healthy.err
    assert list(healthy.verdict["edges"]) == ["decode_vs_prefill"]
    faulty = compare("--rollout", "hf:patch=patches:decode_only", "--train", "hf", *only)
    assert faulty.verdict["divergence"]["first_over_budget"]["site"] == "layers.1.o_proj"


def test_a_violated_observer_is_inconclusive(compare: Cli) -> None:
    done = compare("--rollout", "hf", "--train", "hf:patch=patches:observed_differs", *EDGE)
    assert done.code == 4
    assert done.verdict["controls"]["observer"] == "violated"
    assert "observer" in done.out


def test_all_edges_and_a_rerun_that_resumes(compare: Cli, tmp_path: Path) -> None:
    args = ("--rollout", "hf", "--train", "hf", "--layers", "0-0", "--run-dir", tmp_path / "run")
    done = compare(*args, shared=False)
    assert set(done.verdict["edges"]) == {
        "decode_vs_prefill",
        "prefill_vs_train",
        "decode_vs_train",
    }
    again = compare(*args, shared=False)
    assert "loading" not in again.err, "everything was captured already"
    assert again.verdict == done.verdict
    fresh = compare(*args, "--fresh", shared=False)
    assert "loading" in fresh.err
    assert fresh.verdict == done.verdict


def test_a_side_in_another_dtype_is_compared_by_value(compare: Cli) -> None:
    done = compare("--rollout", "hf:attn=eager", "--train", "hf:attn=eager,dtype=fp32", *EDGE)
    assert done.verdict["precheck"]["weights"] == "equal", "the same checkpoint, widened"
    assert done.verdict["contract"]["id"] == "bf16"
    assert done.first == "layers.0.attn_norm", "the embedding has the same values in both"


def test_a_side_that_rounds_the_weights_of_the_other_is_compared(compare: Cli, model_copy) -> None:
    """One checkpoint in float32; then one whose values differ in one entry."""

    def master(tensors: dict[str, torch.Tensor]) -> None:
        drawn = torch.Generator().manual_seed(0)
        for name, value in tensors.items():
            noise = torch.rand(value.shape, generator=drawn) - 0.5
            tensors[name] = value.float() * (1 + 2.0**-9 * noise)

    def moved(tensors: dict[str, torch.Tensor]) -> None:
        master(tensors)
        tensors["model.layers.2.mlp.down_proj.weight"][3, 5] += 0.1

    held = {
        name: model_copy(name, weights=change) for name, change in (("a", master), ("b", moved))
    }
    sides = ("--rollout", f"hf:dtype=bfloat16,model={held['a']}", "--train")
    done = compare(*sides, f"hf:dtype=float32,model={held['a']}", *EDGE)
    assert done.code == 0, done.out
    assert done.verdict["precheck"]["weights"] == "cast to bfloat16 on the rollout side"
    assert "weights cast to bfloat16 on the rollout side" in done.out
    assert done.first == "embed"
    assert "legitimate: weights are cast to bfloat16 on the rollout side" in done.out
    stopped = compare(*sides, f"hf:dtype=float32,model={held['b']}", *EDGE)
    assert stopped.code == 4
    (mismatch,) = stopped.verdict["precheck"]["mismatches"]
    assert (mismatch["name"], mismatch["detail"]) == ("layers.2.down_proj", "columns 5 differ")


@pytest.mark.parametrize(("rollout", "train"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_each_side_is_held_to_its_own_dtype(compare: Cli, rollout: str, train: str) -> None:
    """The more exact side is not blamed for what the other's dtype makes of it."""
    sides = ("--rollout", f"hf:dtype={rollout}", "--train", f"hf:dtype={train}")
    done = compare(*sides, *EDGE, "--max-new-tokens", 16)
    assert done.code == 0, done.out
    assert done.verdict["divergence"]["first_over_budget"] is None


def test_an_adapter_that_is_merged_on_one_side_blames_neither(compare: Cli) -> None:
    sides = ("--rollout", "hf:patch=patches:adapter_added")
    sides += ("--train", "hf:patch=patches:adapter_merged", "--allow-mismatch", "weights")
    done = compare(*sides, *EDGE)
    over = done.verdict["divergence"]["first_over_budget"]
    assert (done.code, over["site"], over["side"]) == (1, "layers.0.q_proj", None)
    assert "it is unknown which side is off" in done.out
    assert "train was not checked here: the layers.0.q_proj in its engine differs" in done.out


@pytest.mark.parametrize(
    ("patch", "code"), [("logits_padded_with_infinities", 0), ("logits_padded_with_zeros", 1)]
)
def test_a_padded_vocabulary_is_named_and_compared_over_its_tokens(
    compare: Cli, patch: str, code: int
) -> None:
    done = compare("--rollout", "hf", "--train", f"hf:patch=patches:{patch}", *EDGE)
    (mismatch,) = done.verdict["precheck"]["mismatches"]
    named = ("logits_columns", 1024, 1088)
    assert (mismatch["name"], mismatch["rollout"], mismatch["train"]) == named
    assert done.verdict["precheck"]["attributes"] == "equal"
    assert done.code == code, done.out
    over = done.verdict["divergence"]["first_over_budget"]
    assert (over and (over["site"], over["side"])) == (("logprob", "train") if code else None)


def test_sampling_beyond_the_vocabulary_says_so(compare: Cli) -> None:
    done = compare("--rollout", "hf:patch=patches:logits_padded_with_zeros", "--train", "hf")
    assert done.code == 3
    assert "the logits have 1,088 columns, and the vocabulary has 1,024 tokens" in done.err
