"""How long an earlier run's answers were."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from capturing import capture_from, numbered, write_prompts
from eyas import Run
from eyas.conversation import digest
from eyas.store import Writer, WriterLock, prepare_directory
from eyas.store.lengths import Lengths
from fault_server import FaultServer
from store.test_store import make_run, refused, trace


def key_of(at: int) -> bytes:
    return digest(str(at).encode())


def test_they_are_those_of_the_longest_sample_with_all_its_turns(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*numbered(30), {"id": "many", "turns": ["a", "b", "c"]}]
    rows.append({"prompt": "no id"})
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    with FaultServer() as server:
        capture_from(server, prompts, tmp_path / "run", n=3)
    expected: dict[str, Counter[int]] = {}
    keys = {}
    for row in Run(tmp_path / "run").traces():
        keys[row.conversation_id] = bytes.fromhex(row.key)
        expected.setdefault(row.conversation_id, Counter())[row.sample] += len(row.output_ids)
    found = Lengths.of_run(tmp_path / "run")
    assert len(found) == 32
    for name, by_sample in expected.items():
        longest = max(by_sample.values())
        assert found.of(keys[name], None) == longest
        assert found.of(bytes(16), name) == longest  # by its given id, where content differs
    assert found.of(bytes(16), "nobody") is None
    assert found.of(bytes(16), None) is None


def test_rows_that_are_not_sealed_and_refused_answers_count(tmp_path: Path) -> None:
    """A capture that still runs, or was killed, has rows in its journal."""
    run = make_run(tmp_path / "run")
    lock = WriterLock(run)
    lock.acquire()
    writer = Writer(run, lock)
    writer.put(trace(1), replace(refused(2), output_ids=[5] * 300), refused(3))
    writer.flush()
    for _ in range(2):  # in the journal, then in parts
        found = Lengths.of_run(run)
        assert len(found) == 2  # nothing is known of one without an answer
        assert found.of(key_of(1), None) == 2
        assert found.of(digest(b"r", bytes([2])), None) == 300
        assert found.of(digest(b"r", bytes([3])), None) is None
        writer.close()
    lock.release()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 2), st.integers(1, 9)))
)
def test_any_rows(rows: list[tuple[int, int, int, int]]) -> None:
    """Property: of all turns the sum, of all samples the greatest, in whichever order they lie."""
    import tempfile

    expected: dict[int, Counter[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run")
        lock = WriterLock(run)
        lock.acquire()
        writer = Writer(run, lock)
        for at, sample, turn, tokens in rows:
            expected.setdefault(at, Counter())[sample] += tokens
            writer.put(replace(trace(at), sample=sample, turn=turn, output_ids=[4] * tokens))
        writer.close()
        lock.release()
        found = Lengths.of_run(run)
    assert len(found) == len(expected)
    for at, by_sample in expected.items():
        assert (
            found.of(key_of(at), None) == found.of(bytes(16), f"c{at}") == max(by_sample.values())
        )


def test_a_run_without_rows(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "run")
    assert len(Lengths.of_run(make_run(tmp_path / "run"))) == 0
