"""Whether the ranks of tensor parallelism can share a model."""

from rlk_align.engines.info import Asked
from rlk_align.errors import BadOption
from rlk_align.model.families import ModelShape


def check_shared(engine: str, shape: ModelShape, tp: int, fused_qkv: bool, kernels: bool) -> None:
    """Raises BadOption where `tp` ranks cannot share the model.

    `fused_qkv`: whether the rows of q, k and v together are cut into equal slices. `kernels`:
    whether ours compute, which share the outputs of every product.
    """
    wrong = _unshared(shape, tp, fused_qkv, kernels)
    if wrong:
        fits = [n for n in (1, 2, 4, 8) if not _unshared(shape, n, fused_qkv, kernels)]
        raise BadOption(
            f"engine {engine!r}: tp={tp}: {wrong}",
            f"this model takes tp={'|'.join(map(str, fits))}",
        )


def _unshared(shape: ModelShape, tp: int, fused_qkv: bool, kernels: bool) -> str:
    """What of the model `tp` ranks cannot share; empty where they can share it all."""
    kv = shape.kv_heads
    qkv = (shape.heads + 2 * kv) * shape.head_dim
    if shape.heads % tp:
        return f"{shape.heads} heads cannot be shared by {tp} ranks"
    if kv % tp and tp % kv:
        return f"{kv} key-value heads are neither a multiple nor a divisor of tp"
    if shape.intermediate % tp:
        return f"{shape.intermediate} MLP features cannot be shared by {tp} ranks"
    if fused_qkv and qkv % tp:
        return f"{qkv} rows of q, k and v cannot be shared by {tp} ranks"
    if kernels and shape.hidden % tp:
        return f"{shape.hidden} hidden features cannot be shared by {tp} ranks"
    return ""


def check_heads(engine: str, shape: ModelShape, option: Asked, kernels: bool) -> None:
    """Raises BadOption where the kernels cannot exchange heads for rows between `cp` ranks, or
    sparse layers are to be computed on slices of sequences."""
    cp, tp = int(option("cp") or 1), int(option("tp") or 1)
    if cp > 1 and shape.experts:
        raise BadOption(f"engine {engine!r}: cp={cp} does not take sparse layers", "cp=1")
    heads = max(shape.kv_heads // tp, 1)
    excluded = str(option("except") or "").split("+")
    if kernels and heads % cp and "attn" not in excluded:
        fits = [n for n in (1, 2, 4, 8) if heads % n == 0]
        raise BadOption(
            f"engine {engine!r}: cp={cp}: the kernels exchange heads for rows, and {cp} ranks "
            f"cannot share {heads} key-value heads" + (f" of tp={tp}" if tp > 1 else ""),
            f"this model takes cp={'|'.join(map(str, fits))} with kernels=rlk",
        )


def check_alone(engine: str, shape: ModelShape, tp: object) -> None:
    """Raises BadOption where ranks are to share a sparse model."""
    if shape.experts and tp not in (None, 1):
        raise BadOption(f"engine {engine!r}: tp={tp} does not take sparse layers", "tp=1")
