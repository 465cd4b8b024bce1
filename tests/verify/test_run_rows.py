"""Rows and manifests of a run that were damaged: each thing is named, and nothing raises."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from capturing import capture_from, config_for, numbered, paired, run_eyas, write_prompts
from eyas import Run, capture
from eyas.demo.server import TARGET
from eyas.engines import connect
from eyas.errors import DamagedRun
from eyas.findings import Finding, Findings
from eyas.merge import merge_runs
from eyas.tokens import load_tokenizer
from eyas.trace import Rejected, Trace
from eyas.verify.rescore import rescore
from eyas.verify.run import verify_run
from eyas.verify.run_rows import KNOWN_REASONS, NEVER_NULL, wrong_logprobs
from fault_server import FaultServer, Target

Rows = list[dict[str, Any]]
READY = [300, 301, 302, 508, 509, 510]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(Target()) as running:
        yield running


@pytest.fixture(scope="module")
def whole(server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Single turns, pairs and a refused line, with log-probabilities."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [*numbered(20), *paired(10), {"id": "bad", "prompt": 5}]
    prompts = write_prompts(folder / "p.jsonl", rows)
    capture_from(server, prompts, folder / "run", logprobs=True)
    return folder / "run"


@pytest.fixture(scope="module")
def continued(server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers that were continued. (To this server a part of an answer is another question.)"""
    folder = tmp_path_factory.mktemp("continued")
    prompts = write_prompts(folder / "p.jsonl", [*numbered(20), *paired(5)])
    capture(config_for(server, prompts, folder / "run", max_new_tokens=20, logprobs=True,
                       on_length="continue", continue_to=200), probe=False)  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def ready_made(server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of ready-made prompt ids: with and without ids, duplicates, one id for two."""
    folder = tmp_path_factory.mktemp("ready")
    rows = [
        {"id": "a", "prompt_ids": READY}, {"id": "a", "prompt_ids": [300, *READY]},
        *[{"prompt_ids": READY}] * 3, *[{"id": 7, "prompt_ids": READY}] * 2,
        {"uuid": "e", "prompt": [301, *READY]}, *numbered(3),
    ]  # fmt: skip
    capture_from(server, write_prompts(folder / "p.jsonl", rows), folder / "run")
    return folder / "run"


def verified(run: Path) -> Findings:
    findings = Findings()
    verify_run(Run(run), load_tokenizer(str(TARGET)), findings)
    return findings


def failed(run: Path) -> set[str]:
    return {f.name for f in verified(run).of("failed")}


def damaged(run: Path, folder: Path, change: Callable[[Rows], Any], part: str = "traces") -> Path:
    """A copy of the run with rows of its first part changed."""
    copy = folder / "copy"
    shutil.copytree(run, copy)
    path = sorted((copy / part).glob("*.parquet"))[0]
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return copy


def single(rows: Rows) -> dict[str, Any]:
    return next(row for row in rows if row["id"].startswith("q") and not row["joints"])


def setting(**values: Any) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        row = single(rows)
        row.update({k: v(row) if callable(v) else v for k, v in values.items()})

    return change


def test_whole_runs_verify(whole: Path, ready_made: Path, continued: Path) -> None:
    assert any(row.joints for row in Run(continued).traces())
    for run in (whole, ready_made, continued):
        findings = verified(run)
        assert [f.verdict for f in findings.items] == ["ok"] * len(findings.items), [
            (f.name, f.text) for f in findings.items
        ]


# -- columns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("column", NEVER_NULL[Trace])
def test_null_in_a_good_row(column: str, whole: Path, tmp_path: Path) -> None:
    (found,) = verified(damaged(whole, tmp_path, setting(**{column: None}))).of("failed")
    assert found.name == "null"
    assert column in found.text


@pytest.mark.parametrize("column", NEVER_NULL[Rejected])
def test_null_in_a_refused_row(column: str, whole: Path, tmp_path: Path) -> None:
    run = damaged(whole, tmp_path, lambda rows: rows[0].update({column: None}), "rejected")
    (found,) = verified(run).of("failed")
    assert found.name == "null"
    assert column in found.text


def test_the_format_says_what_may_be_null() -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    for kind, sentence in ((Trace, r"Null can be(.*?); the other"),
                           (Rejected, r"does not apply:(.*?)\. A row")):  # fmt: skip
        said = re.search(sentence, text, flags=re.DOTALL)
        assert said is not None
        nullable = set(re.findall(r"`(\w+)`", said[1]))
        assert set(NEVER_NULL[kind]) == set(kind.__dataclass_fields__) - nullable


NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt ids": ({"prompt_ids": []}, "prompt_ids"),
    "null prompt id": ({"prompt_ids": lambda r: [*r["prompt_ids"][:-1], None]}, "prompt_ids"),
    "null output id": ({"output_ids": lambda r: [None, *r["output_ids"][1:]]}, "not_ids"),
    "messages null": ({"messages": None}, "messages"),
    "messages null, another prompt": ({"messages": None, "prompt_ids": READY}, "messages"),
    **{f"messages {text}": ({"messages": text}, "messages")
       for text in ("3", "null", "{}", "[]", "[3]", "x", '[{"role": 3}]')},
    "content 5": ({"messages": '[{"role": "user", "content": 5}]'}, "prompt"),
    "reasoning 5": ({"messages": '[{"role": "user", "content": "", "reasoning_content": 5}]'},
                    "prompt"),
    **{f"switches {text}": ({"template_kwargs": text}, "template_kwargs")
       for text in ("3", "null", "[]", "x", '{"messages":[]}', '{"thinking":false}')},
    **{f"sampling {text}": ({"sampling": text}, "sampling")
       for text in ("3", "null", "[]", "{}", "x", '{"temperature":0.1}')},
    "another temperature": (
        {"sampling": lambda r: json.dumps(json.loads(r["sampling"]) | {"temperature": 0.5})},
        "sampling"),
    "metadata": ({"metadata": "[]"}, "metadata"),
    "NaN": ({"logprobs": lambda r: [float("nan")] * len(r["output_ids"])}, "logprobs"),
    "-inf": ({"logprobs": lambda r: [-float("inf"), *r["logprobs"][1:]]}, "logprobs"),
    "null among them": ({"logprobs": lambda r: [None, *r["logprobs"][1:]]}, "logprobs"),
    "a positive one": ({"logprobs": lambda r: [*r["logprobs"][:-1], 0.5]}, "logprobs"),
    "an unknown mark": ({"marks": ["whatever"]}, "marks"),
    "a null mark": ({"marks": [None]}, "marks"),
    "another seed": ({"seed": 5}, "seed"),
    "another sample": ({"sample": 7, "id": lambda r: f"{r['conversation_id']}/7/0"}, "seed"),
    "another key": ({"key": "0" * 32}, "seed"),
    "no key": ({"key": "x"}, "key"),
    "a key of spaces": ({"key": "0 " * 16}, "key"),
    "a negative turn": ({"turn": -1}, "unreadable"),
    "joints that were not": ({"joints": [2]}, "seed"),
    "joints at the end": ({"joints": lambda r: [len(r["output_ids"])]}, "joints"),
    "joints at 0": ({"joints": [0, 2]}, "joints"),
    "joints backwards": ({"joints": [3, 2]}, "joints"),
    "joints twice": ({"joints": [2, 2]}, "joints"),
    "a null joint": ({"joints": [None]}, "unreadable"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NAMED))
def test_damage_is_named(name: str, whole: Path, tmp_path: Path) -> None:
    values, fault = NAMED[name]
    findings = verified(damaged(whole, tmp_path, setting(**values)))
    assert fault in {f.name for f in findings.of("failed")}, [
        (f.name, f.text) for f in findings.items
    ]
    found = next(f for f in findings.items if f.name == fault)
    assert found.evidence["rows"] == 1


def test_refused_rows(whole: Path, tmp_path: Path) -> None:
    for name, values in {
        "reason": {"reason": "because"},
        "marks": {"marks": ["whatever"]},
        "id": {"id": "else/0/0"},
        "sampling": {"sampling": "{}"},
    }.items():
        folder = tmp_path / name
        run = damaged(whole, folder, lambda rows, v=values: rows[0].update(v), "rejected")
        assert failed(run) == {name}


def test_every_reason_is_known() -> None:
    """What the code writes as a reason, wherever it stands."""
    source = Path(__file__).parents[2] / "src" / "eyas"
    found = set()
    for path in source.rglob("*.py"):
        if "verify" not in path.parts:
            text = path.read_text(encoding="utf-8")
            found |= set(re.findall(r'\breason\s*=\s*"(\w+)"', text))
            found |= set(re.findall(r'\b(?:refuse(?:_later)?\(job, |Refused\()"(\w+)"', text))
    assert len(found) > 20
    assert found <= KNOWN_REASONS


# -- rows beside each other ------------------------------------------------------------------


def _exchange(rows: Rows) -> None:
    """Give the first turn of one conversation the output of another one's."""
    first = [row for row in rows if row["id"].startswith("p") and row["turn"] == 0]
    one = first[0]
    other = next(r for r in first if r["output_ids"] != one["output_ids"]
                 and len(r["prompt_ids"]) == len(one["prompt_ids"]))  # fmt: skip
    for name in ("output_ids", "logprobs", "stop_id", "reasoning_start", "reasoning_end",
                 "max_new_tokens", "joints", "marks"):  # fmt: skip
        one[name], other[name] = other[name], one[name]


def test_outputs_that_were_exchanged(whole: Path, tmp_path: Path) -> None:
    for order in (1, -1):

        def change(rows: Rows, order: int = order) -> None:
            _exchange(rows)
            rows[:] = rows[::order]

        findings = verified(damaged(whole, tmp_path / str(order), change))
        found = next(f for f in findings.of("failed") if f.name == "history")
        assert found.evidence["rows"] == 2


def test_a_first_turn_that_was_lost_and_captured_again(whole: Path, tmp_path: Path) -> None:
    """It may hold another answer than the turn behind it was asked with."""

    def change(rows: Rows) -> None:
        _exchange(rows)
        later = max(row["finished_at"] for row in rows) + dt.timedelta(seconds=1)
        for row in rows:
            if row["turn"] == 0:
                row["finished_at"] = later

    assert "history" not in failed(damaged(whole, tmp_path, change))


def test_a_prompt_of_ready_made_ids_that_was_exchanged(ready_made: Path, tmp_path: Path) -> None:
    def change(rows: Rows) -> None:
        next(row for row in rows if row["id"] == "a/0/0")["prompt_ids"][0] = 303

    assert failed(damaged(ready_made, tmp_path, change)) == {"messages"}


def test_a_merged_run_verifies(server: FaultServer, ready_made: Path, tmp_path: Path) -> None:
    """Also where a conversation's id was made longer twice."""
    rows = [{"id": "a", "prompt_ids": [ids, *READY]} for ids in (301, 302)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    capture_from(server, prompts, tmp_path / "other")
    merge_runs(tmp_path / "out", [ready_made, tmp_path / "other"])
    assert not verified(tmp_path / "out").failed


# -- parts and manifest ----------------------------------------------------------------------


def test_parts_from_before_answers_were_continued(ready_made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ready_made, run)
    for path in (run / "traces").glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["joints"]), path)
    assert not verified(run).failed
    for path in (run / "traces").glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["seed"]), path)
    assert failed(run) == {"parts"}


