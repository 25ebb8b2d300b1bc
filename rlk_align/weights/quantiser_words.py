"""What became of quantised weights, in words."""

from collections.abc import Mapping

from rlk_align.weights.quantiser import Kind, Origin


def why_left_out(entry: str) -> str:
    """Why modules are not quantised that config.json does not list; `entry`: the entry of its list
    that is a part of their names, empty if there is none."""
    if not entry:
        return "config.json does not list them, so that engines expect fp8 and scales there"
    return (
        f"the entry {entry!r} of config.json's list of modules that are not quantised is only a "
        "part of their names: the quantiser matched it as a substring, and an engine that matches "
        "whole names expects fp8 and scales there"
    )


def words_of(kind: Kind, origins: Mapping[str, Origin]) -> str:
    """What the quantised weights of one kind are, beside the other side's."""
    differ, of = (sum(getattr(o, n) for o in origins.values()) for n in ("values", "of"))
    scales, of_scales = (
        sum(getattr(o, n) for o in origins.values()) for n in ("scales", "of_scales")
    )
    share = f"{differ:,} of {of:,} values and {scales:,} of {of_scales:,} scales"
    match kind:
        case "image":
            return "the quantiser's image of the other side's weights, bit by bit,"
        case "powers of two":
            return (
                "their scales are rounded up to powers of two, which config.json does not state by "
                f"scale_fmt=ue8m0; {share} are not those of float32 scales (in TransformerEngine "
                "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 keeps these)"
            )
        case "float32 scales":
            return (
                "their scales are in float32, and config.json states powers of two by "
                f"scale_fmt=ue8m0; {share} differ"
            )
        case "masters":
            return (
                "the image of wider weights, which round to those that the other side computes "
                f"with; {share} are not the image of these: the quantiser read the float32 "
                "masters, and the other side their export"
            )
        case "export":
            return (
                "the image of the other side's weights after these were rounded to bfloat16; "
                f"{share} are not the image of its float32 weights: the quantiser read the "
                "bfloat16 export, and the other side computes with the masters"
            )
        case "range":
            return (
                "scaled to ±240, the range of e4m3fnuz (AMD), and not to ±448, that of e4m3; "
                f"{share} differ"
            )
        case "one scale":
            return (
                "all blocks of a matrix have one scale, that of its largest entry: they were "
                f"quantised by tensor, not by block; {share} differ"
            )
        case "order":
            return (
                "the scales are those of other blocks: transposed, or stacked in another order; "
                f"{share} differ"
            )
    return (
        f"the image of other weights than the other side's ({share} differ): of an earlier step, "
        "or by another quantiser,"
    )
