"""The Megatron engine against HF: every family, one rank and two, padded and packed.

All cases of one number of ranks run in one set of processes, because importing megatron-core
takes longer than scoring with it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_run
import numpy as np
import pytest
import torch
from command import require_engine, said_by
from megatron_run import Sites, observe, token_batch
from safetensors.torch import load_file, save_file

from rlk_align.data import data_path
from rlk_align.engines.common.weights import unfused
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.spec import EngineSpec
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites

HERE = Path(__file__).parent
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEEP_YARN = YARN | {
    "factor": 2.5,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "truncate": False,
}
SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": None},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 4},
    "mqa": {"model_type": "qwen3", "num_key_value_heads": 1},
    "linear": {"model_type": "mistral", "sliding_window": None, "rope_parameters": LINEAR},
    "yarn": {"model_type": "llama", "rope_parameters": YARN},
    "deep_yarn": {"model_type": "qwen3", "rope_parameters": DEEP_YARN},
    "biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "attention_biased": {"model_type": "qwen3", "attention_bias": True},
    "mlp_biased": {"model_type": "llama", "mlp_bias": True, "rope_parameters": YARN},
    "dynamic": {"model_type": "llama", "rope_parameters": LINEAR | {"rope_type": "dynamic"}},
    "three_heads": {"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 3},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("linear", "yarn", "deep_yarn")
BIASES = ("biased", "attention_biased", "mlp_biased")
MOVED = ("embedded", "mistral", "linear", "yarn", "biased")
"""Models that are also packed, and padded on the left."""


@dataclass
class Case:
    """One opening of the engine."""

    model: str
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)


FP32 = {"dtype": "float32"}
PACKED, LEFT = FP32 | {"input": "packed"}, FP32 | {"padding": "left"}


def patched(name: str, **options: Any) -> dict[str, Any]:
    return FP32 | {"patch": f"megatron_patches:{name}"} | options


CASES: dict[str, Case] = {
    **{
        f"{m}.{n}": Case(m, n, FP32)
        for m in ("embedded", *FAMILIES, *ROPES, *BIASES)
        for n in (1, 2)
    },
    **{f"{m}.{n}.packed": Case(m, n, PACKED) for m in MOVED for n in (1, 2)},
    **{f"{m}.{n}.left": Case(m, n, LEFT) for m in MOVED for n in (1, 2)},
    "mqa.2": Case("mqa", 2, FP32),
    "embedded.1.alone": Case("embedded", 1, FP32 | {"batch": 1}),
    "embedded.1.two": Case("embedded", 1, FP32 | {"batch": 2}),
    "embedded.1.hot": Case("embedded", 1, FP32 | {"temperature": 0.7}),
    "embedded.1.bf16": Case("embedded"),
    "embedded.2.bf16": Case("embedded", 2),
    "embedded.1.fp16": Case("embedded", 1, {"dtype": "float16"}),
    "embedded.2.sp": Case("embedded", 2, FP32 | {"sp": True}),
    "embedded.2.sp.bf16": Case("embedded", 2, {"sp": True}),
    "embedded.2.sp.packed": Case("embedded", 2, PACKED | {"sp": True}),
    "llama.2.sp": Case("llama", 2, FP32 | {"sp": True}),
    "biased.2.sp": Case("biased", 2, FP32 | {"sp": True}),
    "yarn.2.sp": Case("yarn", 2, FP32 | {"sp": True}),
    "off_by_one": Case("embedded", 1, patched("positions_off_by_one")),
    "padding_counted": Case("embedded", 1, patched("ignore_padding", padding="left")),
    "boundary": Case("embedded", 1, patched("wrong_boundary", input="packed")),
    "gelu": Case("embedded", 1, patched("tanh_gelu_in_layer_1")),
    "no_bias": Case("biased", 2, patched("zero_bias_on_rank_1")),
    "lost_bias": Case("biased", 2, patched("lose_bias_on_rank_1")),
    "other_factor": Case("linear", 1, patched("another_factor")),
    "other_yarn": Case("yarn", 1, patched("another_yarn_factor", input="packed")),
    "other_concentration": Case("yarn", 1, patched("no_attention_factor")),
    "dynamic": Case("dynamic"),
    "three_heads": Case("three_heads", 2),
    "incomplete": Case("incomplete"),
    "misshapen": Case("misshapen"),
    "no_weights": Case("no_weights"),
    "te": Case("embedded", 1, {"spec": "te"}),
}

REFUSED = {
    "dynamic": ("ModelError", "rope_type=dynamic"),
    "three_heads": ("BadOption", "tp=2", "3 heads", "tp=1"),
    "incomplete": ("ModelError", "model.layers.1.mlp.up_proj.weight"),
    "misshapen": ("ModelError", "up_proj.weight", "[55, 48]", "[56, 48]"),
    "no_weights": ("ModelError", "model.safetensors"),
    "te": ("MissingDependency", "transformer_engine", "spec=local"),
}
"""Case -> words in its error."""
WHOLE = [
    name
    for name, case in CASES.items()
    if name not in REFUSED and not {"patch", "temperature"} & case.options.keys()
]


def sequences(vocab: int) -> list[tuple[list[int], list[int]]]:
    """Random ids in sequences of awkward lengths, one without a response."""
    draw = np.random.default_rng(0)
    lengths = [(5, 4), (1, 3), (17, 9), (2, 1), (3, 0), (8, 5)]
    return [tuple(draw.integers(0, vocab, n).tolist() for n in pair) for pair in lengths]


def text() -> list[tuple[list[int], list[int]]]:
    """Sentences of the embedded prompts, cut into prompt and response; one has no response."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data_path("model"), local_files_only=True)
    lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [tokenizer(json.loads(line)["prompt"])["input_ids"][:40] for line in lines[3:8]]
    return [*((i[: len(i) // 2], i[len(i) // 2 :]) for i in ids), (ids[0][:5], [])]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with random weights that are large enough to have an effect, and with norms and
    biases that differ from their initial values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models")
    found = {"embedded": data_path("model")}
    torch.manual_seed(0)
    for name, changes in MODELS.items():
        settings = {k: v for k, v in (SMALL | changes).items() if v is not None}
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.uniform_(0.5, 1.5)
                elif key.endswith("bias"):
                    parameter.normal_(std=0.3)
        # One model is saved in several files.
        model.save_pretrained(folder / name, max_shard_size="40KB" if name == "qwen3" else "1GB")
        found[name] = folder / name

    assert len(list(found["qwen3"].glob("*.safetensors"))) > 2

    def damaged(name: str, change: Callable[[dict[str, Any]], None]) -> None:
        found[name] = folder / name
        found[name].mkdir()
        (found[name] / "config.json").write_bytes((found["llama"] / "config.json").read_bytes())
        tensors = load_file(found["llama"] / "model.safetensors")
        change(tensors)
        if tensors:
            save_file(tensors, found[name] / "model.safetensors")

    lost = "model.layers.1.mlp.up_proj.weight"
    damaged("incomplete", lambda t: t.pop(lost))
    damaged("misshapen", lambda t: t.update({lost: t[lost][:-1]}))
    damaged("no_weights", lambda t: t.clear())
    return found


@pytest.fixture(scope="session")
def runs(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The observations of each case."""
    require_engine("megatron")
    folder = tmp_path_factory.mktemp("runs")
    for ranks in (1, 2):
        cases = [
            {
                "name": name,
                "model": str(models[case.model]),
                "options": case.options | {"tp": ranks},
                "batch": _batch(models, case.model),
            }
            for name, case in CASES.items()
            if case.ranks == ranks
        ]
        path = folder / f"cases{ranks}.json"
        path.write_text(json.dumps(cases))
        process = [megatron_run.__file__, str(path), str(folder)]
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        words = [*(torchrun if ranks > 1 else []), *process]
        said_by("megatron", words, {"PYTHONPATH": str(HERE)})
    return {n: torch.load(folder / f"{n}.pt", weights_only=False) for n in CASES}


@pytest.fixture(scope="session")
def hf(models: dict[str, Path]) -> Callable[..., dict[str, Any]]:
    """The observations of HF with eager attention."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def run(name: str, dtype: str = "float32") -> dict[str, Any]:
        if (name, dtype) not in known:
            folder = models[name]
            spec = EngineSpec("hf", {"dtype": dtype, "attn": "eager", "device": "cpu"})
            engine = HFEngine(spec, folder, read_shape(folder))
            engine.open()
            known[name, dtype] = {
                "weights": dict(unfused(engine.model, engine.places())),
                "attributes": engine.attributes(),
                **observe(engine, token_batch(_batch(models, name))),
            }
        return known[name, dtype]

    return run


def _batch(models: dict[str, Path], name: str) -> list[tuple[list[int], list[int]]]:
    return text() if name == "embedded" else sequences(read_shape(models[name]).vocab)


def same_rows(a: Sites, b: Sites) -> None:
    """Asserts that both have the same sites, with the same rows in the same order."""
    assert a.keys() == b.keys()
    for site in a:
        assert np.array_equal(a[site][0], b[site][0]), site
        assert np.array_equal(a[site][1], b[site][1]), site
        assert a[site][2].shape == b[site][2].shape, site
        assert a[site][2].dtype == b[site][2].dtype, site


def worst(a: Sites, b: Sites) -> float:
    """The largest relative L2 difference of a site."""
    same_rows(a, b)
    pairs = [(a[site][2].double(), b[site][2].double()) for site in a]
    return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


def unequal(a: Sites, b: Sites, model: Path) -> list[str]:
    """The sites whose bits differ, in execution order."""
    same_rows(a, b)
    order = [s.name for s in model_sites(read_shape(model)) if s.name in a]
    assert len(order) == len(a)
    return [site for site in order if not torch.equal(a[site][2], b[site][2])]


def largest(a: dict[int, np.ndarray], b: dict[int, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    assert a
    assert all(a[i].shape == b[i].shape for i in a)
    return max(float(np.abs(a[i].astype(np.float64) - b[i]).max(initial=0.0)) for i in a)


@pytest.mark.parametrize("name", WHOLE)
def test_shows_every_site_and_every_weight(
    name: str, runs: dict, hf: Callable, models: dict[str, Path]
) -> None:
    case, run = CASES[name], runs[name]
    dtype = case.options.get("dtype", "bfloat16")
    assert run["dtype"] == dtype
    expected = {s.name for s in model_sites(read_shape(models[case.model]))}
    assert {*run["sites"], "logprob"} == expected
    same_rows(run["sites"], hf(case.model, dtype)["sites"])
    assert largest(run["tapped"], run["logprobs"]) == 0.0, "taps change nothing"
    weights = hf(case.model, dtype)["weights"]
    assert run["weights"].keys() == weights.keys()
    for parameter, (value, _, replicas) in run["weights"].items():
        assert torch.equal(value, weights[parameter]), parameter
        assert len(replicas) in (0, case.ranks - 1)
        assert all(torch.equal(value, r) for r in replicas), parameter


@pytest.mark.parametrize("name", [n for n in WHOLE if CASES[n].options.get("dtype") == "float32"])
def test_equals_hf(name: str, runs: dict, hf: Callable) -> None:
    run, other = runs[name], hf(CASES[name].model)
    assert worst(run["sites"], other["sites"]) <= 2e-6
    assert largest(run["logprobs"], other["logprobs"]) <= 1e-5


@pytest.mark.parametrize("name", [n for n in WHOLE if CASES[n].options.get("dtype") != "float32"])
def test_low_precision_is_no_further_from_the_truth_than_hf(
    name: str, runs: dict, hf: Callable
) -> None:
    run, truth = runs[name], hf("embedded")
    other = hf("embedded", CASES[name].options.get("dtype", "bfloat16"))

    def errors(of: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        pairs = [(of["sites"][s][2].double(), truth["sites"][s][2].double()) for s in of["sites"]]
        sites = [((x - y).norm() / y.norm()).item() for x, y in pairs]
        logprobs = [np.abs(of["logprobs"][i] - truth["logprobs"][i]) for i in of["logprobs"]]
        return np.array(sites), np.concatenate(logprobs)

    (ours, our_logprobs), (theirs, their_logprobs) = errors(run), errors(other)
    order = [list(other["sites"]).index(site) for site in run["sites"]]
    assert (ours <= 1.5 * theirs[order] + 1e-4).all(), ours / theirs[order]
    assert our_logprobs.mean() <= 1.5 * their_logprobs.mean()


@pytest.mark.parametrize("name", ["embedded.1.bf16", "embedded.2.bf16", "embedded.2.sp.bf16"])
def test_elementwise_operators_have_the_bits_of_hf(
    name: str, runs: dict, models: dict[str, Path]
) -> None:
    """With the same inputs, only norms, attention and sums over ranks have other bits."""
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    shape = read_shape(models["embedded"])
    rotary = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(models["embedded"]))
    sites = {site: rows for site, (_, _, rows) in runs[name]["sites"].items()}
    position = torch.from_numpy(runs[name]["sites"]["embed"][1])[None]
    cos, sin = rotary(sites["embed"][None], position)

    def heads(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(rows), -1, shape.head_dim).transpose(0, 1)[None]

    stream = sites["embed"]
    for i in range(shape.layers):
        at = {op: sites[f"layers.{i}.{op}"] for op in _ops(sites)}
        rotated = apply_rotary_pos_emb(heads(at["q_norm"]), heads(at["k_norm"]), cos, sin)
        for op, value in zip(("q_rope", "k_rope"), rotated, strict=True):
            assert torch.equal(value[0].transpose(0, 1).flatten(1), at[op]), (i, op)
        assert torch.equal(stream + at["o_proj"], at["attn_residual"])
        silu = torch.nn.functional.silu(at["gate_proj"])
        assert torch.equal(silu * at["up_proj"], at["act"])
        assert torch.equal(at["attn_residual"] + at["down_proj"], at["mlp_residual"])
        stream = at["mlp_residual"]


def _ops(sites: dict[str, torch.Tensor]) -> list[str]:
    return [s.removeprefix("layers.0.") for s in sites if s.startswith("layers.0.")]


@pytest.mark.parametrize("model", ["embedded", *FAMILIES, *ROPES, *BIASES])
@pytest.mark.parametrize("ranks", [1, 2])
def test_attributes_are_those_of_hf(model: str, ranks: int, runs: dict, hf: Callable) -> None:
    expected = hf(model)["attributes"] | {"padding_side": "right"}
    found = runs[f"{model}.{ranks}"]["attributes"]
    if model == "mistral":
        # HF's Mistral attention has no attribute for the window of its mask.
        assert found.pop("sliding_window") == 6
        expected.pop("sliding_window")
    assert found == expected


@pytest.mark.parametrize("model", MOVED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_left_padding_changes_no_bit(
    model: str, ranks: int, runs: dict, models: dict[str, Path]
) -> None:
    right, left = runs[f"{model}.{ranks}"], runs[f"{model}.{ranks}.left"]
    assert unequal(right["sites"], left["sites"], models[model]) == []
    assert left["attributes"]["padding_side"] == "left"


@pytest.mark.parametrize("model", MOVED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_differs_by_the_order_of_sums_only(
    model: str, ranks: int, runs: dict, models: dict[str, Path]
) -> None:
    """The core sums over as many keys as the sequence has, not over the padded length."""
    padded, packed = runs[f"{model}.{ranks}"], runs[f"{model}.{ranks}.packed"]
    assert unequal(packed["sites"], padded["sites"], models[model])[:1] in ([], ["layers.0.attn"])
    assert worst(packed["sites"], padded["sites"]) <= 2e-6
    assert packed["attributes"]["padding_side"] is None


@pytest.mark.parametrize(
    ("sp", "tp"),
    [
        ("embedded.2.sp", "embedded.2"),
        ("embedded.2.sp.bf16", "embedded.2.bf16"),
        ("embedded.2.sp.packed", "embedded.2.packed"),
        ("llama.2.sp", "llama.2"),
        ("biased.2.sp", "biased.2"),
        ("yarn.2.sp", "yarn.2"),
    ],
)
def test_sequence_parallelism_changes_no_bit(
    sp: str, tp: str, runs: dict, models: dict[str, Path]
) -> None:
    model = models[CASES[sp].model]
    assert unequal(runs[sp]["sites"], runs[tp]["sites"], model) == []
    assert largest(runs[sp]["logprobs"], runs[tp]["logprobs"]) == 0.0


def test_two_ranks_part_from_one_at_a_sum_over_ranks(runs: dict, models: dict[str, Path]) -> None:
    one, two = runs["embedded.1.bf16"], runs["embedded.2.bf16"]
    first = unequal(one["sites"], two["sites"], models["embedded"])[0]
    assert first == "layers.0.o_proj", "row-parallel: partial sums are rounded, then added"


def test_batches_of_any_size_give_the_same_rows(runs: dict) -> None:
    for other in ("embedded.1.alone", "embedded.1.two"):
        assert worst(runs[other]["sites"], runs["embedded.1"]["sites"]) <= 2e-6
    assert runs["embedded.1.alone"]["attributes"]["padding_side"] is None


def test_log_probs_are_of_the_declared_temperature(runs: dict) -> None:
    run = runs["embedded.1.hot"]
    assert run["attributes"]["temperature"] == 0.7
    assert run["attributes"]["logprobs"] == "processed"
    assert runs["embedded.1"]["attributes"]["logprobs"] == "raw"
    logits = run["sites"]["logits"][2].double() / 0.7
    target = torch.tensor([i for _, response in text() for i in response])
    truth = torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0].numpy()
    assert np.abs(np.concatenate(list(run["logprobs"].values())) - truth).max() <= 1e-5
    assert largest(run["logprobs"], runs["embedded.1"]["logprobs"]) > 0.1


def changed(runs: dict, fault: str, healthy: str) -> list[str]:
    a, b = runs[fault]["weights"], runs[healthy]["weights"]
    assert a.keys() == b.keys()
    return [
        n
        for n in a
        if not torch.equal(a[n][0], b[n][0])
        or not all(torch.equal(x, y) for x, y in zip(a[n][2], b[n][2], strict=True))
    ]


def test_a_bias_dropped_on_one_rank_is_seen_there(runs: dict) -> None:
    assert changed(runs, "no_bias", "biased.2") == ["layers.1.o_proj.bias"]
    value, _, replicas = runs["no_bias"]["weights"]["layers.1.o_proj.bias"]
    assert value.any()
    assert not replicas[0].any()
    healthy, lost = runs["biased.2"]["weights"].keys(), runs["lost_bias"]["weights"].keys()
    assert healthy - lost == {"layers.1.gate_proj.bias", "layers.1.up_proj.bias"}


@pytest.mark.parametrize(
    ("fault", "healthy"),
    [
        ("other_factor", "linear.1"),
        ("other_yarn", "yarn.1.packed"),
        ("other_concentration", "yarn.1"),
    ],
)
def test_another_scale_of_the_rope_is_an_attribute_and_a_number(
    fault: str, healthy: str, runs: dict, models: dict[str, Path]
) -> None:
    model = models[CASES[healthy].model]
    assert math.isnan(runs[fault]["attributes"]["rope_theta"])
    assert runs[healthy]["attributes"]["rope_theta"] == 10000.0
    assert unequal(runs[fault]["sites"], runs[healthy]["sites"], model)[0] == "layers.0.q_rope"
    assert largest(runs[fault]["logprobs"], runs[healthy]["logprobs"]) > 1e-3


@pytest.mark.parametrize(
    ("fault", "healthy", "first"),
    [
        ("off_by_one", "embedded.1", "layers.0.q_rope"),
        ("padding_counted", "embedded.1.left", "layers.0.q_rope"),
        ("boundary", "embedded.1.packed", "layers.0.attn"),
        ("gelu", "embedded.1", "layers.1.act"),
    ],
)
def test_a_fault_begins_at_its_operator(
    fault: str, healthy: str, first: str, runs: dict, models: dict[str, Path]
) -> None:
    assert unequal(runs[fault]["sites"], runs[healthy]["sites"], models["embedded"])[0] == first
    # A rotation by the same angle everywhere leaves q·k, and so the log-probs, as they were.
    moved = largest(runs[fault]["logprobs"], runs[healthy]["logprobs"])
    assert (moved <= 1e-5) if first == "layers.0.q_rope" else (moved > 1e-3)
    assert changed(runs, fault, healthy) == []


def test_another_activation_is_an_attribute_of_its_layer(runs: dict) -> None:
    assert runs["gelu"]["attributes"]["layers.1.activation"] == "gelu_tanh"
    assert runs["gelu"]["attributes"]["activation"] == "silu"


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_case_is_refused_by_name(case: str, runs: dict) -> None:
    for word in REFUSED[case]:
        assert word in runs[case]["error"]
