"""The journal, the lock, the parts: whole or not at all."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.conversation import digest
from eyas.errors import DamagedRun, RunLocked
from eyas.store import (
    REJECTED,
    TRACES,
    Ledger,
    Run,
    Writer,
    WriterLock,
    prepare_directory,
    seal_leftovers,
)
from eyas.store.journal import encode_line, read_segment
from eyas.store.lock import _process_start
from eyas.store.manifest import Manifest
from eyas.store.parts import parts
from eyas.trace import Rejected, Trace, arrow_schema, from_record


def trace(at: int, **more: object) -> Trace:
    key = digest(str(at).encode()).hex()
    values: dict[str, object] = {"reasoning_start": 1, "reasoning_end": 2, **more}
    return Trace(f"c{at}/0/0", f"c{at}", 0, 0, key, [at, 1, 2], [3, 4], "stop", 4, **values)  # type: ignore[arg-type]


def refused(at: int) -> Rejected:
    return Rejected(
        f"r{at}/0/0", f"r{at}", 0, 0, digest(b"r", bytes([at])).hex(), "text", "differs"
    )


def make_run(path: Path) -> Path:
    prepare_directory(path)
    Manifest(eyas="0", created="", date="2026-01-02", fingerprint={}, profile={},
             max_new_tokens=1, tokenizer="").save(path)  # fmt: skip
    return path


def open_writer(path: Path, **more: float) -> tuple[Writer, WriterLock]:
    lock = WriterLock(path)
    lock.acquire()
    return Writer(path, lock, **more), lock  # type: ignore[arg-type]


LINES = [encode_line(trace(at, messages="[\n]" * at)) for at in range(6)]


@given(st.integers(0, sum(map(len, LINES))), st.binary(max_size=12))
def test_a_torn_tail_costs_only_itself(cut: int, noise: bytes) -> None:
    """A journal cut anywhere, with noise behind it, gives every line that was whole."""
    import tempfile

    whole, end = 0, 0
    for line in LINES:
        end += len(line)
        whole += end <= cut
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment-000001.log"
        path.write_bytes(b"".join(LINES)[:cut] + noise.replace(b"\n", b""))
        rows = [packed.record() for packed in read_segment(path, "T")]
    assert [row["id"] for row in rows[:whole]] == [f"c{at}/0/0" for at in range(whole)]
    assert len(rows) - whole in (0, 1)  # one more only if the noise happens to be right


@given(st.integers(0, sum(map(len, LINES)) - 1), st.integers(1, 255))
def test_a_damaged_byte_costs_at_most_two_lines(at: int, flip: int) -> None:
    import tempfile

    data = bytearray(b"".join(LINES))
    data[at] ^= flip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment-000001.log"
        path.write_bytes(bytes(data))
        rows = [packed.record() for packed in read_segment(path, "T")]
    good = [json.loads(json.dumps(row)) for row in rows]
    wanted = {f"c{n}/0/0": n for n in range(6)}
    assert len(good) >= 4
    assert all(row["prompt_ids"] == [wanted[row["id"]], 1, 2] for row in good)


def test_rows_come_back_as_they_were_put(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer, lock = open_writer(path)
    first = trace(1, marks=["loop"], logprobs=[-0.5, -1.0], weight_version="v", finished_at=12.5)
    writer.put(first, refused(1))
    writer.flush()
    assert (writer.done, writer.rejected) == (1, 1)
    run = Run(path)
    assert list(run.traces()) == [first]  # still in the journal
    writer.close()
    lock.release()
    assert not list((path / "journal").iterdir())
    assert list(run.traces()) == [first]  # in a part now
    assert [row.output_ids for row in run.rejected()] == [None]
    assert run.find("c1/0/0") == run.find("c1") == first
    assert run.find("nobody") is None


def test_a_damaged_byte_of_a_part_never_becomes_another_id(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer, lock = open_writer(path)
    writer.put(*(trace(at, messages="[\n]" * at) for at in range(40)))
    writer.close()
    lock.release()
    (part,) = (path / TRACES).iterdir()
    whole, rows = part.read_bytes(), list(Run(path).traces())
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")  # where the file's own index is
    refused_at = 0
    for at in range(4, end, 5):
        part.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        try:
            assert list(Run(path).traces()) == rows
        except DamagedRun as error:
            assert "part-000001.parquet cannot be read" in str(error)
            refused_at += 1
    assert refused_at > (end - 4) // 5 // 2


def test_sealing_again_after_a_crash_changes_nothing(tmp_path: Path) -> None:
    """The process dies between writing the part and deleting the segment."""
    path = make_run(tmp_path / "run")
    writer, lock = open_writer(path)
    writer.put(*(trace(at) for at in range(5)), refused(1))
    writer.flush()
    (segment,) = (path / "journal").iterdir()
    kept = segment.read_bytes()
    writer.close()
    lock.release()
    (part,) = (path / TRACES).iterdir()
    before = part.read_bytes()
    segment.write_bytes(kept)
    assert len(list(Run(path).traces())) == 5  # seen once, though it lies in both
    assert seal_leftovers(path) == 1
    assert part.read_bytes() == before
    assert (Ledger.load(path).done, Ledger.load(path).rejected) == (5, 1)


def test_segments_are_sealed_as_they_fill(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer, lock = open_writer(path, sync_every_s=0.0, seal_bytes=2000)
    for at in range(40):
        writer.put(trace(at))
        writer.flush()
    assert len(list((path / TRACES).iterdir())) > 3
    assert len(list(Run(path).traces())) == 40
    writer.close()
    lock.release()
    ids = [row.id for row in Run(path).traces()]
    assert ids == [f"c{at}/0/0" for at in range(40)]


def test_a_lock_that_is_held_names_its_holder(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    first.acquire()
    with pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_dead_holder_is_recognised(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    lock.acquire()
    holder = json.loads(lock.path.read_text())
    lock.release()
    lock.path.write_text(json.dumps({**holder, "started": "0"}))  # the number was given again
    WriterLock(tmp_path).acquire()
    assert _process_start(os.getpid()) == holder["started"]


def test_a_holder_elsewhere_lives_by_its_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "writer.lock"
    elsewhere = {"pid": 1, "host": socket.gethostname() + "-other", "token": "t", "beats": 0}
    path.write_text(json.dumps(elsewhere))
    WriterLock(tmp_path).acquire(watch_s=0.1)  # stands still: taken over
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_writer_whose_lock_was_taken_stops(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer, lock = open_writer(path)
    lock.lost.set()
    writer.put(trace(1))
    with pytest.raises(Exception, match="taken over"):
        writer.flush()
    assert writer.done == 0


def test_other_readers_read_the_parts(tmp_path: Path) -> None:
    """DuckDB, polars and datasets see the same ids, and the documented types."""
    path = make_run(tmp_path / "run")
    writer, lock = open_writer(path)
    writer.put(*(trace(at) for at in range(3)))
    writer.close()
    lock.release()
    import duckdb
    import polars
    from datasets import load_dataset

    glob = str(path / "traces" / "*.parquet")
    rows = duckdb.sql(f"select id, prompt_ids, output_ids from '{glob}' order by id").fetchall()
    assert rows == [(f"c{at}/0/0", [at, 1, 2], [3, 4]) for at in range(3)]
    frame = polars.read_parquet(glob)
    assert frame.schema["output_ids"] == polars.List(polars.Int32)
    assert frame["prompt_ids"].to_list() == [[at, 1, 2] for at in range(3)]
    found = load_dataset("parquet", data_files=glob, cache_dir=str(tmp_path / "hf"))["train"]
    assert found["prompt_ids"][:] == [[at, 1, 2] for at in range(3)]


def test_batches_hold_what_records_do_while_the_run_is_written(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer, lock = open_writer(path, sync_every_s=0.0, seal_bytes=1)
    for at in range(7):
        writer.put(trace(at, joints=[1] if at == 3 else [], marks=["loop"] * (at % 2)), refused(at))
        writer.flush()
    writer.close()
    lock.release()
    older = parts(path, TRACES)[2]  # as an eyas before these columns wrote it
    table = pq.read_table(older).drop_columns(["joints", "tools"])
    items = pa.list_(pa.field("item", pa.int32()))
    at = table.schema.get_field_index("prompt_ids")
    pq.write_table(table.set_column(at, "prompt_ids", table["prompt_ids"].cast(items)), older)
    writer, lock = open_writer(path)
    writer.put(trace(8), refused(8))
    writer.flush()
    assert list((path / "journal").glob("*.log"))  # not sealed yet
    for folder in (TRACES, REJECTED):
        later = {"joints": []} if folder == TRACES else {}
        wanted = [{**later, "tools": None, **row} for row in Run(path).records(folder)]
        batches = list(Run(path).batches(folder, batch_size=2))
        found = [row for batch in batches for row in batch.to_pylist()]
        assert [row["id"] for row in found] == [row["id"] for row in wanted]
        kind = Trace if folder == TRACES else Rejected
        assert [from_record(row) for row in found] == [from_record(row) for row in wanted]
        assert all(batch.schema.equals(arrow_schema(kind)) for batch in batches)
    few = list(Run(path).batches(TRACES, ["output_ids", "id"]))
    assert {tuple(batch.schema.names) for batch in few} == {("id", "output_ids")}
    assert sum(map(len, few)) == 8
    writer.close()
    lock.release()
