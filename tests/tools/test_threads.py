"""Captures of conversations with tools: ended and taken up again, with results from outside."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, check_run, write_prompts
from eyas import Run, Summary
from eyas.errors import FingerprintError
from eyas.findings import Findings
from eyas.merge import merge_runs
from eyas.store import Ledger
from eyas.verify.run import verify_run
from fault_server import Answer, Fault, FaultServer, Policy
from tools.small import BARE, HERMES, LIST, PARTED, SMALL, call, listed, parted, small_home, tool
from tools.talking import Home, Talker, llama

TOOLS = [tool("look", "at"), tool("count")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return small_home(tmp_path_factory.mktemp("small"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asks(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def gives(text: str, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


RECORDED = [
    user("Q one"),
    asks(call("look", {"at": "a"}, "1"), call("count", {}, "2")),
    gives("R two", "2"),
    gives("R a", "1"),
    said("..."),
    user("Q two"),
    said("..."),
    user("Q three"),
    asks(call("look", {"at": "b"}, "3")),
    gives("R b", "3"),
    said("..."),
]
"""Five turns: a question, two results, a question, another, one result."""

SCRIPT: dict[str, Any] = {
    "Q one": [("look", {"at": "a"})],
    "R a": [("count", {})],
    "R two": "A one.",
    "Q two": "A two.",
    "Q three": [("look", {"at": "b"})],
    "R b": "A three.",
}
"""Calls one by one what the recording calls at once: six answers."""


class Desk:
    """Captures of one set of rows into one run."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home, self.folder, self.out = home, folder, folder / "run"

    def capture(
        self,
        rows: list[dict[str, Any]] | list[list[dict[str, Any]]],
        script: dict[str, Any] = SCRIPT,
        *,
        policy: Any = None,
        **more: Any,
    ) -> Summary:
        full = [
            {"id": f"c{n}", "messages": row, "tools": TOOLS} if isinstance(row, list) else row
            for n, row in enumerate(rows)
        ]
        with FaultServer(Talker(self.home, SMALL, script), policy=policy) as server:
            return capture_from(
                server,
                write_prompts(self.folder / "p.jsonl", full),
                self.out,
                tokenizer=str(self.home.folder),
                **more,
            )

    @property
    def rows(self) -> dict[str, tuple[str, list[str]]]:
        """id -> (reason or finish reason, marks) of everything that is stored."""
        run = Run(self.out)
        good = {trace.id: (trace.finish_reason, trace.marks) for trace in run.traces()}
        return good | {row.id: (row.reason, row.marks) for row in run.rejected()}

    @property
    def prompts(self) -> dict[str, list[int]]:
        return {trace.id: trace.prompt_ids for trace in Run(self.out).traces()}

    def verified(self) -> list[str]:
        findings = Findings()
        verify_run(Run(self.out), self.home.tokenizer, findings)
        return [finding.name for finding in findings.of("failed")]


@pytest.fixture
def desk(home: Home, tmp_path: Path) -> Desk:
    return Desk(home, tmp_path)


def locked_from(home: Home, words: str) -> Policy:
    """A server that turns everybody away once a prompt ends with these words."""
    locked = False

    def policy(body: Answer, _: Answer) -> Fault | None:
        nonlocal locked
        text = home.tokenizer.decode(body["input_ids"])
        last = max([*SCRIPT, words], key=text.rfind)
        locked = locked or (last == words and words in text)
        return Fault(status=401, body=b"") if locked else None

    return policy


def counts(summary: Summary) -> tuple[int, int, int, int]:
    return summary.input, summary.done, summary.rejected, summary.pending


def test_a_thread_with_an_extra_turn(desk: Desk) -> None:
    assert counts(desk.capture([RECORDED])) == (6, 6, 0, 0)
    assert [trace.turn for trace in Run(desk.out).traces()] == list(range(6))
    shown = json.loads(next(t for t in Run(desk.out).traces() if t.turn == 5).messages or "")
    assert [message["role"] for message in shown] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant",
        "user", "assistant", "user", "assistant", "tool",
    ]  # fmt: skip
    assert desk.verified() == []
    # The same command again finds everything done.
    assert counts(desk.capture([RECORDED])) == (6, 6, 0, 0)


