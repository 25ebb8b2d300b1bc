"""The frameworks' own functions on the same arrays, where the packages are installed.

verl (0.9.1 was used) needs tensordict, ray, codetiming, hydra-core and others beside it; TRL is an
optional package, too.
"""

import copy
from typing import Any

import numpy as np
import pytest
from padded import padded

from rlk_align.logs.monitor.frameworks import framework_metrics
from rlk_align.logs.monitor.pairs import pairs_of
from rlk_align.logs.monitor.run_monitor import padded_sequences

torch = pytest.importorskip("torch")


def ours(framework: str, seed: int) -> dict[str, float]:
    return framework_metrics(pairs_of(padded_sequences(0, *padded(seed))))[framework]


@pytest.mark.parametrize("seed", range(3))
def test_verl(seed: int) -> None:
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    debug = pytest.importorskip("verl.utils.debug.metrics")
    from verl.protocol import DataProto

    g, t, mask = (torch.from_numpy(a) for a in padded(seed))
    _, _, found = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=t,
        rollout_log_prob=g,
        response_mask=mask.double(),
        rollout_is="token",
        rollout_is_threshold=2.0,
    )
    batch = {"rollout_log_probs": g, "old_log_probs": t, "responses": torch.zeros(g.shape)}
    batch |= {"attention_mask": mask.long(), "response_mask": mask.long()}
    found |= debug.calculate_debug_metrics(DataProto.from_dict(tensors=batch))
    expected = ours("verl", seed)
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.fixture(scope="module")
def grpo_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GRPOTrainer on the embedded model whose engine and log-probs a test sets."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from rlk_align.data import data_path

    args = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=16,
        num_generations=16,
        max_completion_length=23,
        report_to=[],
        use_cpu=True,
    )
    return trl.GRPOTrainer(
        model=str(data_path("model")),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 16}),
    )


@pytest.mark.parametrize("seed", range(3))
def test_trl(grpo_trainer: Any, seed: int) -> None:
    trainer = copy.copy(grpo_trainer)
    g, t, mask = padded(seed)
    lengths = [int(np.flatnonzero(row).max()) + 1 for row in mask]
    tokens = [[5] * n for n in lengths]
    tool_mask = [row[:n].astype(int).tolist() for row, n in zip(mask, lengths, strict=True)]
    sampled = [row[:n].tolist() for row, n in zip(g, lengths, strict=True)]
    prompts = [[3, 4]] * len(g)
    trainer._generate = lambda *_, **__: (
        *(prompts, tokens, tool_mask, ["x"] * len(g), sampled),
        *({}, None, None),
    )
    trainer._calculate_rewards = lambda *_, **__: torch.zeros(len(g), 1)
    width = max(lengths)
    logps = torch.from_numpy(t[:, :width])
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, None, None)
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    trainer.model.train()
    trainer._metrics["train"].clear()
    trainer._generate_and_score_completions([{"prompt": "a"} for _ in range(len(g))])
    for name, value in ours("trl", seed).items():
        # TRL holds the rollout's log-probs in fp32.
        assert trainer._metrics["train"][name][-1] == pytest.approx(value, rel=1e-6, abs=1e-6), name
