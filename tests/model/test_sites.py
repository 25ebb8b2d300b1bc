"""The canonical sites, their graph, and the rows of a batch."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import wanted_cells

from rlk_align.errors import ModelError
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import ModelShape, read_shape
from rlk_align.model.sites import RowIndex, model_sites

LAYER_OPS = (
    *("attn_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope"),
    *("attn", "o_proj", "attn_residual"),
    *("mlp_norm", "gate_proj", "up_proj", "act", "down_proj", "mlp_residual"),
)


def shape(model_type: str, layers: int = 3) -> ModelShape:
    return ModelShape(
        model_type=model_type,
        layers=layers,
        hidden=24,
        heads=6,
        kv_heads=2,
        head_dim=8,
        intermediate=40,
        vocab=100,
        context=64,
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("family", "qk_norm"), [("llama", False), ("mistral", False), ("qwen2", False), ("qwen3", True)]
)
def test_sites_and_their_order(family: str, qk_norm: bool) -> None:
    ops = [op for op in LAYER_OPS if qk_norm or op not in ("q_norm", "k_norm")]
    layers = [f"layers.{i}.{op}" for i in range(3) for op in ops]
    wanted = ["embed", *layers, "final_norm", "logits", "logprob"]
    assert [s.name for s in model_sites(shape(family))] == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_names_say_layer_and_operator(family: str) -> None:
    for site in model_sites(shape(family)):
        parts = site.name.split(".")
        assert site.op == parts[-1]
        assert site.layer == (int(parts[1]) if parts[0] == "layers" else None)


FEATURES = {
    24: {
        *("embed", "attn_norm", "o_proj", "attn_residual", "mlp_norm"),
        *("down_proj", "mlp_residual", "final_norm"),
    },
    48: {"q_proj", "q_norm", "q_rope", "attn"},
    16: {"k_proj", "v_proj", "k_norm", "k_rope"},
    40: {"gate_proj", "up_proj", "act"},
    100: {"logits"},
    1: {"logprob"},
}
CLASSES = {
    "elementwise": {"embed", "q_rope", "k_rope", "attn_residual", "act", "mlp_residual"},
    "reduction": {"attn_norm", "q_norm", "k_norm", "mlp_norm", "final_norm"},
    "attention": {"attn"},
    "logprob": {"logprob"},
    "matmul": {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj", "logits"),
    },
}


def test_widths_and_classes() -> None:
    for site in model_sites(shape("qwen3")):
        assert site.op in FEATURES[site.features]
        assert site.op in CLASSES[site.op_class]
        assert site.sampled_rows_only == (site.op in ("logits", "logprob"))


def inputs_in_words(family: str) -> dict[str, set[str]]:
    """The inputs of each operator of layer 1, by the formula of a pre-norm decoder."""
    q, k = ("q_norm", "k_norm") if family == "qwen3" else ("q_proj", "k_proj")
    stream = "layers.0.mlp_residual"
    here = {
        "attn_norm": {stream},
        "q_proj": {"attn_norm"},
        "k_proj": {"attn_norm"},
        "v_proj": {"attn_norm"},
        "q_norm": {"q_proj"},
        "k_norm": {"k_proj"},
        "q_rope": {q},
        "k_rope": {k},
        "attn": {"q_rope", "k_rope", "v_proj"},
        "o_proj": {"attn"},
        "attn_residual": {stream, "o_proj"},
        "mlp_norm": {"attn_residual"},
        "gate_proj": {"mlp_norm"},
        "up_proj": {"mlp_norm"},
        "act": {"gate_proj", "up_proj"},
        "down_proj": {"act"},
        "mlp_residual": {"attn_residual", "down_proj"},
    }
    return {
        f"layers.1.{op}": {n if "." in n else f"layers.1.{n}" for n in names}
        for op, names in here.items()
    }


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_graph_is_the_formula_of_a_decoder(family: str) -> None:
    sites = {s.name: s for s in model_sites(shape(family))}
    for name, wanted in inputs_in_words(family).items():
        if name in sites:
            assert {*sites[name].inputs, *sites[name].prefix_inputs} == wanted, name
    assert sites["embed"].inputs == ()
    assert sites["layers.0.attn_norm"].inputs == ("embed",)
    assert set(sites["layers.0.attn_residual"].inputs) == {"embed", "layers.0.o_proj"}
    assert sites["final_norm"].inputs == ("layers.2.mlp_residual",)
    assert sites["logits"].inputs == ("final_norm",)
    assert sites["logprob"].inputs == ("logits",)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_inputs_exist_and_come_before(family: str) -> None:
    seen: set[str] = set()
    for site in model_sites(shape(family)):
        assert {*site.inputs, *site.prefix_inputs} <= seen
        assert site.name not in seen
        seen.add(site.name)


def test_only_attention_reads_earlier_rows() -> None:
    for site in model_sites(shape("llama")):
        prefix = {f"layers.{site.layer}.k_rope", f"layers.{site.layer}.v_proj"}
        assert set(site.prefix_inputs) == (prefix if site.op == "attn" else set())


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6)


def batch_of(sizes: list[tuple[int, int]]) -> TokenBatch:
    return TokenBatch(tuple(Sample(f"s{i}", (1,) * p, (2,) * r) for i, (p, r) in enumerate(sizes)))


@given(lengths, st.booleans())
def test_expected_rows_are_those_of_the_definition(
    sizes: list[tuple[int, int]], decode: bool
) -> None:
    # In a decode pass every sample has a response.
    batch = batch_of([(p, max(r, 1)) if decode else (p, r) for p, r in sizes])
    index = RowIndex(batch)
    assert len(index) == sum(len(s.ids) for s in batch.samples)
    for site in model_sites(shape("llama", layers=1)):
        mask = index.expected(site, decode)
        assert mask.shape == (len(index),)
        cells = [index.locate(int(row)) for row in np.flatnonzero(mask)]
        assert cells == wanted_cells(site, decode, batch), site.name


@given(lengths)
def test_rows_and_locate_are_inverse(sizes: list[tuple[int, int]]) -> None:
    index = RowIndex(batch_of(sizes))
    cells = [(i, p) for i, (a, b) in enumerate(sizes) for p in range(a + b)]
    sample, position = np.array(cells).T
    assert index.rows(sample, position).tolist() == list(range(len(index)))
    assert [index.locate(row) for row in range(len(index))] == cells


@given(
    lengths, st.lists(st.tuples(st.integers(-3, 8), st.integers(-3, 12)), min_size=1, max_size=20)
)
def test_a_pair_outside_the_batch_has_no_row(
    sizes: list[tuple[int, int]], pairs: list[tuple[int, int]]
) -> None:
    index = RowIndex(batch_of(sizes))
    sample, position = np.array(pairs).T
    for (s, p), row in zip(pairs, index.rows(sample, position).tolist(), strict=True):
        inside = 0 <= s < len(sizes) and 0 <= p < sum(sizes[s])
        assert (index.locate(row) == (s, p)) if inside else row == -1


@given(st.data(), lengths)
def test_prefix_all_looks_at_every_earlier_row_of_the_sample(
    data: st.DataObject, sizes: list[tuple[int, int]]
) -> None:
    index = RowIndex(batch_of(sizes))
    good = data.draw(st.lists(st.booleans(), min_size=len(index), max_size=len(index)))
    holds = index.prefix_all(np.array(good, dtype=bool)).tolist()
    row = 0
    for a, b in sizes:
        for p in range(a + b):
            assert holds[row + p] == all(good[row : row + p + 1])
        row += a + b


def config_folder(tmp_path: Path, **changes: object) -> Path:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    } | changes
    kept = {k: v for k, v in config.items() if v != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return tmp_path


def test_a_shape_is_read_from_the_config(tmp_path: Path) -> None:
    shape = read_shape(config_folder(tmp_path))
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 4, 16)
    assert shape.dtype == "float32"
    shape = read_shape(
        config_folder(tmp_path, num_key_value_heads=2, head_dim=32, torch_dtype="bfloat16")
    )
    assert (shape.kv_heads, shape.head_dim, shape.dtype) == (2, 32, "bfloat16")
    assert read_shape(config_folder(tmp_path, dtype="float16")).dtype == "float16"
    assert read_shape(config_folder(tmp_path, head_dim=None)).head_dim == 16


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "absent"}, "None"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "two"),
        ({"vocab_size": None}, "config.json"),
        ({"max_position_embeddings": "absent"}, "max_position_embeddings"),
        (
            {"num_attention_heads": 0},
            "num_attention_heads is 0; it must be a positive whole number",
        ),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be a positive whole number"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; at most 10000 is supported",
        ),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000; "),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; it must be a positive whole number"),
        ({"vocab_size": True}, "vocab_size is True; it must be a positive whole number"),
        ({"model_type": ["llama"]}, "llama"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(
    tmp_path: Path, changes: dict, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        read_shape(config_folder(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "9" * 5000, "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(tmp_path)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(tmp_path)
