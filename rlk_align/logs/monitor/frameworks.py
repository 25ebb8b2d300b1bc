"""The metrics of RL frameworks under their own names, with their own formulas and defaults.

The numbers are those of a dashboard, so that both can be put side by side: whatever a framework
clips, clamps or averages by sequence is clipped, clamped and averaged here. Left out is what needs
a third set of log-probs, advantages, or a threshold that is off by default. A new framework is a
function and a line in FRAMEWORKS.

Read from the sources of August 2026: NeMo-RL 7ea279abf, prime-rl 559b44772, slime 624b824a8, miles
31f1ca961, verl 1dda039b9, TRL f2cd57710, ms-swift 3602360a5, SkyRL a9564572e, ROLL 8eb27cc2,
OpenRLHF 3c3be623, AReaL 4aef98d8d, torchtitan b5bcd76c6, and tinker-cookbook.
"""

from collections.abc import Callable

import numpy as np

from rlk_align.logs.monitor.pairs import Floats, Pairs
from rlk_align.logs.monitor.verl_rejection import rejection

Metrics = dict[str, float]
BOUND = 20.0
"""The log-ratio at which several frameworks clamp before they exponentiate."""


def framework_metrics(pairs: Pairs) -> dict[str, Metrics]:
    """Returns every framework's metrics; none where no token was compared."""
    if not len(pairs.g):
        return {}
    with np.errstate(all="ignore"):
        return {
            name: {k: float(v) for k, v in metrics(pairs).items()}
            for name, metrics in FRAMEWORKS.items()
        }


def nemo_rl(p: Pairs) -> Metrics:
    """NeMo-RL: nemo_rl/algorithms/loss/loss_functions.py and grpo.py. num_masked_seqs is at
    seq_logprob_error_threshold 2, as in its recipes; by default nothing is masked."""
    error = np.exp(np.abs(p.d))
    of_sequence = p.means(error)
    mixture = np.logaddexp(p.t, p.g) - np.log(2)
    divergence = _k3(p.t - mixture) + _k3(p.g - mixture)
    ratio = np.nan_to_num(p.ratio, nan=0.0, posinf=0.0, neginf=0.0)
    return {
        "token_mult_prob_error": error.mean(),
        "gen_kl_error": p.k3.mean(),
        "policy_kl_error": _k3(-p.d).mean(),
        "js_divergence_error": divergence.mean() / 2,
        "sampling_importance_ratio": ratio.mean(),
        "max_seq_mult_prob_error": of_sequence.max(),
        "mean_seq_mult_prob_error": of_sequence.mean(),
        "min_seq_mult_prob_error": of_sequence.min(),
        "num_masked_seqs": (of_sequence > 2).sum(),
    }


def prime_rl(p: Pairs) -> Metrics:
    """prime-rl: src/prime_rl/trainer/rl/{loss,train}.py, with the IPO loss's eps of 0.3."""
    masked = np.abs(np.exp(p.t) - np.exp(p.g)) > 0.3
    metrics = {
        "mismatch_kl/all/mean": p.k3.mean(),
        "mismatch_kl/all/std": _std(p.k3),
        "mismatch_kl/all/max": p.k3.max(),
        "masked_mismatch_kl/mean": _means_where(p, p.k3, masked).mean(),
        "unmasked_mismatch_kl/mean": _means_where(p, p.k3, ~masked).mean(),
        "is_masked/mean": p.means(masked.astype(float)).mean(),
    }
    entropy = p.entropy[~np.isnan(p.entropy)]
    if len(entropy) and entropy.mean() > 0:
        metrics["kl_ent_ratio/mean"] = p.k3.mean() / entropy.mean()
    return metrics


def slime(p: Pairs) -> Metrics:
    """slime: slime/backends/megatron_utils/loss.py, and its examples' mis.py; --tis-clip is 2. ois
    is as before the first update with --use-rollout-logprobs; without it, it is 1 there."""
    return {
        "train/train_rollout_logprob_abs_diff": p.means(np.abs(p.d)).mean(),
        "train/ois": p.means(p.ratio).mean(),
        "train/tis": p.means(p.ratio).mean(),
        "train/tis_abs": p.means(np.abs(p.ratio - 1)).mean(),
        "train/tis_clipfrac": p.means((p.ratio > 2).astype(float)).mean(),
        **{f"train/mis_{k}": v for k, v in _perplexities(p).items()},
        "train/mis_kl": p.means(-p.d).mean(),
        "train/mis_k3_kl": p.means(np.exp(p.d) - p.d - 1).mean(),
    }


