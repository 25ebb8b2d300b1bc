"""The columns of a trace's tables."""

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
    ]
)
"""rows and columns: a digest of each slice along dimension 0 and 1, so that a mismatch can be
located; shards: (rank, dimension, start, stop) of each rank's slice; replicas: the digest of every
further rank's copy; casts: the same digests of the parameter rounded to narrower dtypes."""

OLDER_WEIGHTS_SCHEMA = WEIGHTS_SCHEMA.remove(WEIGHTS_SCHEMA.get_field_index("casts"))
"""The schema of older traces, without casts."""
