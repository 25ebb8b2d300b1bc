"""gated_delta_rule: a linear attention whose state moves at the boundaries of chunks."""
