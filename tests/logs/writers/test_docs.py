"""The code of docs/write-log-probs.md runs, on arrays laid out as each framework has them."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl_batches

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.sequences import Sequences

PAGE = Path(__file__).parents[3] / "docs" / "write-log-probs.md"
BLOCKS = dict(re.findall(r"```python\n# framework: (\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
PROMPTS, RESPONSES = verl_batches.PROMPTS, verl_batches.RESPONSES
MASK, G, T = verl_batches.MASK, verl_batches.G, verl_batches.T
Fields = dict[str, torch.Tensor]


def code(name: str, **known: Any) -> dict[str, Any]:
    """Runs a block of the page, and returns the names that it defines."""
    exec(compile(BLOCKS[name], f"{PAGE.name}: {name}", "exec"), known)
    return known


def rows(values: list[list[Any]], width: int, left: bool = False) -> torch.Tensor:
    pads = [[0] * (width - len(row)) for row in values]
    return torch.tensor([p + r if left else r + p for r, p in zip(values, pads, strict=True)])


WHOLE = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
ONES = [[1] * len(row) for row in WHOLE]


def skyrl() -> Fields:
    """Sequences and responses are padded on the left; a failed value is -9999."""
    return {
        "sequences": rows(WHOLE, 8, left=True),
        "attention_mask": rows(ONES, 8, left=True),
        "response_mask": rows([[1] * len(r) for r in RESPONSES], 5, left=True),
        "loss_mask": rows(MASK, 5, left=True).float(),
        "rollout_logprobs": rows(G, 5, left=True),
        "action_log_probs": rows(T, 5, left=True),
    }


def next_token(values: list[list[Any]], width: int) -> torch.Tensor:
    """[B, width - 1]: column j scores token j + 1 of sequences that are padded on the right."""
    lead = [[0] * (len(p) - 1) for p in PROMPTS]
    return rows([a + v for a, v in zip(lead, values, strict=True)], width - 1)


def openrlhf() -> SimpleNamespace:
    return SimpleNamespace(
        sequences=rows(WHOLE, 9),
        attention_mask=rows(ONES, 9),
        action_mask=next_token(MASK, 9),
        rollout_log_probs=next_token(G, 9),
        action_log_probs=next_token(T, 9).to(torch.float64),
    )


def roll() -> Fields:
    mask = [[0] * len(p) + m for p, m in zip(PROMPTS, MASK, strict=True)]
    return {
        "input_ids": rows(WHOLE, 9),
        "attention_mask": rows(ONES, 9),
        "response_mask": rows(mask, 9),
        "infer_logprobs": next_token(G, 9),
        "old_log_probs": next_token(T, 9),
    }


def run_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of a trainer that takes its batch in two parts, as V1 may."""

    class PPOTrainerSync:
        config, global_steps = verl_batches.CONFIG, 7

        def step(self, metrics: dict, timing: dict) -> None:
            for row in range(2):
                self._compute_old_log_prob(SimpleNamespace(keys=[row], partition_id="train"), {})

        def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
            return batch

    def kv_batch_get(keys: list[int], partition_id: str, select_fields: list[str]) -> Any:
        (row,) = keys
        taken = {k: [v[row]] for k, v in verl_batches.jagged().items() if k in select_fields}
        nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        return {k: v if k == "uid" else nested(v) for k, v in taken.items()}

    v1 = "verl.trainer.ppo.v1"
    modules = {
        "transfer_queue": {"kv_batch_get": kv_batch_get},
        f"{v1}.trainer_base": {"register_trainer": lambda name: lambda kind: kind},
        f"{v1}.trainer_sync": {"PPOTrainerSync": PPOTrainerSync},
    }
    for name in modules:
        for end in [m.start() for m in re.finditer(r"\.|$", name)]:
            monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
    for name, names in modules.items():
        vars(sys.modules[name]).update(names)
    code("verl", __name__="page")["Logged"]().step({}, {})


