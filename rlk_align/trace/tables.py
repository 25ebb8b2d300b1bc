"""The columns of a trace's tables."""

from collections.abc import Iterable

import pyarrow as pa

ROWS_SCHEMA = pa.schema(
    [
        ("site", pa.string()),
        ("sample", pa.int32()),
        ("position", pa.int32()),
        ("digest_0", pa.int64()),
        ("digest_1", pa.int64()),
        ("norm", pa.float64()),
        ("absmax", pa.float64()),
        ("nonfinite", pa.int64()),
        ("shard", pa.int32()),
        ("index", pa.int64()),
    ]
)
"""norm, absmax and nonfinite are null in digest-only passes; shard and index are null for rows
without a value."""

WEIGHTS_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("dtype", pa.string()),
        ("digest", pa.string()),
        ("rows", pa.list_(pa.int64())),
        ("columns", pa.list_(pa.int64())),
        ("shards", pa.list_(pa.list_(pa.int64(), 4))),
        ("replicas", pa.list_(pa.string())),
        (
            "casts",
            pa.list_(
                pa.struct(
                    [
                        ("dtype", pa.string()),
                        ("digest", pa.string()),
                        ("rows", pa.list_(pa.int64())),
                        ("columns", pa.list_(pa.int64())),
                    ]
                )
            ),
        ),
        ("derived", pa.string()),
        ("held", pa.string()),
    ]
)
"""rows and columns: a digest of each slice along dimension 0 and 1, so that a mismatch can be
located; shards: (rank, dimension, start, stop) of each rank's slice; replicas: the digest of every
further rank's copy; casts: the same digests of the parameter rounded to narrower dtypes; derived:
the module that computes with a copy of the parameter, whose values these are; held: the digest of
the parameter beside such a copy."""
_ADDED: dict[str, pa.Array] = {
    "casts": pa.array([[]], WEIGHTS_SCHEMA.field("casts").type),
    "derived": pa.array([""]),
    "held": pa.array([""]),
}
"""Column that older traces lack -> its value in each of their rows."""


def _without(*columns: str) -> pa.Schema:
    return pa.schema([f for f in WEIGHTS_SCHEMA if f.name not in columns])


WEIGHTS_SCHEMAS = (WEIGHTS_SCHEMA, _without("derived", "held"), _without(*_ADDED))
"""The schema of today's traces, and those of older ones."""


def with_added(table: pa.Table, columns: Iterable[str], rows: int) -> pa.Table:
    """A table of weights with the asked columns that an older trace lacks."""
    for name in columns:
        if name not in table.column_names:
            values = _ADDED[name].take(pa.array([0] * rows, pa.int64()))
            table = table.append_column(WEIGHTS_SCHEMA.field(name), values)
    return table
