"""`open_run`: record batches and traces of a run, also while it is written."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pyarrow as pa
import pytest

import eyas
from eyas.errors import ConfigError, DamagedRun
from eyas.store import Writer, WriterLock
from eyas.trace import Trace, arrow_schema
from writing import trace_of, write_run


def rows(count: int, first: int = 0) -> list[Trace]:
    chosen = random.Random(first)
    return [
        trace_of(at, chosen.choices(range(512), k=chosen.randint(1, 9)),
                 chosen.choices(range(512), k=chosen.randint(1, 9)), finished_at=float(at))
        for at in range(first, first + count)
    ]  # fmt: skip


def test_all_ways_give_the_same_rows(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", rows(50), seal_bytes=2000)
    run = eyas.open_run(path)
    assert isinstance(run, eyas.Run)
    traces = list(run)
    assert traces == rows(50)
    assert len(run) == 50
    table = run.arrow(batch_size=7).read_all()
    assert table.schema.equals(arrow_schema(Trace))
    assert table.column("id").to_pylist() == [trace.id for trace in traces]
    few = run.arrow(["loss_mask", "id", "input_ids"])
    assert isinstance(few, pa.RecordBatchReader)
    assert few.schema.names == ["loss_mask", "id", "input_ids"]
    made = few.read_all().to_pylist()
    assert made == [
        {"loss_mask": t.loss_mask, "id": t.id, "input_ids": t.input_ids} for t in traces
    ]
    assert run.arrow(["output_ids"]).read_all().schema.names == ["output_ids"]


def test_a_run_that_is_written_gives_what_is_durable(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", rows(5))
    lock = WriterLock(path)
    lock.acquire()
    writer = Writer(path, lock)
    writer.put(*rows(3, first=5))
    writer.flush()
    run = eyas.open_run(path)
    assert len(run) == 8
    assert list(run) == [*rows(5), *rows(3, first=5)]
    found = run.arrow(["id", "input_ids"]).read_all()
    assert found.column("input_ids").to_pylist() == [t.input_ids for t in run]
    writer.close()
    lock.release()


def test_an_empty_run(tmp_path: Path) -> None:
    run = eyas.open_run(write_run(tmp_path / "run", []))
    assert (list(run), len(run)) == ([], 0)
    table = run.arrow(["id", "loss_mask"]).read_all()
    assert (len(table), table.schema.names) == (0, ["id", "loss_mask"])


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(DamagedRun, match="is not a run of eyas"):
        eyas.open_run(tmp_path)
    run = eyas.open_run(write_run(tmp_path / "run", rows(2)))
    with pytest.raises(ConfigError, match=r"no column 'text'; it has id, .*input_ids, loss_mask"):
        run.arrow(["text"])
    (tmp_path / "run" / "traces" / "part-000001.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(DamagedRun, match="cannot be read"):
        list(run)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is here")
def test_without_torch_it_says_what_to_do(tmp_path: Path) -> None:
    run = eyas.open_run(write_run(tmp_path / "run", rows(2)))
    with pytest.raises(ConfigError, match=r"needs torch.*install it, or read the run with .arrow"):
        run.torch()