@pytest.mark.parametrize("dies_at", list(SCRIPT))
def test_a_run_that_was_interrupted_goes_on_where_it_stood(
    desk: Desk, home: Home, tmp_path: Path, dies_at: str
) -> None:
    """The server turns everybody away at one point of the conversation, then it is back."""
    whole = Desk(home, tmp_path / "whole")
    whole.folder.mkdir()
    whole.capture([RECORDED, [user("Q two")]])

    first = desk.capture([RECORDED, [user("Q two")]], policy=locked_from(home, dies_at))
    assert first.pending > 0
    second = desk.capture([RECORDED, [user("Q two")]])
    assert counts(second) == (7, 7, 0, 0)
    assert desk.prompts == whole.prompts
    assert desk.rows == whole.rows
    assert desk.verified() == []


def test_turns_that_only_bring_results_are_passed_over(desk: Desk) -> None:
    script = {"Q one": "I know it.", "Q two": "A two.", "Q three": "No."}
    assert counts(desk.capture([RECORDED], script)) == (5, 3, 2, 0)
    rows = desk.rows
    assert rows["c0/0/0"][1] == rows["c0/0/3"][1] == ["no_tool_call"]
    assert rows["c0/0/2"][1] == []
    assert rows["c0/0/1"][0] == rows["c0/0/4"][0] == "no_tool_call"
    assert counts(desk.capture([RECORDED], script)) == (5, 3, 2, 0)


def test_results_beside_a_question_are_left_out_where_nothing_was_called(desk: Desk) -> None:
    both = [user("Q one"), asks(call("count", {}, "2")), gives("R two", "2"), user("Q two")]
    assert counts(desk.capture([both], {"Q one": "I know it.", "Q two": "A two."})) == (2, 2, 0, 0)
    last = next(trace for trace in Run(desk.out).traces() if trace.turn == 1)
    assert [m["content"] for m in json.loads(last.messages or "")] == [
        "Q one", "I know it.", "Q two",
    ]  # fmt: skip
    called = {"Q one": [("count", {})], "R two": "unused", "Q two": "A two."}
    other = Desk(desk.home, desk.folder / "other")
    other.folder.mkdir()
    assert counts(other.capture([both], called)) == (2, 2, 0, 0)
    last = next(trace for trace in Run(other.out).traces() if trace.turn == 1)
    assert [m["role"] for m in json.loads(last.messages or "")] == [
        "user", "assistant", "tool", "user",
    ]  # fmt: skip


def test_a_turn_that_is_cut_or_refused_ends_a_thread(desk: Desk) -> None:
    script = {**SCRIPT, "R a": lambda _: "word " * 100}
    assert counts(desk.capture([RECORDED], script)) == (5, 2, 3, 0)
    assert {reason for reason, _ in desk.rows.values()} == {
        "stop", "length", "earlier_turn_truncated",
    }  # fmt: skip
    assert counts(desk.capture([RECORDED], script)) == (5, 2, 3, 0)


def test_marks_may_refuse(desk: Desk) -> None:
    script = {"Q one": [("look", {"at": "nowhere"})]}
    summary = desk.capture([RECORDED], script, reject=["tool_result_missing"])
    assert counts(summary) == (5, 0, 5, 0)
    assert desk.rows["c0/0/0"][0] == "tool_result_missing"


def test_calls_without_end_end(desk: Desk) -> None:
    script = {"Q one": [("look", {"at": "a"})], "R a": [("look", {"at": "a"})]}
    summary = desk.capture([RECORDED], script, tool_rounds=4)
    assert counts(summary) == (8, 5, 3, 0)
    assert desk.rows["c0/0/4"][1] == ["tool_calls", "tool_result_missing"]
    assert counts(desk.capture([RECORDED], script, tool_rounds=4)) == (8, 5, 3, 0)


# Results from outside

LOOKING = """\
import json, sys
asked = json.load(sys.stdin)
where = asked["arguments"].get("at")
if where == "nowhere":
    sys.exit("there is no such place")
print("seen", where, asked["metadata"]["place"], asked["conversation_id"], asked["turn"])
"""


@pytest.fixture
def command(tmp_path: Path) -> str:
    path = tmp_path / "looking.py"
    path.write_text(LOOKING, encoding="utf-8")
    return f"command:{sys.executable} {path}"


