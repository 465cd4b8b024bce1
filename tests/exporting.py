"""Runs that are made of given traces, and what an export of them has to hold, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eyas.conversation import digest
from eyas.store import prepare_directory
from eyas.store.journal import Segment, encode_line
from eyas.store.manifest import Manifest
from eyas.store.parts import seal
from eyas.trace import Rejected, Trace

STOP = 9


def a_trace(
    thread: str, turn: int, prompt: Sequence[int], output: Sequence[int], **more: Any
) -> Trace:
    """A trace of the thread ``CONVERSATION/SAMPLE``."""
    name, _, sample = thread.partition("/")
    values: dict[str, Any] = {
        "id": f"{name}/{sample or 0}/{turn}",
        "conversation_id": name,
        "turn": turn,
        "sample": int(sample or 0),
        "key": digest(b"conversation", name.encode()).hex(),
        "prompt_ids": list(prompt),
        "output_ids": list(output),
        "finish_reason": "stop",
        "stop_id": STOP,
        "reasoning_start": None,
        "reasoning_end": None,
        **more,
    }
    return Trace(**values)


def make_run(path: Path, rows: Iterable[Trace | Rejected], *, parts: int = 1, **more: Any) -> Path:
    """A run of these rows, sealed as a capture seals them."""
    prepare_directory(path)
    every = list(rows)
    for number in range(1, parts + 1):
        if lines := [encode_line(row) for row in every[number - 1 :: parts]]:
            segment = Segment(path / "journal", number)
            segment.write(lines)
            segment.close()
            seal(path, number, segment.path)
    values = {"fingerprint": {"target": "t"}, "profile": {}, "tokenizer": "none", **more}
    Manifest(
        eyas="0", created="2026-01-01T00:00:00+00:00", date="2026-01-01", max_new_tokens=9, **values
    ).save(path)
    return path


class Plain(NamedTuple):
    """A row as anybody would write it."""

    input_ids: list[int]
    loss_mask: list[int]


def plain(trace: Trace, mask: str = "all") -> Plain:
    """A trace as a row, made without any of the exporter's code."""
    ids = [*trace.prompt_ids, *trace.output_ids]
    ones = [0] * len(trace.prompt_ids) + [1] * len(trace.output_ids)
    if mask == "no-reasoning" and trace.reasoning_start is not None:
        end = len(ids) if trace.reasoning_end is None else trace.reasoning_end
        for at in range(trace.reasoning_start, end):
            ones[at] = 0
    return Plain(ids, ones)


def read_rows(out: Path) -> dict[str, Plain]:
    """The rows of JSON Lines or Parquet, of one file or all in a directory, by id."""
    import pyarrow.parquet as pq

    found: dict[str, Plain] = {}
    files = sorted(out.rglob("*")) if out.is_dir() else [out]
    for file in files:
        rows: list[dict[str, Any]] = []
        if file.suffix == ".parquet":
            rows = pq.read_table(file).to_pylist()
        elif file.suffix == ".jsonl":
            rows = [json.loads(line) for line in file.read_bytes().splitlines()]
        for row in rows:
            assert row["id"] not in found, f"{row['id']} is there twice"
            found[row["id"]] = Plain(row["input_ids"], row["loss_mask"])
    return found