def miles(p: Pairs) -> Metrics:
    """miles: miles/backends/training_utils/loss.py; NaN counts as 0 in the two differences, and in
    the log-ratio of ess_ratio, which is of the same ratios as slime's ois."""
    size = np.nan_to_num(np.abs(p.d), nan=0.0, posinf=0.0, neginf=0.0)
    kl = np.clip(_k3(np.clip(p.d, -BOUND, BOUND)), -10, 10)
    squares = np.exp(2 * np.clip(p.d, -BOUND, BOUND))
    of_sequence = np.exp(2 * np.clip(p.sums(p.d), -BOUND, BOUND))
    weights = np.exp(np.nan_to_num(p.d, nan=0.0, posinf=0.0, neginf=0.0))
    ess = p.sums(weights) ** 2 / (p.sums(weights**2) * p.counts)
    return slime(p) | {
        "train/ess_ratio": ess.mean(),
        "train/train_rollout_logprob_abs_diff": p.means(size).mean(),
        "train/train_rollout_kl": p.means(np.nan_to_num(kl, nan=0.0)).mean(),
        "train/mis_chi2_token": p.means(squares).mean() - 1,
        "train/mis_chi2_seq": of_sequence.mean() - 1,
    }


def verl(p: Pairs) -> Metrics:
    """verl: verl/utils/debug/metrics.py, and verl/trainer/ppo/rollout_corr_helper.py as of
    0.9.1, with the token-level weights' threshold of 2."""
    a, b = np.exp(p.t), np.exp(p.g)
    size = np.abs(a - b)
    prefix = "rollout_corr/"
    weights = np.exp(np.clip(p.d, -BOUND, BOUND))
    of_sequence = np.exp(2 * np.clip(p.sums(p.d), -BOUND, BOUND))
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": size.max(),
        "training/rollout_probs_diff_mean": size.mean(),
        "training/rollout_probs_diff_std": _std(size),
        "training/rollout_actor_probs_pearson_corr": _correlation(a, b),
        f"{prefix}kl": -p.d.mean(),
        f"{prefix}k3_kl": (np.exp(p.d) - p.d - 1).mean(),
        **{prefix + k: v for k, v in (_perplexities(p) | _log_perplexity_range(p)).items()},
        f"{prefix}chi2_token": (weights**2).mean() - 1,
        f"{prefix}chi2_seq": of_sequence.mean() - 1,
        **{f"{prefix}rollout_is_{k}": v for k, v in _verl_weights(p, weights).items()},
        **{prefix + k: v for k, v in rejection(p).items()},
    }


def trl(p: Pairs) -> Metrics:
    """TRL: trl/trainer/grpo_trainer.py; sequence_mask with a maximum of 3, its default, sets the
    ratio of a whole sequence to 0 above it. NaN is left out of the difference, and is a difference
    of 0 in a ratio."""
    size = np.abs(p.d)[~np.isnan(p.d)]
    ratio = np.exp(p.sums(np.nan_to_num(p.d, nan=0.0)))
    ratio = np.where(ratio > 3, 0.0, ratio)
    return {
        "sampling/sampling_logp_difference/mean": size.mean() if len(size) else 0.0,
        "sampling/sampling_logp_difference/max": size.max() if len(size) else 0.0,
        "sampling/importance_sampling_ratio/min": ratio.min(),
        "sampling/importance_sampling_ratio/mean": ratio.mean(),
        "sampling/importance_sampling_ratio/max": ratio.max(),
    }


def ms_swift(p: Pairs) -> Metrics:
    """ms-swift: swift/rlhf_trainers/grpo_trainer.py, with token_truncate at its threshold of 2.
    `chi2_seq` is of the geometric mean ratio, unlike verl's."""
    prefix = "rollout_correction/"
    d = np.clip(p.d, -BOUND, BOUND)
    ratio = np.exp(d)
    weights = np.minimum(ratio, 2.0)
    geometric = np.exp(np.clip(p.means(p.d), -BOUND, BOUND))
    return {
        f"{prefix}kl": -p.d.mean(),
        f"{prefix}k3_kl": np.clip(np.exp(d) - d - 1, -10, 10).mean(),
        **{prefix + k: v for k, v in (_perplexities(p) | _log_perplexity_range(p)).items()},
        f"{prefix}chi2_token": (ratio**2).mean() - 1,
        f"{prefix}chi2_seq": (geometric**2).mean() - 1,
        f"{prefix}is_weight_mean": weights.mean(),
        f"{prefix}ess": _sample_size(np.clip(weights, 0.5, 2.0)),
        f"{prefix}clipped_frac": (ratio > 2).mean(),
    }


def skyrl(p: Pairs) -> Metrics:
    """SkyRL: skyrl/train/trainer.py."""
    size = np.abs(p.d)
    name = "policy/rollout_train_logprobs_abs_diff_"
    figures = {"mean": size.mean(), "std": _std(size), "max": size.max(), "min": size.min()}
    return {name + k: v for k, v in figures.items()}


def roll(p: Pairs) -> Metrics:
    """ROLL: roll/utils/train_infer_corrections.py; each is a mean of means of sequences."""
    difference = np.exp(p.t) - np.exp(p.g)
    tokens = np.bincount(p.segment)

    def by_segment(values: Floats) -> Floats:
        return (np.bincount(p.segment, weights=values) / tokens)[p.segment]

    return {
        "actor/train_infer_ratio_token_mean": p.means(p.ratio).mean(),
        "actor/train_infer_ratio_geometric_mean": np.exp(p.means(p.d)).mean(),
        "actor/train_infer_ratio_sequence_mean": np.exp(p.sums(p.d)).mean(),
        "actor/train_infer_ratio_segment_mean": p.means(np.exp(by_segment(p.d))).mean(),
        "actor/train_infer_diff_token_mean": p.means(difference).mean(),
        "actor/train_infer_diff_geometric_mean": p.means(difference).mean(),
        "actor/train_infer_diff_sequence_mean": p.sums(difference).mean(),
        "actor/train_infer_diff_segment_mean": p.means(by_segment(difference)).mean(),
    }


