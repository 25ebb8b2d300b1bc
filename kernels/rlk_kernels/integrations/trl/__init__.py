"""The kernels in TRL's GRPOTrainer, and in the vLLM that samples for it in the same process.

    from rlk_kernels.integrations.trl import with_kernels

    trainer = with_kernels(GRPOTrainer)(model=..., args=GRPOConfig(use_vllm=True, ...), ...)

The policy that is sampled and the policy that is trained then have the same log-probs, bit for bit:
TRL's own `sampling/sampling_logp_difference/max` is 0, and its importance ratios are 1. A module of
TRL is patched while the trainer's `__init__` runs; what stays are the forward of this trainer's
models, the `sync_weights` of its vLLM, and the kernels in vLLM (`vllm.register`).
"""

__all__ = ["with_kernels"]


def with_kernels(trainer: type) -> type:
    """Return a subclass of GRPOTrainer, or of a class derived from it, that uses the kernels in its
    model, in its reference model, and in the vLLM that it makes.

    The subclass takes the arguments of `trainer`. Its `__init__` raises NotSupported before a model
    is loaded, with a list of all settings that would make the two policies differ, and before vLLM
    starts for a model without kernels. Training ends with NotSupported where an operator was never
    computed by its kernel in the first step, and where vLLM's weights are not the trainer's after
    one of the first two synchronisations.
    Raises TypeError for a class that is not derived from GRPOTrainer.
    """
    from rlk_kernels.integrations.trl.trainer import derive

    return derive(trainer)