def run_trl(_: pytest.MonkeyPatch) -> None:
    """A trainer that makes one batch in its one step."""
    callbacks: list[Any] = []
    ends = [[1] * len(r) for r in RESPONSES]
    batch = {
        "prompt_ids": rows(PROMPTS, 4, left=True),
        "prompt_mask": rows([[1] * len(p) for p in PROMPTS], 4, left=True),
        "completion_ids": rows(RESPONSES, 5),
        "completion_mask": rows(ends, 5),
        "tool_mask": torch.tensor([m + [1] * (5 - len(m)) for m in MASK]),
        "sampling_per_token_logps": rows(G, 5),
        "old_per_token_logps": rows(T, 5),
    }
    args = SimpleNamespace(
        **{"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": None, "generation_kwargs": None},
        **{"bf16": True, "fp16": False, "vllm_mode": "colocate", "mask_truncated_completions": 0},
    )
    trainer = SimpleNamespace(
        args=args,
        use_vllm=True,
        _last_loaded_step=7,
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=7),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
        _generate_and_score_completions=lambda inputs: batch,
        add_callback=callbacks.append,
    )

    def train() -> None:
        assert trainer._generate_and_score_completions([]) is batch
        trainer.state.global_step = 8
        callbacks[0].on_step_end(args, trainer.state, None)

    trainer.train = train
    code("trl", trainer=trainer)


def run_log(name: str, batch: Callable[[], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda _: code(name)["log"](batch(), 7)


RUNS = {
    "trl": run_trl,
    "verl": run_verl,
    "skyrl": run_log("skyrl", skyrl),
    "openrlhf": run_log("openrlhf", lambda: [openrlhf()]),
    "roll": run_log("roll", roll),
}


def test_every_block_is_run() -> None:
    assert BLOCKS.keys() == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe(name: str, tmp_path: Path, monkeypatch, imported_folder) -> None:
    monkeypatch.chdir(tmp_path)
    RUNS[name](monkeypatch)
    read: Sequences = imported_folder(tmp_path / "log-probs")
    assert read.token_ids.tolist() == [*WHOLE[0], *WHOLE[1]]
    assert read.prompt_lengths.tolist() == [2, 3]
    assert read.scored.tolist() == [0, 0, *MASK[0], 0, 0, 0, *MASK[1]]
    assert read.rollout[read.scored].tolist() == [-0.5, -1.5, -0.25, *G[1]]
    assert read.rollout_missing.sum() == 6
    assert read.train[read.scored].tolist() == [-0.625, -1.25, -0.5, *T[1]]
    assert (read.steps.tolist(), read.train_versions.tolist()) == ([7, 7], [7, 7])
    assert read.rollout_dtypes[0] == "bfloat16"


def test_values_that_stand_for_none_are_null(tmp_path: Path, monkeypatch, imported_folder) -> None:
    monkeypatch.chdir(tmp_path)
    batch = skyrl()
    batch["rollout_logprobs"][0, 1] = -9999.0
    batch["rollout_logprobs"][1], batch["loss_mask"][1] = 0.0, 0
    code("skyrl")["log"](batch, 7)
    read = imported_folder(tmp_path / "log-probs")
    assert (read.scored & read.rollout_missing).sum() == 1
    assert np.nansum(read.rollout == 0.0) == 0


@pytest.mark.parametrize(
    ("name", "batch", "said"),
    [
        ("skyrl", skyrl() | {"action_log_probs": None}, "train_logprobs is None"),
        ("roll", {k: v for k, v in roll().items() if k != "infer_logprobs"}, "is None"),
        ("roll", roll() | {"infer_logprobs": torch.zeros(2, 8)}, "0.0 at every token"),
    ],
)
def test_one_side_alone_is_refused(name: str, batch: Fields, said: str) -> None:
    with pytest.raises(DumpError, match=said):
        code(name)["log"](batch, 7)
