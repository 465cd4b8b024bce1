"""``{"id", "input_ids", "loss_mask"}`` a line, which speculators and SpecForge read as it is.

Source: speculators 0.9.0 ``prepare-data`` and SpecForge 0.2.0 ``data.prompts_path`` take rows
of ids and a mask of the same length and ignore further keys.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson

from eyas.export.forms import Form, Opening, carried_columns
from eyas.export.rows import loss_mask, numbers

_NUMPY = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def open_lines(path: Path) -> Any:
    """A file for lines; a name that ends in ``.gz`` is compressed."""
    if path.suffix == ".gz":
        return gzip.open(path, "wb", compresslevel=5)
    return path.open("wb")


class JsonLines:
    """Writes rows one a line, as they come."""

    def __init__(self, opening: Opening) -> None:
        self._file = open_lines(opening.path)

    def write(self, rows: Any) -> None:
        """Add a batch of rows."""
        column = rows.column("input_ids")
        starts, mask = numbers(column.offsets), loss_mask(rows)
        ids = numbers(column.values)[starts[0] : starts[-1]]
        ends = (starts - starts[0]).tolist()
        more = [(name, rows.column(own).to_pylist()) for own, name in carried_columns(rows.schema)]
        for at, row_id in enumerate(rows.column("id").to_pylist()):
            span = slice(ends[at], ends[at + 1])
            line = {"id": row_id, "input_ids": ids[span], "loss_mask": mask[span]}
            for name, values in more:
                line[name] = values[at]
            self._file.write(orjson.dumps(line, option=_NUMPY))

    def close(self) -> None:
        """Write the file's end."""
        self._file.close()


FORM = Form(
    name="jsonl",
    about="ids and mask, one row a line: speculators' prepare-data and SpecForge read it",
    suffix=".jsonl",
    open=JsonLines,
    cuts_at=8192,
    trainer=(
        "speculators prepare-data cuts rows on the right at --seq-length (8,192 unless told "
        "otherwise), drops rows without a supervised id then, and shuffles: its row i is not line "
        "i. It drops other columns",
    ),
)
