"""Each framework's metrics against its formula, computed token by token in plain Python."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from padded import padded

from rlk_align.logs.monitor.frameworks import FRAMEWORKS, framework_metrics
from rlk_align.logs.monitor.pairs import pairs_of
from rlk_align.logs.monitor.run_monitor import padded_sequences

G, T, MASK = padded()
ROWS = [
    [(g, t) for g, t, m in zip(a, b, c, strict=True) if m]
    for a, b, c in zip(G, T, MASK, strict=True)
]
TOKENS = [pair for row in ROWS for pair in row]
D = [t - g for g, t in TOKENS]


def named(seed: int = 0) -> dict[str, dict[str, float]]:
    return framework_metrics(pairs_of(padded_sequences(0, *padded(seed))))


def k3(d: float) -> float:
    return math.exp(d) - 1 - d


def of_rows(figure) -> list[float]:
    """The mean of a function of (g, t) over each sequence's tokens."""
    return [fmean(figure(g, t) for g, t in row) for row in ROWS]


def sums() -> list[float]:
    return [sum(t - g for g, t in row) for row in ROWS]


def js(g: float, t: float) -> float:
    mixture = math.log((math.exp(g) + math.exp(t)) / 2)
    return (k3(t - mixture) + k3(g - mixture)) / 2


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def pearson(x: list[float], y: list[float]) -> float:
    a, b = fmean(x), fmean(y)
    top = sum((i - a) * (j - b) for i, j in zip(x, y, strict=True))
    return top / math.sqrt(sum((i - a) ** 2 for i in x) * sum((j - b) ** 2 for j in y))


def segments() -> list[list[list[tuple[float, float]]]]:
    """Each row's segments of scored tokens."""
    found = []
    for a, b, c in zip(G, T, MASK, strict=True):
        row, open_ = [], False
        for g, t, m in zip(a, b, c, strict=True):
            if m and not open_:
                row.append([])
            if m:
                row[-1].append((g, t))
            open_ = m
        found.append(row)
    return found


def moved(g: float, t: float) -> bool:
    return abs(math.exp(t) - math.exp(g)) > 0.3


PROBABILITIES = [abs(math.exp(t) - math.exp(g)) for g, t in TOKENS]
WEIGHTS = [math.exp(clamp(d, -20, 20)) for d in D]
TRUNCATED = [min(w, 2.0) for w in WEIGHTS]
HALF_TO_TWO = [clamp(w, 0.5, 2) for w in WEIGHTS]
MEANS = [fmean(t - g for g, t in row) for row in ROWS]
TRAIN_PPL = [math.exp(-fmean(t for _, t in row)) for row in ROWS]
ROLLOUT_PPL = [math.exp(-fmean(g for g, _ in row)) for row in ROWS]
SEQUENCE_WEIGHTS = [fmean(math.exp(t - g) for g, t in row) for row in ROWS]
MASKED_SEQUENCES = [r if (r := math.exp(s)) <= 3 else 0.0 for s in sums()]


def sample_size(weights: list[float]) -> float:
    mean = fmean(weights) + 1e-8
    return 1 / fmean((w / mean) ** 2 for w in weights)


def difference(g: float, t: float) -> float:
    return math.exp(t) - math.exp(g)


