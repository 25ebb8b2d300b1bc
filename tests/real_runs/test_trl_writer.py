"""TRL's own GRPOTrainer trains the embedded model, and the writer logs its steps.

The rollout is another engine than the trainer: transformers in bf16, through `rollout_func`, with
left-padded prompts and tokens that no model sampled; the trainer computes in fp32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imported_runs import sequences_in

from rlk_align.data import data_path
from rlk_align.errors import DumpError
from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.logs.diagnose.explain import explain
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.writers.trl import log_steps

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")

TOOL = [7, 8, 9]
"""What the environment answers after the sixth token of every completion."""
TEMPERATURE = 0.9
Trained = tuple[Path, list[dict[str, Any]], Any]


class Rollout:
    """An engine in bf16 that takes the trainer's weights before it samples.

    `shift` plants a fault: log-probs that are one token late.
    """

    def __init__(self, shift: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        path = str(data_path("model"))
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.shift = shift

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        self.model.load_state_dict(trainer.model.state_dict())
        tokenizer = trainer.processing_class
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        mask = [[1] * 6 + [0] * len(TOOL) + [1] * 30 for _ in prompts]
        completions: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for place in range(len(mask[0])):
            rows = [p + c for p, c in zip(ids, completions, strict=True)]
            law = self.law(rows)
            if mask[0][place]:
                drawn = torch.multinomial(law.exp(), 1)[:, 0].tolist()
            else:
                drawn = [TOOL[place - 6]] * len(rows)
            for row, token in enumerate(drawn):
                completions[row].append(token)
                logprobs[row].append(float(law[row, token]) if mask[row][place] else 0.0)
        ends = [len(mask[0]) - row % 5 for row in range(len(prompts))]
        late = [[-1.0] * self.shift + row[: len(row) - self.shift] for row in logprobs]
        return {
            "prompt_ids": ids,
            "completion_ids": [c[:e] for c, e in zip(completions, ends, strict=True)],
            "logprobs": [g[:e] for g, e in zip(late, ends, strict=True)],
            "env_mask": [m[:e] for m, e in zip(mask, ends, strict=True)],
        }

    def law(self, rows: list[list[int]]) -> Any:
        """The log-probs [B, V] of the token behind each row."""
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
        there = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        at = (there.cumsum(-1) - 1).clamp(min=0)
        logits = self.model(ids, there, position_ids=at).logits[:, -1].float()
        return (logits / TEMPERATURE).log_softmax(-1)


def trainer(folder: Path, rollout: Rollout | None, **args: Any) -> Any:
    from datasets import Dataset

    settings = {"steps_per_generation": 2, "max_steps": 3} | args
    return trl.GRPOTrainer(
        model=str(data_path("model")),
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        rollout_func=rollout,
        args=trl.GRPOConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=4,
            temperature=TEMPERATURE,
            learning_rate=1e-6,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            model_init_kwargs={"dtype": "float32"},
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["Once upon a time", "The", "A dog and"] * 8}),
    )


def train(made: Any, folder: Path) -> list[dict[str, Any]]:
    """Trains while the steps are logged, and returns TRL's own batches."""
    batches: list[dict[str, Any]] = []
    make_batch = made._generate_and_score_completions

    def spied(inputs: Any) -> dict[str, Any]:
        batches.append(make_batch(inputs))
        return batches[-1]

    made._generate_and_score_completions = spied
    mode = "processed_logprobs"
    log_steps(made, folder / "steps", rollout_dtype="bfloat16", logprobs_mode=mode)
    made.train()
    return batches


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The folder of steps, TRL's own batches, and the trainer."""
    folder = tmp_path_factory.mktemp("trained")
    made = trainer(folder, Rollout())
    return folder / "steps", train(made, folder), made


