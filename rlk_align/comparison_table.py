"""comparison.parquet: every token of every edge, with its log-probs and its error at every site.

The table has a row for each (edge, sample, position), in the order of the batch, with the columns

    edge                            as in comparison.json
    sample, position, token, text   the id at that position and its text (null without the
                                    checkpoint's tokenizer)
    response                        whether the id was sampled, i.e. is not part of the prompt
    first_logprob, second_logprob   of the *next* token, in nats, by the edge's two passes; null
                                    where it was not sampled, or a dump's mask excludes it
    embed, layers.0.attn_norm, …    a column per site, in execution order: ‖b − a‖ / max(‖a‖, ‖b‖)
                                    of the row; 0 where its bits are equal, NaN where it is not
                                    finite, null where it was not compared or not kept; for
                                    `experts`, which are ids, 1 where the sets differ

Judging and drawing a run read this table and need neither torch nor the captures.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlk_align.errors import CorruptTrace
from rlk_align.files import whole_file
from rlk_align.text import one_line

HEAD = {
    "edge": pa.dictionary(pa.int32(), pa.string()),
    "sample": pa.int32(),
    "position": pa.int32(),
    "token": pa.int32(),
    "text": pa.dictionary(pa.int32(), pa.string()),
    "response": pa.bool_(),
    "first_logprob": pa.float64(),
    "second_logprob": pa.float64(),
}
"""The columns before the sites, and their types."""


def sites_of(table: pa.Table) -> list[str]:
    """Returns the sites of a table, in execution order."""
    return table.column_names[len(HEAD) :]


def save_rows(table: pa.Table, path: Path) -> None:
    """Writes a table. Raises OSError or an ArrowException where it cannot be written."""
    sites = sites_of(table)
    # pyarrow accepts only UTF-8 paths, so the file is opened here.
    with whole_file(path) as partial, partial.open("wb") as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            use_dictionary=list(HEAD),
            column_encoding=dict.fromkeys(sites, "BYTE_STREAM_SPLIT"),
            write_page_checksum=True,
        )


def load_rows(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads a table of `save_rows`, or some of its columns. Raises CorruptTrace for any other
    file."""
    try:
        with path.open("rb") as opened:
            file = pq.ParquetFile(opened, page_checksum_verification=True)
            schema = file.schema_arrow
            if {n: schema.field(n).type for n in schema.names[: len(HEAD)]} != HEAD:
                raise CorruptTrace(f"{path} does not have the columns of a comparison's rows")
            return file.read(columns)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorruptTrace(f"{path} cannot be read: {one_line(error)}") from error
