"""Parquet with ``id``, ``input_ids``, ``loss_mask`` and the columns that were asked for.

``input_ids`` is ``list<int32>``, ``loss_mask`` ``list<int8>``; datasets, DuckDB and polars read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.export.forms import Form, Opening, carried_columns
from eyas.export.rows import loss_mask, numbers

_HELD_BYTES = 64 * 2**20
"""What all files together hold back until a row group is full."""
_GROUP_BYTES = 8 * 2**20
_ELEMENT = "list.element"


def list_of(kind: Any) -> Any:
    """The type of a list column, its items named as Parquet names them."""
    return pa.list_(pa.field("element", kind))


def with_mask(rows: Any, ids: Any, mask: Any) -> dict[str, Any]:
    """The three columns of every form of ids, the lists with items of these types."""
    column = rows.column("input_ids")
    starts = numbers(column.offsets)
    offsets = pa.array(starts - starts[0])
    values = numbers(column.values)[starts[0] : starts[-1]]
    dtype = np.dtype(ids.to_pandas_dtype())
    own = loss_mask(rows, np.dtype(mask.to_pandas_dtype()))
    return {
        "id": rows.column("id"),
        "input_ids": pa.ListArray.from_arrays(
            offsets, pa.array(values.astype(dtype, copy=False)), type=list_of(ids)
        ),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(own), type=list_of(mask)),
    }


class ParquetFile:
    """Writes one Parquet file, a row group when enough rows have come."""

    def __init__(self, opening: Opening) -> None:
        self._carried = carried_columns(opening.schema)
        more = [opening.schema.field(own).with_name(name) for own, name in self._carried]
        self._schema = pa.schema(
            [
                pa.field("id", pa.string()),
                pa.field("input_ids", list_of(pa.int32())),
                pa.field("loss_mask", list_of(pa.int8())),
                *more,
            ]
        )
        texts = [f.name for f in more if pa.types.is_string(f.type)]
        self._writer = pq.ParquetWriter(
            opening.path,
            self._schema,
            compression="zstd",
            compression_level=1,
            # Ids hardly repeat within a page: a dictionary of them costs time and saves nothing.
            use_dictionary=[f"loss_mask.{_ELEMENT}", *texts],
            # Nobody looks for rows by the least and largest of their ids.
            write_statistics=[f.name for f in self._schema if not pa.types.is_list(f.type)],
        )
        self._most = min(_GROUP_BYTES, max(2**18, _HELD_BYTES // opening.sinks))
        self._held: list[Any] = []
        self._bytes = 0

    def write(self, rows: Any) -> None:
        """Add a batch of rows."""
        self._held.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= self._most:
            self._put_down()

    def close(self) -> None:
        """Write what is held, and the file's end."""
        self._put_down()
        self._writer.close()

    def _put_down(self) -> None:
        if not self._held:
            return
        batches = []
        for rows in self._held:
            made = with_mask(rows, pa.int32(), pa.int8())
            made |= {name: rows.column(own) for own, name in self._carried}
            columns = [made[name] for name in self._schema.names]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._held, self._bytes = [], 0
        table = pa.Table.from_batches(batches)
        self._writer.write_table(table, row_group_size=max(1, len(table)))


FORM = Form(
    name="parquet",
    about="ids and mask in one Parquet file: datasets, DuckDB and polars read it",
    suffix=".parquet",
    open=ParquetFile,
)
