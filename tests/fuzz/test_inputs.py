"""Contracts, prompts, engine specs and configs of every kind: a verdict, or one clear line."""

import copy
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from folder_mutations import EXAMPLES, VALUES, ended_well, places
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import command
from synthetic import CONTRACT, compared_run

from rlk_align.capture.check import check_prompts, check_request
from rlk_align.capture.request import CaptureRequest
from rlk_align.data import data_path
from rlk_align.engines import worker
from rlk_align.engines.process.job import Events, Job
from rlk_align.engines.registry import ENGINES, engine_info
from rlk_align.engines.spec import COMMON_OPTIONS, EngineSpec
from rlk_align.errors import ContractError, PromptError, RlkError, UsageError
from rlk_align.judge.verdict import judge_by
from rlk_align.model.prompts import load_prompts
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run

SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared_run(tmp_path_factory.mktemp("inputs") / "run").folder


TOML_VALUES = (
    *("0", "-1", "0.5", "1e400", "99999999999999999999", "nan", "inf", "true", "1979-05-27"),
    *('""', '"x"', '"\\u001b[31m"', '"max_abs_dlogp"', '"op_error"'),
    *("[]", "[1]", '["bfloat16"]', "{}"),
)


def changed_lines(text: str, rng: random.Random) -> str:
    """One line less, twice, moved, or with another value."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    how = rng.choice(["drop", "twice", "move", "value", "value", "value", "key", "cut", "byte"])
    if how == "drop":
        del lines[at]
    elif how == "twice":
        lines.insert(at, lines[at])
    elif how == "move":
        lines.insert(rng.randrange(len(lines)), lines.pop(at))
    elif how == "value" and "=" in lines[at]:
        lines[at] = f"{lines[at].partition('=')[0]}= {rng.choice(TOML_VALUES)}"
    elif how == "key":
        lines[at] = rng.choice(["x = 1", "[x]", "[[limits]]", "[limits]", "max_noise = 0.5"])
    elif how == "cut":
        lines[at] = lines[at][: len(lines[at]) // 2]
    elif how == "byte":
        lines[at] += rng.choice(["\0", "\x1b[31m", "é", '"', "'''", "#"])
    return "\n".join(lines) + "\n"


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=SEEDS, name=st.sampled_from(["contracts/bf16.toml", "synthetic"]))
def test_contracts(run: Path, seed: int, name: str) -> None:
    rng = random.Random(seed)
    source = CONTRACT if name == "synthetic" else data_path("contracts") / Path(name).name
    text = Path(source).read_text()
    for _ in range(rng.randint(1, 3)):
        text = changed_lines(text, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(text)
        try:
            # The two sides are equal: a contract that can be read passes them, or wants more.
            status = judge_by(Run(run).comparison, str(path)).status
        except ContractError as error:
            status = "refused"
            said = error.message.splitlines()
        else:
            said = [status]
        assert status in ("pass", "inconclusive", "refused"), text
        assert len(said) == 1, (said, text)
        if rng.random() < 0.1:
            code, printed = command("gate", run, "--contract", path)
            ended_well(code, printed, [text])
            assert code == {"pass": 0, "inconclusive": 4, "refused": 2}[status], (printed, text)


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=SEEDS)
def test_prompts(seed: int) -> None:
    rng = random.Random(seed)
    records: list[Any] = [{"id": "a", "prompt": "some words"}, {"ids": [1, 2]}, {"prompt": "é"}]
    where = rng.choice(places(records))
    parent: Any = records
    for key in where[:-1]:
        parent = parent[key]
    parent[where[-1]] = copy.deepcopy(rng.choice(VALUES))
    text = "".join(json.dumps(r) + "\n" for r in records)
    data = bytearray(text.encode())
    for _ in range(rng.randint(0, 2)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / rng.choice(["p.jsonl", "p.txt"])
        path.write_bytes(data)
        try:
            prompts = load_prompts(path)
        except PromptError:
            return
    assert prompts
    assert len({p.id for p in prompts}) == len(prompts)
    for p in prompts:
        assert (p.text or "").strip() or (p.ids and all(type(t) is int and t >= 0 for t in p.ids))


WORDS = st.one_of(
    st.sampled_from([*COMMON_OPTIONS, *(o for e in ENGINES for o in engine_info(e).options)]),
    st.sampled_from(
        ["1", "0", "2", "bf16", "eager", "cpu", "cuda:0", "a.b:c", "", "-1", "1e9", "é"]
    ),
    st.text(max_size=6),
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    name=st.one_of(st.sampled_from(sorted(ENGINES)), st.text(max_size=5)),
    pairs=st.lists(st.tuples(WORDS, WORDS), max_size=3),
    equals=st.sampled_from(["=", "=", "=", "", "==", ":"]),
)
def test_engine_specs(name: str, pairs: list[tuple[str, str]], equals: str) -> None:
    text = f"{name}:{','.join(f'{k}{equals}{v}' for k, v in pairs)}"
    try:
        spec = EngineSpec.parse(text)
    except UsageError:
        return
    assert EngineSpec.parse(str(spec)) == spec
    assert spec.canonical("bfloat16").canonical("bfloat16") == spec.canonical("bfloat16")
    assert spec.ranks >= 1


CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32},
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
    **{"rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    **{"tie_word_embeddings": False, "initializer_range": 0.2, "bos_token_id": 1},
    **{"eos_token_id": 2, "dtype": "float32", "transformers_version": "5.0.0"},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, without a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "p.jsonl").write_text('{"ids": [3, 4, 5, 6]}\n')
    return folder


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(seed=SEEDS)
def test_configs(tiny: Path, seed: int) -> None:
    rng, config = random.Random(seed), json.loads(json.dumps(CONFIG))
    for _ in range(rng.randint(1, 2)):
        where = rng.choice(places(config))
        parent: Any = config
        for key in where[:-1]:
            parent = parent[key] if isinstance(parent, dict | list) else {}
        if not isinstance(parent, dict | list):
            continue
        if rng.random() < 0.3 and isinstance(parent, dict):
            parent.pop(where[-1], None)
        else:
            value = rng.choice([*VALUES, 2, 3, 16, 64, "yarn", "dynamic", "gelu"])
            parent[where[-1]] = copy.deepcopy(value)
    with tempfile.TemporaryDirectory() as temporary:
        model = shutil.copytree(tiny, Path(temporary) / "model")
        (model / "config.json").write_text(json.dumps(config))
        spec, prompts = EngineSpec.parse("hf"), model / "p.jsonl"
        error: RlkError | None = None
        request = CaptureRequest(engine=spec, model=str(model), prompts=prompts, max_new_tokens=2)
        try:
            checked = check_request(request, sampling=True)
            check_prompts(checked, load_prompts(prompts))
            shape = checked.shape
            folder = Path(temporary) / "capture"
            folder.mkdir()
            shutil.copy(prompts, folder / "prompts.jsonl")
            job = Job(
                engine=spec.canonical(shape.dtype),
                model=model,
                folder=folder,
                key="k",
                prompts=prompts,
                tokens=None,
                passes=("decode", "prefill"),
                max_new_tokens=2,
                seed=0,
                budget=10**6,
                layers=None,
                sites=(),
            )
            worker.run(job, Events(folder))
        except RlkError as refused:
            error = refused
        if error is None:
            assert Trace(folder).passes == ["decode", "prefill"]
        else:
            assert len(error.message.splitlines()) == 1, (error.message, config)
