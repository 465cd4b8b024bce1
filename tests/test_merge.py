"""Runs joined into one: what fits is joined, what does not is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from capturing import capture_from, check_run, numbered, paired, run_eyas, write_prompts
from eyas import Run
from eyas.conversation import digest
from eyas.errors import DamagedRun, EyasError, FingerprintError, RunLocked, StoreError
from eyas.merge import MergeReport, merge_runs
from eyas.store import Manifest, WriterLock, prepare_directory
from eyas.store.journal import Segment, encode_line
from eyas.store.parts import REJECTED, TRACES, parts, seal
from eyas.trace import Rejected, Trace
from fault_server import FaultServer, Target


def trace(name: str, *, sample: int = 0, turn: int = 0, content: str = "", **more: Any) -> Trace:
    key = digest(name.encode(), content.encode()).hex()
    return Trace(f"{name}/{sample}/{turn}", name, turn, sample, key, [1, 2], [3, 4],
                 more.pop("finish_reason", "stop"), 4, None, None, **more)  # fmt: skip


def refused(name: str, *, turn: int = 0) -> Rejected:
    key = digest(name.encode(), b"").hex()
    return Rejected(f"{name}/0/{turn}", name, turn, 0, key, "text", "differs")


def make_run(
    path: Path, *segments: list[Trace | Rejected], sealed: bool = True, **more: Any
) -> Path:
    """A finished run of these rows, a part a list."""
    prepare_directory(path)
    rows = [row for segment in segments for row in segment]
    done = sum(isinstance(row, Trace) for row in rows)
    cut = sum(isinstance(row, Trace) and not row.complete for row in rows)
    counts = {"input": len(rows), "done": done, "rejected": len(rows) - done, "pending": 0,
              "extra": 0, "truncated": cut}  # fmt: skip
    values: dict[str, Any] = {
        "eyas": "0", "created": "2026-01-02T00:00:00", "date": "2026-01-02", "profile": {},
        "fingerprint": {"target": "m", "temperature": 1.0, "weight_version": "v1"},
        "max_new_tokens": 9, "tokenizer": "t", "counts": counts, **more,
    }  # fmt: skip
    Manifest(**values).save(path)
    for number, held in enumerate(segments, 1):
        segment = Segment(path / "journal", number)
        segment.write([encode_line(row) for row in held])
        segment.close()
        if sealed:
            seal(path, number, segment.path)
    return path


def ids(run: Path) -> list[str]:
    opened = Run(run)
    return [row.id for row in opened.traces()] + [row.id for row in opened.rejected()]


def nothing_made(folder: Path, out: str = "out") -> bool:
    return not (folder / out).exists() and not list(folder.glob(f".{out}*"))


def test_parts_are_copied_as_they_are(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a"), trace("b"), refused("c")], [trace("d")])
    two = make_run(tmp_path / "2", [refused("e")], [trace("f"), trace("f", sample=1)])
    seen: list[int] = []
    report = merge_runs(tmp_path / "out", [one, two], on_written=seen.append)
    assert (report.rows, report.rejected, report.parts, report.renamed) == (5, 2, 5, 0)
    assert seen[-1] == 7
    out = tmp_path / "out"
    assert ids(out) == ["a/0/0", "b/0/0", "d/0/0", "f/0/0", "f/1/0", "c/0/0", "e/0/0"]
    assert [path.name for path in parts(out, TRACES)] == [
        "part-000001.parquet", "part-000002.parquet", "part-000004.parquet",
    ]  # fmt: skip
    assert parts(out, REJECTED)[1].read_bytes() == parts(two, REJECTED)[0].read_bytes()
    assert parts(out, REJECTED)[1].name == "part-000003.parquet"
    assert report.counts == Run(out).manifest.counts
    assert (report.counts["input"], report.counts["done"], report.counts["rejected"]) == (7, 5, 2)
    assert not (out / "writer.lock").exists()
    assert not list(tmp_path.glob(".*"))
    assert ids(one) == ["a/0/0", "b/0/0", "d/0/0", "c/0/0"]


def test_the_manifest_holds_all_of_them(tmp_path: Path) -> None:
    server = {"engine": "sglang", "url": "http://a"}
    one = make_run(tmp_path / "1", [trace("a")], servers=[server], inputs=["p", "q"],
                   versions={"eyas": "1", "jinja2": "3"}, shapes={"prompt": 5}, shard="1/3",
                   max_new_tokens=9, profile={"stop_ids": [7], "vocab_size": 9})  # fmt: skip
    two = make_run(tmp_path / "2", [trace("b")], servers=[server, {**server, "url": "http://b"}],
                   inputs=["p", "q"], versions={"eyas": "2", "jinja2": "3"}, max_new_tokens=10,
                   shapes={"prompt": 4, "turns": 1}, shard="3/3", created="2025-01-01",
                   profile={"stop_ids": [5, 7], "vocab_size": 9})  # fmt: skip
    other = make_run(tmp_path / "3", [trace("c")], inputs=["r"], shapes={"prompt": 2})
    report = merge_runs(tmp_path / "out", [one, two, other])
    manifest = Run(tmp_path / "out").manifest
    assert [s["url"] for s in manifest.servers] == ["http://a", "http://b"]
    assert manifest.inputs == ["p", "q", "r"]
    assert manifest.versions == {"eyas": "1, 2", "jinja2": "3"}
    assert (manifest.max_new_tokens, manifest.created, manifest.shard) == (10, "2025-01-01", None)
    assert manifest.shapes == {"prompt": 7, "turns": 1}
    assert manifest.profile == {"stop_ids": [5, 7], "vocab_size": 9}
    assert report.missing_shards == []  # the third run is of all conversations
    assert merge_runs(tmp_path / "shards", [one, two]).missing_shards == ["2/3"]


def test_one_id_for_two_contents_gets_a_suffix(tmp_path: Path) -> None:
    """The first run keeps the name; all rows of the other conversation get the longer one."""
    one = make_run(tmp_path / "1", [trace("a"), trace("b")])
    two = make_run(tmp_path / "2", [trace("a", content="x"), trace("c")],
                   [trace("a", content="x", turn=1)])  # fmt: skip
    three = make_run(tmp_path / "3", [trace("a", content="x", sample=1)])
    report = merge_runs(tmp_path / "out", [one, two, three])
    longer = f"a-{trace('a', content='x').key[:8]}"
    assert ids(tmp_path / "out") == [
        "a/0/0", "b/0/0", f"{longer}/0/0", "c/0/0", f"{longer}/0/1", f"{longer}/1/0",
    ]  # fmt: skip
    assert report.renamed == 3
    before = {row.id: row for row in Run(two).traces()}
    after = {row.id: row for row in Run(tmp_path / "out").traces()}
    row = after[f"{longer}/0/0"]
    assert row.conversation_id == longer
    row.id, row.conversation_id = "a/0/0", "a"
    assert row == before["a/0/0"]
    changed, copied = (pq.read_schema(parts(tmp_path / "out", TRACES)[at]) for at in (1, 0))
    assert changed.equals(copied, check_metadata=True)


def test_rows_of_both_runs_are_refused_by_name(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a"), trace("b"), refused("c")])
    two = make_run(tmp_path / "2", [trace("b"), refused("c"), trace("d")])
    with pytest.raises(StoreError, match="2 rows are in .*1 and in .*2, b/0/0 for example"):
        merge_runs(tmp_path / "out", [one, two])
    assert nothing_made(tmp_path)
    report = merge_runs(tmp_path / "out", [one, two], skip_doubles=True)
    assert ids(tmp_path / "out") == ["a/0/0", "b/0/0", "d/0/0", "c/0/0"]
    assert (report.left_out, report.rows, report.rejected) == (2, 3, 1)
    assert report.counts == {"input": 4, "done": 3, "rejected": 1, "pending": 0, "extra": 0,
                             "truncated": 0}  # fmt: skip


def test_later_turns_stay_with_the_answers_they_stand_on(tmp_path: Path) -> None:
    """Another run's second turn was asked on that run's own first answer."""
    one = make_run(tmp_path / "1", [trace("a", finish_reason="length"), refused("a", turn=1)])
    two = make_run(tmp_path / "2", [trace("a"), trace("a", turn=1), trace("a", turn=2)],
                   [trace("b", finish_reason="length")])  # fmt: skip
    report = merge_runs(tmp_path / "out", [one, two], skip_doubles=True)
    assert ids(tmp_path / "out") == ["a/0/0", "b/0/0", "a/0/1"]
    assert report.left_out == 3
    assert report.counts == {"input": 3, "done": 2, "rejected": 1, "pending": 0, "extra": 0,
                             "truncated": 2}  # fmt: skip


def test_doubles_that_were_extra_are_not_of_the_input(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a"), trace("b")])
    counts = {"input": 1, "done": 1, "rejected": 0, "pending": 0, "extra": 2, "truncated": 0}
    two = make_run(tmp_path / "2", [trace("a"), trace("b"), trace("c")], counts=counts)
    report = merge_runs(tmp_path / "out", [one, two], skip_doubles=True)
    there = report.counts["done"] + report.counts["rejected"] + report.counts["extra"]
    assert (there, report.counts["input"]) == (3, report.counts["done"])


def test_a_run_without_an_end_leaves_no_counts(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a")])
    said: list[str] = []
    for counts in ({}, {"input": 1, "done": 1, "rejected": 0, "pending": 0, "extra": 0}):
        two = make_run(tmp_path / f"2{len(said)}", [trace("b"), trace("c")], counts=counts)
        out = tmp_path / f"out{len(said)}"
        assert merge_runs(out, [one, two], say=said.append).counts == {}
    assert all("not captured to its end" in line for line in said if "config" not in line)


def test_other_configurations_are_refused_by_what_differs(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a")])
    for at, other in enumerate((
        {"target": "m", "temperature": 0.5, "weight_version": "v1"},
        {"target": "m", "temperature": 1.0, "weight_version": None},
        {"target": "m", "weight_version": "v1"},
    )):  # fmt: skip
        two = make_run(tmp_path / f"2{at}", [trace("b")], fingerprint=other)
        for runs in ([one, two], [two, one]):
            with pytest.raises(FingerprintError, match=r"(temperature|weight_version): .* in .*1"):
                merge_runs(tmp_path / "out", runs)
    assert nothing_made(tmp_path)


def test_a_run_that_got_no_answer_knows_no_weights(tmp_path: Path) -> None:
    """Where only answers name the weights, an empty shard is no other configuration."""
    one = make_run(tmp_path / "1", [trace("a")])
    none = {"target": "m", "temperature": 1.0, "weight_version": None}
    two = make_run(tmp_path / "2", [refused("b")], fingerprint=none)
    three = make_run(tmp_path / "3", fingerprint=none)
    merge_runs(tmp_path / "out", [two, three, one])
    assert Run(tmp_path / "out").manifest.fingerprint["weight_version"] == "v1"
    assert merge_runs(tmp_path / "none", [three]).rows == 0


def test_a_run_that_is_being_written_is_refused(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "1", [trace("a")]), make_run(tmp_path / "2", [trace("b")])
    lock = WriterLock(two)
    lock.acquire()
    with pytest.raises(RunLocked, match=f"2 is being written by process {os.getpid()}"):
        merge_runs(tmp_path / "out", [one, two])
    lock.release()
    assert nothing_made(tmp_path)
    assert not (one / "writer.lock").exists()
    merge_runs(tmp_path / "out", [one, two])


def test_two_merges_into_one_place(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a")])
    (tmp_path / ".out.merge").mkdir()
    lock = WriterLock(tmp_path / ".out.merge")
    lock.acquire()
    with pytest.raises(RunLocked):
        merge_runs(tmp_path / "out", [one])
    lock.release()
    merge_runs(tmp_path / "out", [one])
    assert not list(tmp_path.glob(".*"))


def test_leftovers_of_the_journal_are_sealed_first(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a"), refused("b")], sealed=False)
    said: list[str] = []
    merge_runs(tmp_path / "out", [one], say=said.append)
    assert ids(tmp_path / "out") == ids(one) == ["a/0/0", "b/0/0"]
    assert "they are sealed now" in said[0]
    assert not list((one / "journal").iterdir())


def test_runs_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_run(tmp_path / "1", [trace("a")])
    two = make_run(tmp_path / "2", [trace("b")], sealed=False)
    three = make_run(tmp_path / "3", [trace("c")])
    (three / "writer.lock").write_text("{}")
    mine = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name not in "123" and mine(path, mode)
    )
    with pytest.raises(StoreError, match="2 holds rows that are not sealed"):
        merge_runs(tmp_path / "out", [one, two])
    with pytest.raises(RunLocked, match=r"3 has a writer.lock"):
        merge_runs(tmp_path / "out", [one, three])
    assert merge_runs(tmp_path / "out", [one]).rows == 1


def place(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        make(folder / "out")
        return folder / "out"

    return made


def full(path: Path) -> None:
    path.mkdir()
    (path / "x").touch()


@pytest.mark.parametrize(
    ("out", "said"),
    [(place(full), "is not empty"), (place(Path.touch), "is a file"),
     (lambda folder: folder / "1" / "out", "lies in"), (lambda folder: folder / "1", "not empty")],
)  # fmt: skip
def test_places_that_cannot_become_a_run(
    out: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    one = make_run(tmp_path / "1", [trace("a")])
    before = sorted(tmp_path.rglob("*"))
    where = out(tmp_path)
    with pytest.raises(StoreError, match=said):
        merge_runs(where, [one])
    assert set(tmp_path.rglob("*")) - {where, where / "x"} == set(before) - {where}
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert merge_runs(tmp_path / "link", [one]).rows == 1  # an empty one is taken
    assert ids(tmp_path / "empty") == ["a/0/0"]


def test_runs_that_are_none(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a")])
    for runs, said in (([one, tmp_path / "no"], "not a run"), ([one, one], "named twice"),
                       ([one, tmp_path / "x" / ".." / "1"], "named twice")):  # fmt: skip
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(EyasError, match=said):
            merge_runs(tmp_path / "out", runs)
    twice = make_run(tmp_path / "2", [trace("b")], [trace("b")])
    with pytest.raises(DamagedRun, match="holds b/0/0 twice"):
        merge_runs(tmp_path / "out", [one, twice], skip_doubles=True)
    (part,) = parts(one, TRACES)
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(DamagedRun, match="cannot be read"):
        merge_runs(tmp_path / "out", [one])
    assert nothing_made(tmp_path)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(Target()) as running:
        yield running


def test_an_array_of_captures(server: FaultServer, tmp_path: Path) -> None:
    """Three shards are captured, merged, verified, and their run is continued."""
    rows = [*numbered(20), *numbered(3), *paired(6), {"id": "q1", "prompt": "Another?"},
            {"id": "bad", "prompt": 5}, {"id": "worse", "prompt": 6}]  # fmt: skip
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    whole = capture_from(server, prompts, tmp_path / "whole", n=2)
    runs = [tmp_path / str(n) for n in (1, 2, 3)]
    parts_of_it = [
        capture_from(server, prompts, run, n=2, shard=f"{run.name}/3", probe=run.name == "2")
        for run in runs
    ]
    assert sum(summary.input for summary in parts_of_it) == whole.input == 74
    assert min(summary.input for summary in parts_of_it) > 0
    for run in runs:
        assert Run(run).manifest.shard == f"{run.name}/3"
    out = tmp_path / "out"
    done = run_eyas("merge", str(out), *map(str, runs), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["rows"], report["rejected"], report["missing_shards"]) == (72, 2, [])
    assert report == {**report, **{f: report[f] for f in MergeReport.__slots__}}
    assert sorted(ids(out)) == sorted(ids(tmp_path / "whole"))
    assert Run(out).manifest.shapes == Run(tmp_path / "whole").manifest.shapes
    check_run(server.target, out)
    verified = run_eyas("verify", str(out))
    assert verified.returncode == 0, verified.stdout
    more = write_prompts(tmp_path / "p.jsonl", [*rows, {"id": "new", "prompt": "One more?"}])
    answered = len(Run(out).manifest.servers)
    again = run_eyas("capture", "--config", str(out / "config.yaml"), "--no-probe", "--json")
    summary = json.loads(again.stdout)
    assert (summary["new"], summary["pending"], summary["extra"]) == (2, 0, 0), again.stderr
    assert (summary["input"], summary["done"], answered) == (76, 74, 1)
    assert more == prompts
    assert run_eyas("verify", str(out)).returncode == 0


def test_limit_concerns_the_whole_input(server: FaultServer, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(30))
    met = [
        capture_from(server, prompts, tmp_path / f"{n}", shard=f"{n}/2", limit=10).input
        for n in (1, 2)
    ]
    assert sum(met) == 10
    merged = merge_runs(tmp_path / "out", [tmp_path / "1", tmp_path / "2"])
    assert sorted(ids(tmp_path / "out")) == sorted(f"q{n}/0/0" for n in range(10))
    assert merged.missing_shards == []
    rest = capture_from(server, prompts, tmp_path / "out", limit=10)
    assert (rest.new, rest.input) == (0, 10)


def test_what_the_commands_say(tmp_path: Path) -> None:
    one = make_run(tmp_path / "1", [trace("a")], shard="1/4")
    rows = [trace("a"), trace("b"), trace("a", content="x", sample=1)]
    two = make_run(tmp_path / "2", rows, shard="3/4")
    out = str(tmp_path / "out")
    refusal = run_eyas("merge", out, str(one), str(two))
    assert (refusal.returncode, refusal.stderr.count("a/0/0 for example")) == (2, 1)
    assert "Traceback" not in refusal.stderr
    done = run_eyas("merge", out, str(one), str(two), "--skip-doubles")
    assert done.returncode == 0, done.stderr
    lines = {line[:9].strip(): line[10:] for line in done.stdout.splitlines()}
    assert lines["merged"].startswith("2 runs: 3 good and 0 rejected rows")
    assert lines["left out"] == "1 rows that an earlier run holds too"
    assert lines["renamed"] == "1 rows whose id another conversation has"
    assert lines["input"] == "3 = 3 done + 0 rejected + 0 pending"
    assert lines["missing"] == "shards 2/4, 4/4"


def test_archive(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [trace("a")], [refused("b")])
    done = run_eyas("archive", str(run))
    assert done.returncode == 0, done.stderr
    aside = Path(done.stdout.splitlines()[0].removeprefix("put aside "))
    assert aside.parent == run / "archive"
    assert ids(aside) == ["a/0/0", "b/0/0"]
    assert "nothing was deleted" in done.stdout
    assert sorted(path.name for path in run.iterdir()) == ["archive"]
    again = run_eyas("archive", str(run))
    assert (again.returncode, "is not a run" in again.stderr) == (2, True)
    make_run(run, [trace("c")])
    lock = WriterLock(run)
    lock.acquire()
    held = run_eyas("archive", str(run))
    assert (held.returncode, "is being written" in held.stderr) == (2, True)
    lock.release()
    second = json.loads(run_eyas("archive", str(run), "--json").stdout)
    assert ids(Path(second["archive"])) == ["c/0/0"]
    assert len(list((run / "archive").iterdir())) == 2