def test_files_that_are_no_parts(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    part = next((run / "traces").glob("*.parquet"))
    (run / "traces" / f".{part.name}.tmp").write_bytes(b"half")
    assert not verified(run).of("warning")
    (run / "rejected" / "notes.txt").write_text("x")
    (found,) = verified(run).of("warning")
    assert "notes.txt" in found.text
    shutil.copy(part, run / "traces" / "copy.parquet")
    assert failed(run) == {"strays"}


def test_text_that_is_none(whole: Path, tmp_path: Path) -> None:
    """A part whose pages are whole and whose text is no UTF-8."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = sorted((run / "traces").glob("*.parquet"))[0]
    table = pq.read_table(path)
    at = table.schema.get_field_index("source")
    broken = pa.array([b"\xff\xfe"] * table.num_rows, pa.binary()).view(pa.string())
    pq.write_table(table.set_column(at, table.schema.field(at), broken), path)
    with pytest.raises(DamagedRun, match="rows cannot be read"):
        verified(run)


MANIFEST = {
    "date": "yesterday",
    "profile.vocab_size": "9",
    "profile.stop_ids": ["x"],
    "profile.opener": {"text": "", "ids": []},
    "profile.closer": {"text": 5, "ids": [1]},
    "profile.role_headers": [[]],
    "profile.bos_ids": [-1],
    "profile.reasoning": "sometimes",
    "fingerprint.template_kwargs": "x",
    "fingerprint.stop_token_ids": ["a"],
}


def with_manifest(run: Path, folder: Path, path: str, value: Any) -> Path:
    copy = folder / "copy"
    shutil.copytree(run, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    *outer, name = path.split(".")
    place = manifest
    for key in outer:
        place = place[key]
    place[name] = value
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize("path", sorted(MANIFEST))
def test_a_manifest_that_cannot_be_read(path: str, whole: Path, tmp_path: Path) -> None:
    run = with_manifest(whole, tmp_path, path, MANIFEST[path])
    with pytest.raises(DamagedRun) as caught:
        verified(run)
    assert str(run / "manifest.json") in str(caught.value)


def test_stop_token_ids_that_are_none(whole: Path, tmp_path: Path) -> None:
    run = with_manifest(whole, tmp_path, "fingerprint.stop_token_ids", 5)
    shown = run_eyas("verify", str(run))
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1), shown.stderr
    assert "stop_token_ids" in shown.stderr


@pytest.mark.parametrize(("name", "value"), [("reasoning", "none"), ("bos_ids", [3])])
def test_a_profile_that_was_changed(name: str, value: Any, whole: Path, tmp_path: Path) -> None:
    findings = verified(with_manifest(whole, tmp_path, f"profile.{name}", value))
    found = next(f for f in findings.of("failed") if f.name == "profile")
    assert name in found.text


def test_switches_of_the_fingerprint(whole: Path, tmp_path: Path) -> None:
    run = with_manifest(whole, tmp_path, "fingerprint.template_kwargs", {"a": 1})
    assert failed(run) == {"template_kwargs"}


def test_log_probabilities() -> None:
    assert wrong_logprobs([], 0) is None
    assert wrong_logprobs([0.0, -1e9, 0.001], 3) is None
    for bad in ([-1.0], [float("nan"), -1], [-1, float("-inf")], [None, -1], [0.02, 0.0]):
        assert wrong_logprobs(bad, 2) is not None


# -- scored again ----------------------------------------------------------------------------


def rescored(run: Path, url: str) -> Finding:
    async def score() -> Findings:
        findings = Findings()
        engine = await connect(url)
        await rescore(Run(run), engine, load_tokenizer(str(TARGET)), findings, count=1000)
        await engine.close()
        return findings

    (finding,) = asyncio.run(score()).items
    return finding


UNREADABLE: dict[str, dict[str, Any]] = {
    **{f"sampling {text}": {"sampling": text}
       for text in (None, "null", "3", "[]", "x", '{"temperatur":1}', '{"temperature":"x"}',
                    '{"temperature":null}', '{"temperature":-1}', '{"top_k":0.5}',
                    '{"stop_token_ids":5}', '{"stop_token_ids":["a"]}')},
    "prompt": {"prompt_ids": None},
    "output": {"output_ids": [None]},
    "id": {"id": None, "output_ids": None},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_a_row_that_cannot_be_scored(
    name: str, whole: Path, tmp_path: Path, server: FaultServer
) -> None:
    found = rescored(damaged(whole, tmp_path, setting(**UNREADABLE[name])), server.url)
    assert found.verdict == "ok", found.text
    assert (found.evidence["skipped"], len(found.evidence["unreadable"])) == (1, 1)
    assert "1 of them cannot be read" in found.text


def test_no_row_that_can_be_scored(whole: Path, tmp_path: Path, server: FaultServer) -> None:
    run = damaged(whole, tmp_path, lambda rows: [row.update(sampling="x") for row in rows])
    found = rescored(run, server.url)
    assert (found.verdict, len(found.evidence["unreadable"])) == ("unproven", 40)


def test_log_probabilities_that_are_none(whole: Path, tmp_path: Path, server: FaultServer) -> None:
    run = damaged(whole, tmp_path, setting(logprobs=[None]))
    assert rescored(run, server.url).verdict == "ok"