def test_every_field_is_what_the_arrays_were(trained, tmp_path: Path) -> None:
    folder, batches, _ = trained
    names = ["step_000000_rank_0_of_1.jsonl", "step_000002_rank_0_of_1.jsonl"]
    assert sorted(p.name for p in folder.iterdir()) == names
    read = sequences_in(folder, tmp_path / "run")
    assert read.steps.tolist() == read.train_versions.tolist() == [0] * 16 + [2] * 16
    assert read.sampling[0].model_dump() == {
        **{"temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "min_p": None},
        "logprobs_mode": "processed_logprobs",
    }
    assert set(read.train_dtypes) == {"float32"}
    assert len({int(n) for n in read.prompt_lengths}) > 1, "no prompt is padded"
    sequence = 0
    for batch in batches:
        for row in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            end = int(batch["completion_mask"][row].sum())
            at = slice(*read.offsets[sequence : sequence + 2])
            completion = batch["completion_ids"][row, :end].tolist()
            assert read.token_ids[at].tolist() == prompt + completion
            assert read.prompt_lengths[sequence] == len(prompt)
            scored = batch["tool_mask"][row, :end].bool()
            assert read.scored[at].tolist() == [False] * len(prompt) + scored.tolist()
            for side, name in ((read.rollout, "sampling"), (read.train, "old")):
                values = batch[f"{name}_per_token_logps"][row, :end][scored].tolist()
                assert side[at][read.scored[at]].tolist() == values
            missing = read.rollout_missing[at][len(prompt) :]
            assert missing.tolist() == (~scored).tolist(), "0.0 of the environment's tokens"
            sequence += 1
    assert sequence == len(read)


def explained(sequences: Sequences) -> tuple[str, str]:
    found = explain([sequences], load_run_contract())
    assert found.diagnoses, (found.doubts, found.breaches, found.counts)
    return found.status, found.diagnoses[0].name


def test_explain_calls_it_ordinary_numerics(trained, tmp_path: Path) -> None:
    assert explained(sequences_in(trained[0], tmp_path / "run")) == ("pass", "numerics")


def test_log_probs_one_token_late_are_named(tmp_path: Path) -> None:
    """The step has two batches: one is made every two of its three passes."""
    made = trainer(tmp_path, Rollout(shift=1), max_steps=1, gradient_accumulation_steps=3)
    batches = train(made, tmp_path)
    assert len(list((tmp_path / "steps").iterdir())) == 1
    read = sequences_in(tmp_path / "steps", tmp_path / "run")
    assert len(read) == sum(len(b["prompt_ids"]) for b in batches) == 32
    assert explained(read) == ("fail", "misaligned")


def test_evaluation_is_not_logged(trained) -> None:
    folder, batches, made = trained
    before = {p: p.read_bytes() for p in folder.iterdir()}
    made.model.eval()
    made._generate_and_score_completions([{"prompt": "The"}] * 8)
    made.model.train()
    assert len(batches) == 3, "it does make a batch"
    made.callback_handler.on_step_end(made.args, made.state, made.control)
    assert {p: p.read_bytes() for p in folder.iterdir()} == before
    batches.pop()


@pytest.mark.parametrize(
    ("rollout", "args", "said", "fix"),
    [
        (True, {"steps_per_generation": 1}, "old_per_token_logps", "vllm_importance_sampling_corr"),
        (False, {}, "no log-probs of the rollout", "rollout_func"),
    ],
)
def test_a_side_that_trl_does_not_compute_is_refused(
    tmp_path: Path, rollout: bool, args: dict[str, Any], said: str, fix: str
) -> None:
    made = trainer(tmp_path, Rollout() if rollout else None, **args)
    log_steps(made, tmp_path / "steps", rollout_dtype="bfloat16")
    with pytest.raises(DumpError, match=said) as raised:
        made.train()
    assert fix in raised.value.fix
    assert not (tmp_path / "steps").exists()


def test_a_mask_of_tools_that_is_not_cut_is_refused(trained) -> None:
    """TRL pads it with 1, beyond the end of the shorter completions."""
    from rlk_align.logs.writers.batch import batch_records

    batch = trained[1][0]
    with pytest.raises(DumpError, match="tokens of padding"):
        batch_records(
            token_ids=np.hstack([batch["prompt_ids"], batch["completion_ids"]]),
            attention_mask=np.hstack([batch["prompt_mask"], batch["completion_mask"]]),
            mask=batch["tool_mask"],
            rollout_logprobs=batch["sampling_per_token_logps"],
            train_logprobs=batch["old_per_token_logps"],
        )