def test_a_command_gives_what_was_not_recorded(desk: Desk, command: str) -> None:
    """A row of one question becomes as many turns as the target takes."""
    row = {"id": "c0", "messages": [user("Q one")], "tools": TOOLS, "place": "here"}
    script = {
        "Q one": [("look", {"at": "c"}), ("look", {"at": "d"})],
        "seen d here c0 0": [("look", {"at": "e"})],
        "seen e here c0 1": "A one.",
    }
    assert counts(desk.capture([row], script, tool_results=command)) == (3, 3, 0, 0)
    last = next(trace for trace in Run(desk.out).traces() if trace.turn == 2)
    shown = json.loads(last.messages or "")
    assert [m["content"] for m in shown if m["role"] == "tool"] == [
        "seen c here c0 0", "seen d here c0 0", "seen e here c0 1",
    ]  # fmt: skip
    assert desk.verified() == []
    assert counts(desk.capture([row], script, tool_results=command)) == (3, 3, 0, 0)


def test_recorded_results_come_first(desk: Desk, command: str) -> None:
    script = {**SCRIPT, "Q three": [("look", {"at": "z"})], "seen z": "A three."}
    row = {"id": "c0", "messages": RECORDED, "tools": TOOLS, "place": "here"}
    assert counts(desk.capture([row], script, tool_results=command)) == (6, 6, 0, 0)


def test_a_command_that_fails_costs_the_turn_that_needs_it(desk: Desk, command: str) -> None:
    script = {"Q one": [("look", {"at": "nowhere"})], "Q two": "A two."}
    row = {"id": "c0", "messages": RECORDED, "tools": TOOLS, "place": "here"}
    alone = {"id": "c1", "messages": [user("Q one")], "tools": TOOLS, "place": "here"}
    assert counts(desk.capture([row, alone], script, tool_results=command)) == (7, 2, 5, 0)
    rows = {row.id: row for row in Run(desk.out).rejected()}
    assert rows["c0/0/1"].reason == rows["c1/0/1"].reason == "tool_failed"
    assert "no such place" in rows["c0/0/1"].detail
    assert {rows[f"c0/0/{turn}"].reason for turn in (2, 3, 4)} == {"earlier_turn_rejected"}
    again = desk.capture([row, alone], script, tool_results=command)
    assert counts(again) == (7, 2, 5, 0)


def test_an_interrupted_run_asks_the_command_again(desk: Desk, home: Home, command: str) -> None:
    row = {"id": "c0", "messages": [user("Q one")], "tools": TOOLS, "place": "here"}
    script: dict[str, Any] = {"Q one": [("look", {"at": "c"})], "seen c": "A one."}

    first = desk.capture([row], script, policy=locked_from(home, "seen"), tool_results=command)
    assert counts(first) == (2, 1, 0, 1)
    assert counts(desk.capture([row], script, tool_results=command)) == (2, 2, 0, 0)
    assert desk.verified() == []


# The run

PLAIN = {"id": "plain", "prompt": "Q two"}


def test_how_calls_are_answered_is_of_the_run_once_there_are_tools(desk: Desk) -> None:
    desk.capture([PLAIN])
    assert "tools" not in Run(desk.out).manifest.fingerprint
    desk.capture(
        [PLAIN, {"id": "c0", "messages": RECORDED, "tools": TOOLS}], tool_results="nearest"
    )
    entry = Run(desk.out).manifest.fingerprint["tools"]
    assert entry["results"] == "nearest"
    assert entry["reader"]
    with pytest.raises(FingerprintError, match="tools"):
        desk.capture([PLAIN])
    check_run(Talker(desk.home, SMALL, SCRIPT), desk.out)


def test_runs_with_and_without_tools_are_merged(desk: Desk, home: Home, tmp_path: Path) -> None:
    other = Desk(home, tmp_path / "other")
    other.folder.mkdir()
    desk.capture([PLAIN])
    other.capture([RECORDED])
    joined = tmp_path / "joined"
    merge_runs(joined, [desk.out, other.out])
    assert len(list(Run(joined).traces())) == 7
    assert "tools" in Run(joined).manifest.fingerprint
    assert Ledger.load(joined).done == 7


def test_rows_without_tools_are_as_they_were(desk: Desk) -> None:
    desk.capture([PLAIN])
    (trace,) = Run(desk.out).traces()
    assert (trace.tools, trace.marks) == (None, [])


def test_a_template_that_shows_no_tools_is_marked(tmp_path: Path) -> None:
    from tools.small import NO_TOOLS

    desk = Desk(small_home(tmp_path / "home", NO_TOOLS), tmp_path)
    desk.capture([RECORDED])
    assert all("tools_ignored" in marks for _, marks in desk.rows.values())


