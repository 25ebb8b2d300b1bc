"""The metrics of RL frameworks under their own names, with their own formulas and defaults.

The numbers are those of the framework's dashboard, so that the two can be compared: values are
clipped, clamped and averaged by sequence as the framework does it. Metrics are omitted if they need
a third set of log-probs, advantages, or an option that is off by default. A new framework is a
function and a line in FRAMEWORKS.

Each function names the file that it follows and the commit at which the file was read. Later
versions of a framework may compute something else.
"""

from collections.abc import Callable

import numpy as np

from rlk_align.interval import Floats
from rlk_align.logs.monitor.pairs import Pairs

Metrics = dict[str, float]
BOUND = 20.0
"""The largest |log-ratio| that several frameworks exponentiate."""


def framework_metrics(pairs: Pairs) -> dict[str, Metrics]:
    """Returns every framework's metrics; empty if no token was compared."""
    if not len(pairs.g):
        return {}
    with np.errstate(all="ignore"):
        return {
            name: {k: float(v) for k, v in metrics(pairs).items()}
            for name, metrics in FRAMEWORKS.items()
        }


def nemo_rl(p: Pairs) -> Metrics:
    """NeMo-RL 7ea279abf: nemo_rl/algorithms/loss/loss_functions.py and grpo.py."""
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
    }


def prime_rl(p: Pairs) -> Metrics:
    """prime-rl 559b44772: src/prime_rl/trainer/rl/{loss,train}.py, with eps of the IPO loss 0.3."""
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
    """slime 624b824a8: slime/backends/megatron_utils/loss.py, with a --tis-clip of 2. `ois` is the
    value before the first update with --use-rollout-logprobs; without that option it is 1."""
    return {
        "train/train_rollout_logprob_abs_diff": p.means(np.abs(p.d)).mean(),
        "train/ois": p.means(p.ratio).mean(),
        "train/tis": p.means(p.ratio).mean(),
        "train/tis_abs": p.means(np.abs(p.ratio - 1)).mean(),
        "train/tis_clipfrac": p.means((p.ratio > 2).astype(float)).mean(),
    }


def miles(p: Pairs) -> Metrics:
    """miles 31f1ca961: miles/backends/training_utils/loss.py. NaN counts as 0 in the two
    differences and in the log-ratio of `ess_ratio`, which is of the same ratios as slime's
    `ois`."""
    size = np.nan_to_num(np.abs(p.d), nan=0.0, posinf=0.0, neginf=0.0)
    kl = np.clip(_k3(np.clip(p.d, -BOUND, BOUND)), -10, 10)
    weights = np.exp(np.nan_to_num(p.d, nan=0.0, posinf=0.0, neginf=0.0))
    ess = p.sums(weights) ** 2 / (p.sums(weights**2) * p.counts)
    return slime(p) | {
        "train/ess_ratio": ess.mean(),
        "train/train_rollout_logprob_abs_diff": p.means(size).mean(),
        "train/train_rollout_kl": p.means(np.nan_to_num(kl, nan=0.0)).mean(),
    }


def verl(p: Pairs) -> Metrics:
    """verl 1dda039b9: verl/utils/debug/metrics.py, and verl/trainer/ppo/rollout_corr_helper.py as
    of 0.9.1, with token-level weights truncated at 2."""
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
    }


def trl(p: Pairs) -> Metrics:
    """TRL f2cd57710: trl/trainer/grpo_trainer.py. Its default, sequence_mask with a maximum of 3,
    sets the ratio of a whole sequence to 0 above the maximum. NaN is left out of the difference,
    and counts as a difference of 0 in a ratio."""
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
    """ms-swift 3602360a5: swift/rlhf_trainers/grpo_trainer.py, with token_truncate at 2. `chi2_seq`
    is of the geometric mean ratio, unlike verl's."""
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
    """SkyRL a9564572e: skyrl/train/trainer.py."""
    size = np.abs(p.d)
    name = "policy/rollout_train_logprobs_abs_diff_"
    figures = {"mean": size.mean(), "std": _std(size), "max": size.max(), "min": size.min()}
    return {name + k: v for k, v in figures.items()}


def roll(p: Pairs) -> Metrics:
    """ROLL 8eb27cc2: roll/utils/train_infer_corrections.py; all are means of means of sequences."""
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
    """OpenRLHF 3c3be623: openrlhf/models/loss.py; k1, which may be negative."""
    return {"vllm_kl": -p.d.mean()}


def areal(p: Pairs) -> Metrics:
    """AReaL 4aef98d8d: areal/utils/functional.py, without a cap on weights."""
    return {"behave_imp_weight/avg": p.ratio.mean(), "behave_approx_kl/avg": p.d.mean()}


def torchtitan(p: Pairs) -> Metrics:
    """torchtitan b5bcd76c6: torchtitan/experiments/rl; the mean is signed, the maximum is not."""
    size = np.abs(p.d)
    return {
        "bit_wise/logprob_diff/mean": p.d.mean(),
        "bit_wise/logprob_diff/max": size.max(),
        "bit_wise/ratio_tokens_different/mean": (size > 1e-6).mean(),
    }


def tinker(p: Pairs) -> Metrics:
    """tinker-cookbook 1f6561155: tinker_cookbook/rl/metrics.py."""
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
    """The unbiased standard deviation; NaN for a single value, as in torch."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def _correlation(a: Floats, b: Floats) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def _means_where(p: Pairs, values: Floats, where: np.ndarray) -> Floats:
    """The mean of each sequence over some of its tokens, 0 if it has no such token."""
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
    """The metrics of the weights truncated at 2; the fractions beyond a threshold are of the raw
    weights. (Older versions of verl report all of them before truncation.)"""
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
