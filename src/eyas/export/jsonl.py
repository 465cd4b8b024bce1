"""``{"id", "input_ids", "loss_mask"}`` a line, which speculators and SpecForge read as it is.

Source: speculators 0.9.0 ``prepare-data`` and SpecForge 0.2.0 ``data.prompts_path`` take rows
of ids and a mask of the same length and ignore further keys.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import orjson

from eyas.trace import Trace


def write_jsonl(path: Path, traces: Iterator[Trace], compress: bool) -> None:
    """Write traces one a line, as they come."""
    with gzip.open(path, "wb", compresslevel=5) if compress else path.open("wb") as file:
        for trace in traces:
            row = {"id": trace.id, "input_ids": trace.input_ids, "loss_mask": trace.loss_mask}
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