def openrlhf(p: Pairs) -> Metrics:
    """OpenRLHF: openrlhf/models/loss.py; k1, which may be negative."""
    return {"vllm_kl": -p.d.mean()}


def areal(p: Pairs) -> Metrics:
    """AReaL: areal/utils/functional.py without a cap of weights, its default, and its pull request
    of rollout_train metrics."""
    size = np.abs(p.d)
    return {
        "behave_imp_weight/avg": p.ratio.mean(),
        "behave_approx_kl/avg": p.d.mean(),
        "rollout_train_k3_kl/avg": p.k3.mean(),
        "rollout_train_logp_abs_diff/avg": size.mean(),
        "rollout_train_logp_sq_diff/avg": (p.d**2).mean(),
        "rollout_train_extreme_frac_tau2/avg": (size > np.log(2)).mean(),
        "rollout_train_extreme_frac_tau5/avg": (size > np.log(5)).mean(),
    }


def torchtitan(p: Pairs) -> Metrics:
    """torchtitan: torchtitan/experiments/rl; the mean is signed, the maximum is not."""
    size = np.abs(p.d)
    return {
        "bit_wise/logprob_diff/mean": p.d.mean(),
        "bit_wise/logprob_diff/max": size.max(),
        "bit_wise/ratio_tokens_different/mean": (size > 1e-6).mean(),
    }


def tinker(p: Pairs) -> Metrics:
    """tinker: tinker_cookbook/rl/metrics.py."""
    return {
        "optim/kl_sample_train_v1": -p.d.mean(),
        "optim/kl_sample_train_v2": (p.d**2).mean() / 2,
        "optim/entropy": -p.g.mean(),
    }


FRAMEWORKS: dict[str, Callable[[Pairs], Metrics]] = {
    "nemo-rl": nemo_rl,
    "prime-rl": prime_rl,
    "slime": slime,
    "miles": miles,
    "verl": verl,
    "trl": trl,
    "ms-swift": ms_swift,
    "skyrl": skyrl,
    "roll": roll,
    "openrlhf": openrlhf,
    "areal": areal,
    "torchtitan": torchtitan,
    "tinker": tinker,
}


def _k3(log_ratio: Floats) -> Floats:
    return np.expm1(log_ratio) - log_ratio


def _std(values: Floats) -> float:
    """With one degree of freedom less; NaN for a single value, as torch has it."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def _correlation(a: Floats, b: Floats) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def _means_where(p: Pairs, values: Floats, where: np.ndarray) -> Floats:
    """The mean of each sequence over some of its tokens, 0 where it has none."""
    return p.sums(np.where(where, values, 0.0)) / np.maximum(p.sums(where.astype(float)), 1)


def _sample_size(weights: Floats) -> float:
    return float(1 / ((weights / (weights.mean() + 1e-8)) ** 2).mean())


def _perplexities(p: Pairs) -> Metrics:
    """The perplexities of sequences, averaged over the sequences."""
    train, rollout = -p.means(p.t), -p.means(p.g)
    return {
        "training_ppl": np.exp(train).mean(),
        "training_log_ppl": train.mean(),
        "rollout_ppl": np.exp(rollout).mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": (train - rollout).mean(),
        "log_ppl_abs_diff": np.abs(train - rollout).mean(),
        "ppl_ratio": np.exp(train - rollout).mean(),
    }


def _log_perplexity_range(p: Pairs) -> Metrics:
    difference = -p.means(p.d)
    return {"log_ppl_diff_max": difference.max(), "log_ppl_diff_min": difference.min()}


def _verl_weights(p: Pairs, raw: Floats) -> Metrics:
    """The weights truncated at 2; the shares beyond a threshold are of what they were before. (An
    older verl has all of it before truncation.)"""
    weights = np.minimum(raw, 2.0)
    of_sequence, raw_of_sequence = p.means(weights), p.means(raw)
    return {
        "mean": weights.mean(),
        "max": weights.max(),
        "min": weights.min(),
        "std": weights.std(),
        "ratio_fraction_high": (raw > 2).mean(),
        "ratio_fraction_low": (raw < 0.5).mean(),
        "eff_sample_size": _sample_size(weights),
        "seq_mean": of_sequence.mean(),
        "seq_std": _std(of_sequence) if len(of_sequence) > 1 else 0.0,
        "seq_max": of_sequence.max(),
        "seq_min": of_sequence.min(),
        "seq_max_deviation": np.abs(of_sequence - 1).max(),
        "seq_fraction_high": (raw_of_sequence > 2).mean(),
        "seq_fraction_low": (raw_of_sequence < 0.5).mean(),
    }
