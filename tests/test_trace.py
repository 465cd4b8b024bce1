"""Traces as rows: the schema that others rely on, and ids that come back as they went."""

from __future__ import annotations

import datetime as dt
import io
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.store.journal import encode_line, read_segment
from eyas.store.parts import TRACES, parts, read_rows, seal
from eyas.trace import FORMAT_VERSION, Rejected, Trace, arrow_schema, from_record, to_table

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
COLUMNS = {
    "id": "string", "conversation_id": "string", "turn": "int32", "sample": "int32",
    "prompt_ids": "list<element: int32>", "output_ids": "list<element: int32>",
    "finish_reason": "string", "stop_id": "int32", "reasoning_start": "int32",
    "reasoning_end": "int32", "marks": "list<element: string>", "messages": "string",
    "metadata": "string", "source": "string", "template_kwargs": "string", "sampling": "string",
    "logprobs": "list<element: float>", "server": "string", "weight_version": "string",
}  # fmt: skip
"""Columns that others may rely on, with their types."""


def trace(**more: object) -> Trace:
    values: dict[str, object] = {
        "id": "a/0/0", "conversation_id": "a", "turn": 0, "sample": 0, "key": "00" * 16,
        "prompt_ids": [1, 2], "output_ids": [3], "finish_reason": "stop", "stop_id": 3,
        "reasoning_start": None, "reasoning_end": None, **more,
    }  # fmt: skip
    return Trace(**values)  # type: ignore[arg-type]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_columns_that_others_rely_on() -> None:
    schema = arrow_schema(Trace)
    assert {name: str(schema.field(name).type) for name in COLUMNS} == COLUMNS
    assert str(schema.field("finished_at").type) == "timestamp[ms, tz=UTC]"
    assert schema.metadata[b"eyas.format"] == str(FORMAT_VERSION).encode()
    for derived in ("input_ids", "loss_mask"):
        assert derived not in schema.names


def test_refused_rows_name_their_reason() -> None:
    names = arrow_schema(Rejected).names
    assert {"reason", "detail", "source", "line", "text", "prompt_ids", "output_ids"} <= set(names)


@given(IDS, IDS)
def test_the_training_sequence_is_the_ids_joined(prompt: list[int], output: list[int]) -> None:
    row = trace(prompt_ids=prompt, output_ids=output)
    assert row.input_ids == prompt + output
    assert row.loss_mask == [0] * len(prompt) + [1] * len(output)


@pytest.mark.parametrize(
    ("finish", "marks", "complete"),
    [("stop", [], True), ("length", ["truncated"], False), ("length", ["eos_at_cap"], True)],
)
def test_what_counts_as_complete(finish: str, marks: list[str], complete: bool) -> None:
    assert trace(finish_reason=finish, marks=marks).complete is complete


@given(st.lists(st.tuples(st.none() | IDS, st.none() | IDS), max_size=6))
def test_ids_survive_a_parquet_file(rows: list[tuple[list[int] | None, list[int] | None]]) -> None:
    columns = [
        orjson.dumps({name: value for name, value in asdict(Rejected(
            f"r{n}/0/0", f"r{n}", 0, 0, "00" * 16, "text", "differs", finished_at=float(n)
        )).items() if not name.endswith("_ids")})
        for n in range(len(rows))
    ]  # fmt: skip
    table = to_table(
        Rejected, columns, [orjson.dumps(p) for p, _ in rows], [orjson.dumps(o) for _, o in rows]
    )
    assert table.schema.equals(arrow_schema(Rejected), check_metadata=True)
    file = io.BytesIO()
    pq.write_table(table, file)
    read = [from_record(row) for row in pq.read_table(file).to_pylist()]
    assert [(row.prompt_ids, row.output_ids) for row in read] == rows
    assert [row.finished_at for row in read] == [float(n) for n in range(len(rows))]


@given(
    st.lists(st.tuples(TEXT, st.lists(TEXT, max_size=3), st.floats(-99, 0, width=32)), max_size=9)
)
def test_every_column_survives_sealing(values: list[tuple[str, list[str], float]]) -> None:
    rows = [
        trace(id=f"c{n}/0/0", messages=text, metadata=text, marks=marks, logprobs=[number],
              sampling=text * 300, joints=[n], seed=2**31 - 1, finished_at=n + 0.25,
              weight_version=text or None)
        for n, (text, marks, number) in enumerate(values)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for name in ("journal", "traces", "rejected"):
            (run / name).mkdir()
        segment = run / "journal" / "segment-000001.log"
        segment.write_bytes(b"".join(map(encode_line, rows)))
        seal(run, 1, segment)
        assert not segment.exists()
        read = [from_record(row) for part in parts(run, TRACES) for row in read_rows(part)]
    assert read == rows


def test_a_record_becomes_the_row_that_it_was() -> None:
    row = trace(marks=["loop"], logprobs=[-0.5], finished_at=1.5, weight_version="v")
    moment = dt.datetime.fromtimestamp(1.5, dt.UTC)
    assert from_record({**asdict(row), "finished_at": moment}) == row


@given(IDS, st.none() | IDS, TEXT, st.none() | TEXT)
def test_a_journal_line_gives_its_row_back(
    prompt: list[int], output: list[int] | None, text: str, message: str | None
) -> None:
    good = trace(prompt_ids=prompt, output_ids=output or [], messages=message, metadata=text)
    bad = Rejected("r/0/0", "r", 0, 0, "00", "text", text, prompt_ids=prompt, output_ids=output)
    lines = [encode_line(good), encode_line(bad)]
    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment-000001.log"
        path.write_bytes(b"".join(lines))
        assert [from_record(p.record()) for p in read_segment(path, "T")] == [good]
        assert [from_record(p.record()) for p in read_segment(path, "R")] == [bad]


def test_every_column_has_a_type() -> None:
    for kind in (Trace, Rejected):
        schema = arrow_schema(kind)
        assert schema.names == [f.name for f in fields(kind)]
        assert pa.null() not in schema.types
