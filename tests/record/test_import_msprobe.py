"""Dumps in msprobe's format (tests/support/msprobe_files.py says how they were checked)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Cli, command_line
from family_models import family_model
from hostile_pickle import Hostile
from imports import beyond, imported, rejected, trace_of
from msprobe_files import write_dump

from rlk_align.api.pair import Pair, prepare
from rlk_align.data import data_path
from rlk_align.progress import silent
from rlk_align.record.imports.importing import import_side
from rlk_align.trace.writer import one_thread

IDS = [[5, 40, 300, 7, 906, 732, 939, 17, 60, 61, 62, 63], [11, 12, 13, 222, 20, 23, 29, 500]]


def loaded() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(data_path("model"), dtype="bfloat16").eval()


def batches(ids: list[list[int]]) -> list[dict[str, Any]]:
    """A batch padded on the right, without an attention mask, which such padding does not need."""
    return [{"input_ids": torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), True)}]


def apart(ids: list[list[int]]) -> list[dict[str, Any]]:
    """A micro-batch for each sequence."""
    return [{"input_ids": torch.tensor([one])} for one in ids]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a healthy model, of one with another weight, and of one with another operator."""
    folder = tmp_path_factory.mktemp("msprobe")
    with one_thread():
        model = loaded()
        write_dump(folder / "healthy", model, apart(IDS))
        write_dump(folder / "padded", model, batches(IDS))
        projection = model.model.layers[1].mlp.down_proj
        hook = projection.register_forward_hook(lambda _m, _i, out: out * 1.03125)
        write_dump(folder / "operator", model, apart(IDS), parameters=False)
        hook.remove()
        with torch.no_grad():
            model.model.layers[2].self_attn.o_proj.weight.mul_(1.03125)
        write_dump(folder / "weight", model, apart(IDS))
    return folder


@pytest.fixture(scope="module")
def sides(dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps imported as the trainer's side, and the healthy one as the rollout's too."""
    folder = tmp_path_factory.mktemp("sides")
    cli = command_line(folder)
    assert imported(cli, "msprobe", dumps / "healthy", folder / "rollout", "rollout").code == 0
    for name in ("healthy", "padded", "operator", "weight"):
        known = ("--tokens", folder / "rollout") if name == "padded" else ()
        done = imported(cli, "msprobe", dumps / name, folder / name, "train", *known)
        assert done.code == 0, done.err
        assert "sites    64 of 72" in done.out
    return folder


@pytest.fixture
def against(cli: Cli, sides: Path) -> Callable[[str], Any]:
    """Compares the rollout with one of the trainer's sides."""

    def compared(train: str) -> Any:
        edges = ("--edges", "prefill_vs_train")
        return cli(
            "compare", sides / "rollout", sides / train, *edges, "--allow-mismatch", "weights"
        )

    return compared


@pytest.mark.parametrize("train", ["healthy", "padded"])
def test_the_same_model_has_the_same_rows(against: Callable[[str], Any], train: str) -> None:
    done = against(train)
    verdict = done.verdict
    assert verdict["precheck"]["weights"] == "equal"
    assert verdict["precheck"]["attributes"].startswith("not recorded on the")
    assert verdict["edges"]["prefill_vs_train"]["tokens"] == sum(len(one) - 1 for one in IDS)
    assert beyond(done) == set()
    assert verdict["status"] == "inconclusive"
    if train == "healthy":
        assert verdict["divergence"]["first_bitwise"] is None


def test_a_faulty_operator_is_named(against: Callable[[str], Any]) -> None:
    done = against("operator")
    assert done.first == "layers.1.down_proj"
    assert beyond(done) == {("layers.1.down_proj", "train")}


def test_another_weight_is_named(cli: Cli, sides: Path, against: Callable[[str], Any]) -> None:
    done = cli("compare", sides / "rollout", sides / "weight", "--edges", "prefill_vs_train")
    [mismatch] = done.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == ("weights", "layers.2.o_proj")
    done = against("weight")
    assert done.first == "layers.2.o_proj"
    words = " ".join(done.out.split())
    assert "the layers.2.o_proj in its engine differs from the checkpoint's" in words


def test_log_probs_of_a_run_are_imported_with_its_sequences(
    cli: Cli, dumps: Path, tmp_path: Path
) -> None:
    lines = [
        {
            "schema": "rlk-align/logprobs/1",
            "id": str(i),
            "token_ids": ids,
            "prompt_length": 3,
            "train_logprobs": [-0.5 - t / 8 for t in range(len(ids) - 3)],
            "mask": [True] * (len(ids) - 4) + [False],
        }
        for i, ids in enumerate(IDS)
    ]
    path = tmp_path / "logprobs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "run"
    assert cli("import", "jsonl", path, "-o", run).code == 0
    out = tmp_path / "train"
    done = imported(cli, "msprobe", dumps / "padded", out, "train", "--tokens", run)
    assert done.code == 0, done.err
    trace = trace_of(out)
    assert sorted(list(s.prompt_ids) for s in trace.tokens.samples) == sorted(i[:3] for i in IDS)
    assert trace.tokens.counted_tokens == sum(len(i) - 4 for i in IDS)
    reader = trace.read_pass("prefill")
    rows = reader.rows("logprob")
    assert rows is not None
    values = reader.values("logprob", rows, torch.arange(len(rows.sample)).numpy())[:, 0]
    expected = [-0.5 - (p - 2) / 8 for p in rows.position]
    assert values.tolist() == expected
    assert len(rows.sample) == sum(len(i) - 3 for i in IDS)


def change_json(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "step0/rank0/dump.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DOWN = "Module.model.layers.1.mlp.down_proj.Linear.forward.0"
TENSOR = f"step0/rank0/dump_tensor_data/{DOWN}.output.0.pt"


def elsewhere(content: dict[str, Any]) -> None:
    content["data"][DOWN]["output"][0]["data_name"] = "../../../secret.pt"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: change_json(d, lambda c: c.update(task="statistics")), "has statistics"),
        (
            lambda d: change_json(d, lambda c: c.update(task="xor_checksum")),
            "not a dump that is known",
        ),
        (lambda d: change_json(d, lambda c: c.update(framework="mindspore")), "is of mindspore"),
        (lambda d: change_json(d, lambda c: c.update(data={})), "no call of model.embed_tokens"),
        (lambda d: change_json(d, elsewhere), "names a file outside of its folder"),
        (lambda d: (d / "step0/rank0/dump.json").write_text("{"), "is not JSON"),
        (lambda d: (d / "step0/rank0/dump.json").unlink(), "has no dump.json"),
        (lambda d: (d / TENSOR).unlink(), "which is missing"),
        (lambda d: (d / TENSOR).write_bytes(b"PK"), "was cut off"),
        (lambda d: torch.save(torch.ones(3), d / TENSOR), "and dump.json says"),
        (lambda d: torch.save(Hostile(d / "owned"), d / TENSOR), "objects other than tensors"),
        (lambda d: shutil.copytree(d / "step0", d / "step1"), "several steps: step0, step1"),
        (
            lambda d: shutil.copytree(d / "step0/rank0", d / "step0/rank1"),
            "have the same tokens, and msprobe's files do not say",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    cli: Cli, dumps: Path, tmp_path: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    folder = tmp_path / "dump"
    shutil.copytree(dumps / "healthy", folder)
    spoil(folder)
    done = imported(cli, "msprobe", folder, tmp_path / "out", "train")
    assert said in rejected(done)
    assert not (folder / "owned").exists()
    assert not list((tmp_path / "out").rglob("recording.json"))


def test_modules_of_another_call_count_are_left_out(cli: Cli, dumps: Path, tmp_path: Path) -> None:
    """As where gradient checkpointing calls the layers again."""
    folder = tmp_path / "dump"
    shutil.copytree(dumps / "healthy", folder)

    def again(content: dict[str, Any]) -> None:
        data = content["data"]
        data[DOWN.replace("forward.0", "forward.2")] = data[DOWN]

    change_json(folder, again)
    out = tmp_path / "train"
    done = imported(cli, "msprobe", folder, out, "train")
    assert "1 modules were not called once in each of 2 forwards" in " ".join(done.out.split())
    assert "layers.1.down_proj" in trace_of(out).read_pass("prefill").record.unexposed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("msprobe", "X", "-o", "out", "--model", "M"), "do not say which side they are of"),
        (("msprobe", "X", "-o", "out", "--side", "train"), "do not say which model"),
        (("jsonl", "X", "-o", "out", "--side", "train"), "do not apply to jsonl"),
        (("msprobe", "X", "-o", "out", "--side", "both"), "is not one of"),
    ],
)
def test_options_that_do_not_fit(cli: Cli, options: tuple[str, ...], said: str) -> None:
    done = cli("import", *options)
    assert done.code == 2
    assert said in " ".join(done.err.split())