def test_refused_turns_are_done_again(desk: Desk, command: str, tmp_path: Path) -> None:
    """What failed is asked for once more; what is only passed over stays so."""
    from capturing import run_eyas

    script = {"Q one": [("look", {"at": "nowhere"})], "seen nowhere": "A one.", "Q two": "A two.",
              "Q three": "No."}  # fmt: skip
    row = {"id": "c0", "messages": RECORDED, "tools": TOOLS, "place": "here"}
    first = desk.capture([row], script, tool_results=command)
    assert counts(first) == (5, 1, 4, 0)
    looking = Path(command.split()[-1])
    looking.write_text(LOOKING.replace('if where == "nowhere":', "if False:"), encoding="utf-8")
    with FaultServer(Talker(desk.home, SMALL, script)) as server:
        done = run_eyas("redo", str(desk.out), "--which", "rejected", "--reason", "tool_failed",
                        "--url", server.url, "--no-probe", "--json")  # fmt: skip
    figures = json.loads(done.stdout)
    assert (figures["input"], figures["done"], figures["rejected"]) == (5, 4, 1), done.stderr
    assert desk.rows["c0/0/4"][0] == "no_tool_call"
    assert desk.verified() == []


SHAPES = {
    "content beside calls": (SMALL, HERMES),
    "a call alone": (replace(SMALL, call=llama, parallel=False, content=False), BARE),
    "a list alone": (replace(SMALL, call=listed, content=False), LIST),
    "parts": (replace(SMALL, call=parted, as_text=True, glue=""), PARTED),
}


@pytest.mark.parametrize("history", ["served", "full", "tokens"])
@pytest.mark.parametrize("shape", SHAPES)
def test_calls_under_each_history_policy(shape: str, history: str, tmp_path: Path) -> None:
    """These templates are append-only, and the target writes calls as they do: nothing drifts."""
    family, template = SHAPES[shape]
    home = small_home(tmp_path / "home", template)
    with FaultServer(Talker(home, family, SCRIPT)) as server:
        rows = [{"id": "c", "messages": RECORDED, "tools": TOOLS}]
        prompts = write_prompts(tmp_path / "p.jsonl", rows)
        config = {"tokenizer": str(home.folder), "history": history}
        summary = capture_from(server, prompts, tmp_path / "run", **config)
    assert counts(summary) == (6, 6, 0, 0), summary.reasons
    whole: list[int] = []
    messages: list[dict[str, Any]] = []
    for trace in sorted(Run(tmp_path / "run").traces(), key=lambda trace: trace.turn):
        assert "history_drift" not in trace.marks
        assert trace.prompt_ids[: len(whole)] == whole
        whole = trace.input_ids
        messages = json.loads(trace.messages or "")
        assert trace.prompt_ids == home.render(messages, tools=TOOLS)
    assert sum(message["role"] == "tool" for message in messages) == 3
    findings = Findings()
    verify_run(Run(tmp_path / "run"), home.tokenizer, findings)
    assert not findings.failed, findings.of("failed")


def test_an_exchanged_answer_is_found(desk: Desk) -> None:
    """A later turn must stand on the very calls that are stored for the turn before."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from eyas.store.parts import parts

    desk.capture([RECORDED])
    for path in parts(desk.out, "traces"):
        table = pq.read_table(path)
        at = table.schema.get_field_index("messages")
        texts = [text.replace('\\"b\\"', '\\"c\\"').replace('"at":"b"', '"at":"c"')
                 for text in table.column("messages").to_pylist()]  # fmt: skip
        pq.write_table(table.set_column(at, table.field(at), pa.array(texts)), path)
    assert set(desk.verified()) >= {"prompt"}


def test_the_order_changes_nothing_of_a_conversation(desk: Desk, home: Home) -> None:
    """Threads that wait on the disk keep what they know of their tools."""
    rows = [RECORDED, [user("Q two"), said("...")], RECORDED[:5], RECORDED]
    desk.capture(rows)
    plain, prompts = desk.rows, desk.prompts
    desk.out = desk.folder / "ordered"
    desk.capture(rows, order=str(desk.folder / "run"))
    assert (desk.rows, desk.prompts) == (plain, prompts)
    desk.out = desk.folder / "resumed"
    desk.capture(rows, order="longest", policy=locked_from(home, "R two"), give_up_after=0.0)
    assert desk.capture(rows, order="longest").pending == 0
    assert (desk.rows, desk.prompts) == (plain, prompts)
