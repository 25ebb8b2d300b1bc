"""The table of an imported run, written and read back."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlk_align.logs.dumps.table import SCHEMA, SINCE_FIRST, read_table, write_table


def test_what_is_missing_is_not_nan(tmp_path: Path) -> None:
    rows = [
        {
            "id": "a", "prompt_length": 2, "token_ids": [5, 6, 7, 8],
            "rollout_logprobs": [None, None, -1.0, float("nan")],
            "train_logprobs": [None, None, None, -2.0], "mask": [False, True, True, True],
        },
        {"id": "b", "prompt_length": 1, "token_ids": [5, 6], "rollout_logprobs": [None, -0.5]},
    ]  # fmt: skip
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    write_table([batch], tmp_path / "t.parquet")
    (read,) = read_table(tmp_path / "t.parquet")
    assert read.offsets.tolist() == [0, 4, 6]
    assert read.scored.tolist() == [False, True, True, True, False, True]
    assert read.rollout_missing.tolist() == [True, True, False, False, True, False]
    assert read.train_missing.tolist() == [True, True, True, False, True, True]
    assert np.isnan(read.rollout[3])
    assert read.compared.tolist() == [False, False, False, True, False, False]
    assert read.position.tolist() == [0, 1, 2, 3, 0, 1]
    assert read.steps.tolist() == [-1, -1]


def test_a_table_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt_length": 1, "token_ids": [5, 6], "rollout_logprobs": [None, -0.5]}]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    earlier = [name for name in SCHEMA.names if name not in SINCE_FIRST]
    pq.write_table(pa.table(batch).select(earlier), tmp_path / "t.parquet")
    (read,) = read_table(tmp_path / "t.parquet")
    assert read.samplers == [None]
    assert read.seeds_missing.tolist() == [True, True]