EXPECTED = {
    "nemo-rl": {
        "token_mult_prob_error": fmean(math.exp(abs(d)) for d in D),
        "gen_kl_error": fmean(map(k3, D)),
        "policy_kl_error": fmean(k3(-d) for d in D),
        "js_divergence_error": fmean(js(g, t) for g, t in TOKENS),
        "sampling_importance_ratio": fmean(map(math.exp, D)),
        "max_seq_mult_prob_error": max(of_rows(lambda g, t: math.exp(abs(t - g)))),
        "mean_seq_mult_prob_error": fmean(of_rows(lambda g, t: math.exp(abs(t - g)))),
        "min_seq_mult_prob_error": min(of_rows(lambda g, t: math.exp(abs(t - g)))),
    },
    "prime-rl": {
        "mismatch_kl/all/mean": fmean(map(k3, D)),
        "mismatch_kl/all/std": stdev(map(k3, D)),
        "mismatch_kl/all/max": max(map(k3, D)),
        "masked_mismatch_kl/mean": fmean(
            sum(k3(t - g) for g, t in row if moved(g, t)) / max(sum(moved(g, t) for g, t in row), 1)
            for row in ROWS
        ),
        "unmasked_mismatch_kl/mean": fmean(
            sum(k3(t - g) for g, t in row if not moved(g, t))
            / max(sum(not moved(g, t) for g, t in row), 1)
            for row in ROWS
        ),
        "is_masked/mean": fmean(of_rows(lambda g, t: float(moved(g, t)))),
    },
    "slime": {
        "train/train_rollout_logprob_abs_diff": fmean(of_rows(lambda g, t: abs(t - g))),
        "train/ois": fmean(SEQUENCE_WEIGHTS),
        "train/tis": fmean(SEQUENCE_WEIGHTS),
        "train/tis_abs": fmean(of_rows(lambda g, t: abs(math.exp(t - g) - 1))),
        "train/tis_clipfrac": fmean(of_rows(lambda g, t: float(math.exp(t - g) > 2))),
    },
    "miles": {
        "train/train_rollout_logprob_abs_diff": fmean(of_rows(lambda g, t: abs(t - g))),
        "train/train_rollout_kl": fmean(of_rows(lambda g, t: min(k3(t - g), 10))),
        "train/ess_ratio": fmean(
            sum(math.exp(t - g) for g, t in row) ** 2
            / sum(math.exp(2 * (t - g)) for g, t in row)
            / len(row)
            for row in ROWS
        ),
    },
    "verl": {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": max(PROBABILITIES),
        "training/rollout_probs_diff_mean": fmean(PROBABILITIES),
        "training/rollout_probs_diff_std": stdev(PROBABILITIES),
        "training/rollout_actor_probs_pearson_corr": pearson(
            [math.exp(t) for _, t in TOKENS], [math.exp(g) for g, _ in TOKENS]
        ),
        "rollout_corr/kl": fmean(-d for d in D),
        "rollout_corr/k3_kl": fmean(map(k3, D)),
        "rollout_corr/training_ppl": fmean(TRAIN_PPL),
        "rollout_corr/rollout_ppl": fmean(ROLLOUT_PPL),
        "rollout_corr/log_ppl_diff": -fmean(MEANS),
        "rollout_corr/log_ppl_diff_max": max(-m for m in MEANS),
        "rollout_corr/log_ppl_diff_min": min(-m for m in MEANS),
        "rollout_corr/ppl_ratio": fmean(math.exp(-m) for m in MEANS),
        "rollout_corr/chi2_token": fmean(w**2 for w in WEIGHTS) - 1,
        "rollout_corr/chi2_seq": fmean(math.exp(2 * clamp(s, -20, 20)) for s in sums()) - 1,
        "rollout_corr/rollout_is_mean": fmean(TRUNCATED),
        "rollout_corr/rollout_is_std": math.sqrt(
            fmean(w**2 for w in TRUNCATED) - fmean(TRUNCATED) ** 2
        ),
        "rollout_corr/rollout_is_eff_sample_size": sample_size(TRUNCATED),
        "rollout_corr/rollout_is_seq_std": stdev(of_rows(lambda g, t: min(math.exp(t - g), 2.0))),
        "rollout_corr/rollout_is_seq_fraction_high": fmean(w > 2 for w in SEQUENCE_WEIGHTS),
    },
    "trl": {
        "sampling/sampling_logp_difference/mean": fmean(map(abs, D)),
        "sampling/sampling_logp_difference/max": max(map(abs, D)),
        "sampling/importance_sampling_ratio/min": min(MASKED_SEQUENCES),
        "sampling/importance_sampling_ratio/mean": fmean(MASKED_SEQUENCES),
        "sampling/importance_sampling_ratio/max": max(MASKED_SEQUENCES),
    },
    "ms-swift": {
        "rollout_correction/kl": fmean(-d for d in D),
        "rollout_correction/k3_kl": fmean(min(k3(d), 10) for d in D),
        "rollout_correction/chi2_token": fmean(w**2 for w in WEIGHTS) - 1,
        "rollout_correction/chi2_seq": fmean(math.exp(2 * m) for m in MEANS) - 1,
        "rollout_correction/is_weight_mean": fmean(min(w, 2) for w in WEIGHTS),
        "rollout_correction/ess": sample_size(HALF_TO_TWO),
        "rollout_correction/clipped_frac": fmean(w > 2 for w in WEIGHTS),
    },
    "skyrl": {
        "policy/rollout_train_logprobs_abs_diff_mean": fmean(map(abs, D)),
        "policy/rollout_train_logprobs_abs_diff_std": stdev(map(abs, D)),
        "policy/rollout_train_logprobs_abs_diff_max": max(map(abs, D)),
        "policy/rollout_train_logprobs_abs_diff_min": min(map(abs, D)),
    },
    "roll": {
        "actor/train_infer_ratio_token_mean": fmean(SEQUENCE_WEIGHTS),
        "actor/train_infer_ratio_geometric_mean": fmean(math.exp(m) for m in MEANS),
        "actor/train_infer_ratio_sequence_mean": fmean(math.exp(s) for s in sums()),
        "actor/train_infer_ratio_segment_mean": fmean(
            sum(len(s) * math.exp(fmean(t - g for g, t in s)) for s in row) / sum(map(len, row))
            for row in segments()
        ),
        "actor/train_infer_diff_token_mean": fmean(of_rows(difference)),
        "actor/train_infer_diff_sequence_mean": fmean(
            sum(difference(g, t) for g, t in row) for row in ROWS
        ),
        "actor/train_infer_diff_segment_mean": fmean(of_rows(difference)),
    },
    "openrlhf": {"vllm_kl": fmean(-d for d in D)},
    "areal": {
        "behave_imp_weight/avg": fmean(map(math.exp, D)),
        "behave_approx_kl/avg": fmean(D),
    },
    "torchtitan": {
        "bit_wise/logprob_diff/mean": fmean(D),
        "bit_wise/logprob_diff/max": max(map(abs, D)),
        "bit_wise/ratio_tokens_different/mean": fmean(abs(d) > 1e-6 for d in D),
    },
    "tinker": {
        "optim/kl_sample_train_v1": fmean(-d for d in D),
        "optim/kl_sample_train_v2": fmean(d * d / 2 for d in D),
        "optim/entropy": fmean(-g for g, _ in TOKENS),
    },
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_metrics(framework: str) -> None:
    found = named()[framework]
    for name, value in EXPECTED[framework].items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_the_data_reaches_every_clip() -> None:
    assert max(D) > math.log(3)
    assert min(WEIGHTS) < 0.5
    assert any(moved(g, t) for g, t in TOKENS)
    assert 0.0 in MASKED_SEQUENCES
    assert any(len(row) == 2 for row in segments())


def test_a_nan_is_not_averaged_away_but_where_the_framework_does_so() -> None:
    g, t, mask = padded()
    t[2, 3] = math.nan
    found = framework_metrics(pairs_of(padded_sequences(0, g, t, mask)))
    assert math.isnan(found["nemo-rl"]["gen_kl_error"])
    assert math.isnan(found["verl"]["rollout_corr/kl"])
    # TRL omits NaN, and miles sets it to 0, so their dashboards show a number.
    assert math.isfinite(found["trl"]["sampling/sampling_logp_difference/mean"])
    assert math.isfinite(found["miles"]["train/train_rollout_kl"])


def test_kl_over_entropy_where_entropy_is_there() -> None:
    g, t, mask = padded()
    sequences = padded_sequences(0, g, t, mask)
    sequences.entropy[:] = np.linspace(0.5, 1.5, sequences.tokens)
    found = framework_metrics(pairs_of(sequences))["prime-rl"]["kl_ent_ratio/mean"]
    assert found == pytest.approx(fmean(map(k3, D)) / sequences.entropy[sequences.scored].mean())


def test_nothing_compared_has_no_metrics() -> None:
    g, t, mask = padded()
    assert framework_metrics(pairs_of(padded_sequences(0, g, t, mask & False))) == {}
