"""The limits of tensor parallelism: into how many ranks a model can be divided."""

from rlk_align.errors import BadOption
from rlk_align.model.shape import ModelShape


def check_shared(engine: str, shape: ModelShape, tp: int, fused_qkv: bool, kernels: bool) -> None:
    """Raises BadOption if `tp` ranks cannot share the model.

    `fused_qkv`: whether the rows of q, k and v together are cut into equal slices. `kernels`:
    whether our kernels compute, which divide the outputs of every product among the ranks.
    """
    wrong = _unshared(shape, tp, fused_qkv, kernels)
    if wrong:
        fits = [n for n in (1, 2, 4, 8) if not _unshared(shape, n, fused_qkv, kernels)]
        raise BadOption(
            f"engine {engine!r}: tp={tp}: {wrong}",
            f"this model takes tp={'|'.join(map(str, fits))}",
        )


def _unshared(shape: ModelShape, tp: int, fused_qkv: bool, kernels: bool) -> str:
    """The part of the model that `tp` ranks cannot share; empty if they can share all of it."""
    # Layers with other heads have the same number of them for queries.
    kv = shape.kv_heads
    if (wide := shape.wide_kv_heads) and wide % tp and tp % wide:
        return f"{wide} key-value heads are neither a multiple nor a divisor of tp"
    qkv = (shape.heads + 2 * kv) * shape.head_dim
    if shape.heads % tp:
        return f"{shape.heads} heads cannot be divided among {tp} ranks"
    if kv % tp and tp % kv:
        return f"{kv} key-value heads are neither a multiple nor a divisor of tp"
    if shape.delta_key_heads % tp:
        keys = shape.delta_key_heads
        return f"{keys} heads of keys of a gated delta net cannot be divided among {tp} ranks"
    if shape.intermediate % tp:
        return f"{shape.intermediate} MLP features cannot be divided among {tp} ranks"
    if shape.expert_intermediate % tp:
        inner = shape.expert_intermediate
        return f"{inner} features of an expert cannot be divided among {tp} ranks"
    if fused_qkv and qkv % tp:
        return f"{qkv} rows of q, k and v cannot be divided among {tp} ranks"
    if kernels and shape.hidden % tp:
        return f"{shape.hidden} hidden features cannot be divided among {tp} ranks"
    return ""
