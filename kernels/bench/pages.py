"""A page of Markdown from the record of a part."""

import tables
import tables_attention_training
import tables_linear_logp

PAGES = {
    "linear": tables.linear,
    "products": tables.products,
    "attention": tables.attention,
    "attention_training": tables_attention_training.training,
    "decode": tables.decode,
    "host": tables.host,
    "rows": tables.rows,
    "linear_logp": tables_linear_logp.time_and_memory,
    "linear_logp_rivals": tables_linear_logp.rivals,
    "linear_logp_precision": tables_linear_logp.precision,
    "linear_logp_groups": tables_linear_logp.groups,
}


def render(part: str, record: dict) -> str:
    """Where, when and of what commit it was measured, then the part's tables."""
    where, top = record["environment"], record["ceilings"]
    lines = [
        f"# {part}",
        "",
        f"{where['gpu']}, torch {where['torch']}, Triton {where['triton']}, {where['date']}, "
        f"commit {where['commit'] or 'unknown'}. Ceilings measured in this run: copy "
        f"{top['copy_gbs']:.0f} GB/s, bf16 matrix product {top['tflops']:.0f} TFLOP/s.",
        "",
    ]
    return "\n".join(lines + PAGES[part](record))
