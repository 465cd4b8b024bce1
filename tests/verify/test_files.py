"""Files of training data: every line is counted, whatever it holds, and a real export is clean."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from capturing import capture_from, numbered, run_eyas, write_prompts
from eyas.demo.server import TARGET
from eyas.errors import InputError
from eyas.export import export_run
from eyas.findings import Findings
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.verify import verify_file
from fault_server import FaultServer, Target
from verifying import Desk, chat_row, id_row


@pytest.fixture
def desk(tokenizer: Tokenizer, tmp_path: Path) -> Desk:
    return Desk.of(tokenizer, tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, of which some rows were cut by their budget."""
    folder = tmp_path_factory.mktemp("verify")
    prompts = write_prompts(folder / "p.jsonl", numbered(40))
    with FaultServer(Target()) as server:
        capture_from(server, prompts, folder / "run", max_new_tokens=40)
    return folder / "run"


def test_the_export_of_a_run_is_clean(run: Path, desk: Desk) -> None:
    out = desk.folder / "t.jsonl"
    export_run(run, to="jsonl", out=out)
    outcome = desk.verify_path(out)
    assert outcome.report.rows == 40
    assert not outcome.findings.failed
    assert outcome.proven >= {"lines", "ids", "mask"}
    export_run(run, to="jsonl", out=out, only="stop", overwrite=True)
    outcome = desk.verify_path(out)
    assert outcome.faults == {}
    assert outcome.proven >= {"lines", "ids", "mask", "stop", "reasoning", "drift"}
    assert outcome.report.drift["rows_changed"] > 0  # the pretended model spells as it likes


def test_the_parts_of_a_run_are_clean(run: Path, desk: Desk) -> None:
    outcome = desk.verify_path(run / "traces")
    assert outcome.report.kinds == {"prompt_ids+output_ids": 40}
    assert set(outcome.faults) <= {"truncated", "reasoning_truncated"}
    assert not outcome.findings.failed


def test_bad_lines_are_counted_where_they_stand(desk: Desk) -> None:
    outcome = desk.verify(
        id_row(desk.prompt(), [70, 511, 71, 506]),
        "{not json",
        "[1, 2]",
        {"a": 1},
        {"prompt": "What is 2+2?"},
        {"messages": "no list"},
        {"messages": [1]},
        {"input_ids": 7, "loss_mask": []},
        chat_row("4") | {"tools": "{"},
    )
    seen = outcome.report.faults["bad_line"]
    assert (outcome.report.rows, seen.count) == (9, 8)
    assert [example.where.rpartition(":")[2] for example in seen.examples] == list("23456")
    assert outcome.findings.failed
    rows = next(f for f in outcome.findings.items if f.name == "rows")
    assert rows.evidence["unread"] == {
        "invalid_json": 1, "not_an_object": 1, "unknown_columns": 1, "no_answer": 1,
        "bad_messages": 2, "bad_ids": 1, "bad_tools": 1,
    }  # fmt: skip


def test_the_same_rows_in_other_files(desk: Desk) -> None:
    row = id_row(desk.prompt(), [70, 511, 71, 506], id="a")
    folder = desk.folder / "data"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([row, row]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    pq.write_table(pa.Table.from_pylist([row]), folder / "c.parquet")
    cells = ",".join(f'"{row[name]}"' for name in ("id", "input_ids", "loss_mask"))
    (folder / "d.csv").write_text(f"id,input_ids,loss_mask\n{cells}\n")
    outcome = desk.verify_path(folder)
    assert outcome.faults == {}
    assert outcome.report.rows == 5
    assert len(outcome.report.files) == 4


def test_a_file_that_is_cut_is_named(desk: Desk) -> None:
    row = json.dumps(id_row(desk.prompt(), [70, 511, 71, 506])).encode()
    path = desk.folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join([row] * 50))[:-20])
    outcome = desk.verify_path(path)
    assert "unreadable_file" in outcome.report.faults["bad_line"].examples[-1].detail
    path.write_bytes(b"")
    empty = desk.verify_path(path)
    assert empty.findings.failed
    with pytest.raises(InputError, match="does not exist"):
        desk.verify_path(desk.folder / "nothing.jsonl")


def test_a_limit_takes_the_first_rows(desk: Desk) -> None:
    good = id_row(desk.prompt(), [70, 511, 71, 506])
    assert desk.verify(good, good, "bad", limit=2).report.rows == 2
    assert desk.verify(good, good, "bad", limit=2).faults == {}


def test_more_rows_than_a_batch(desk: Desk) -> None:
    good = id_row(desk.prompt(), [70, 511, 71, 506])
    bad = {**good, "loss_mask": [0] * len(good["input_ids"])}
    outcome = desk.verify(*[good, bad, chat_row("4")] * 400)
    assert outcome.report.rows == 1200
    assert outcome.faults == {"mask_all_zero": 400, "reasoning_missing": 400}
    assert len(outcome.report.faults["mask_all_zero"].examples) == 5
    assert outcome.report.drift["rows"] == 800


def test_the_command_that_makes_the_data_anew(
    tokenizer: Tokenizer, template: ChatTemplate, profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "my data.jsonl"
    path.write_text(json.dumps(chat_row("4")) + "\n")
    report = verify_file([str(path)], tokenizer, template, profile, Findings())
    assert report.regenerate_command is not None
    assert shlex.split(report.regenerate_command) == [
        "eyas", "capture", str(path), "--out", "RUN", "--url", "http://HOST:30000",
        "--tokenizer", tokenizer.source,
    ]  # fmt: skip
    path.write_text(json.dumps({"input_ids": [1, 2], "loss_mask": [0, 0]}) + "\n")
    switched = ChatTemplate.of(tokenizer, kwargs={"thinking": True})
    report = verify_file([str(path)], tokenizer, switched, profile, Findings())
    assert report.regenerate_command is not None
    words = shlex.split(report.regenerate_command)
    assert words[2] == "PROMPTS"  # ids hold no prompt that could be sent
    assert words[-2:] == ["--template-kwargs", '{"thinking":true}']


def test_a_pipe_is_read_and_the_command_repeats_how_prompts_were_made(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pipe, template = tmp_path / "rows", tmp_path / "own.jinja"
    os.mkfifo(pipe)
    template.write_text(tokenizer.chat_template or "")
    words = ["verify", str(pipe), "--tokenizer", str(TARGET), "--chat-template", str(template)]
    rows = json.dumps(chat_row("4")) + "\n"
    writer = threading.Thread(target=pipe.write_text, args=(rows,))
    writer.start()  # stands still until somebody reads
    done = run_eyas(*words)
    writer.join()
    assert done.returncode == 3
    assert f"{pipe} is a pipe, which is read until its writer ends\n" in done.stderr
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command[2] == "PROMPTS"  # it cannot be read again
    assert command[-2:] == ["--chat-template", str(template)]


def test_the_report_as_json(desk: Desk) -> None:
    outcome = desk.verify("bad", chat_row("4"), id_row(desk.prompt(), [70, 511, 71, 506]))
    data = json.loads(json.dumps(outcome.report.as_dict()))
    assert data["rows"] == 3
    assert data["faults"]["bad_line"]["count"] == 1
    assert data["faults"]["reasoning_missing"]["examples"][0]["where"].endswith(":2")
    assert data["drift"]["rows"] == 1
    json.dumps(outcome.findings.as_dicts())
