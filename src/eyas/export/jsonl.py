"""``{"id", "input_ids", "loss_mask"}`` a line, which speculators and SpecForge read as it is.

Source: speculators 0.9.0 ``prepare-data`` and SpecForge 0.2.0 ``data.prompts_path`` take rows
of ids and a mask of the same length and ignore further keys.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import orjson

from eyas.export.rows import Row


def write_jsonl(path: Path, rows: Iterator[Row], compress: bool) -> None:
    """Write rows one a line, as they come."""
    with gzip.open(path, "wb", compresslevel=5) if compress else path.open("wb") as file:
        for row in rows:
            line = {"id": row.id, "input_ids": row.input_ids, "loss_mask": row.loss_mask}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