def test_a_step_that_is_there_is_not_replaced(cli: Cli, dumps: Path, tmp_path: Path) -> None:
    out = tmp_path / "train"
    assert imported(cli, "msprobe", dumps / "healthy", out, "train", "--step", 7).code == 0
    done = imported(cli, "msprobe", dumps / "healthy", out, "train", "--step", 7)
    assert "step 7 is recorded already" in rejected(done)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("family", ["gemma3_text", "hunyuan_v1_dense", "olmo2", "deepseek_v3"])
def test_every_place_has_the_values_of_its_operator(tmp_path: Path, family: str) -> None:
    """Families that norm heads before or after they are transposed, whose norms are after the
    branches, and with latents: every imported operator follows from its inputs in float64."""
    from transformers import AutoModelForCausalLM

    model = family_model(tmp_path / "model", family)
    with one_thread():
        live = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16").eval()
        step = write_dump(tmp_path / "dump", live, apart([IDS[0][:11]]), parameters=False)
    for side in ("rollout", "train"):
        import_side("msprobe", [step], tmp_path / side, side, model, None, 0)
    runs = [str(tmp_path / "rollout"), str(tmp_path / "train")]
    pair = prepare(Pair(edges="prefill_vs_train", run_dir=tmp_path / "run"), runs, print)
    units = pair.start(silent).comparison.referee
    checked = {u.site: u.errors.rms for u in units if u.errors is not None}
    assert len(checked) > 50
    assert {site: rms for site, rms in checked.items() if not rms < 1.6} == {}


def test_heads_that_are_as_many_as_tokens_are_left_out(
    cli: Cli, tmp_path: Path, dumps: Path
) -> None:
    """Nothing says which dimension of [batch, 8, 8, 32] is the tokens."""
    out = tmp_path / "train"
    assert imported(cli, "msprobe", dumps / "healthy", out, "train").code == 0
    rows = {n: s.rows for n, s in trace_of(out).read_pass("prefill").record.sites.items()}
    assert rows["layers.0.q_norm"] == len(IDS[0])
    assert rows["layers.0.k_norm"] == rows["layers.0.q_proj"] == sum(map(len, IDS))
