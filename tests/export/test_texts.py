"""Forms of text: what is written of a conversation, what is left out, and the drift that is stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, numbered, paired, run_eyas, write_prompts
from exporting import a_trace, make_run
from eyas import Run, load_tokenizer
from eyas.demo.server import TARGET
from eyas.drift import measure_drift
from eyas.errors import ConfigError
from eyas.export import FORMS, ExportReport, export_run
from eyas.run_target import open_run_target
from eyas.trace import Trace
from fault_server import FaultServer, Target
from tools.small import small_home
from tools.test_threads import RECORDED, SCRIPT, TOOLS, Desk

TEXT = sorted(name for name, form in FORMS.items() if form.text is not None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of one, two and three turns, some with a system message, some cut."""
    folder = tmp_path_factory.mktemp("texts")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?"}]
    three = [
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "And 2+2?"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "And 3+3?"},
    ]
    rows: list[dict[str, Any]] = [
        *numbered(12),
        *paired(3),
        {"id": "sys", "messages": chat},
        {"id": "three", "messages": three},
        {"id": "twice", "messages": [*chat[1:], *chat[1:]]},
    ]
    with FaultServer(Target()) as server:
        capture_from(server, write_prompts(folder / "p.jsonl", rows), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversation with calls and results, and one without tools."""
    folder = tmp_path_factory.mktemp("tools")
    desk = Desk(small_home(folder / "home"), folder)
    rows = [{"id": "t", "messages": RECORDED, "tools": TOOLS},
            {"id": "p", "messages": [{"role": "user", "content": "Q two"}]}]  # fmt: skip
    desk.capture(rows, SCRIPT)
    return desk.out


def exported(run: Path, to: str, folder: Path, **more: Any) -> tuple[dict[str, Any], ExportReport]:
    out = folder / f"{to}.jsonl"
    report = export_run(run, to=to, out=out, overwrite=True, **more)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert report.read == report.turns + sum(report.left_out.values())
    assert report.rows == len(rows)
    return {row["id"]: row for row in rows}, report


def last_traces(run: Path) -> dict[str, Trace]:
    """The last trace of each thread, by the id that its row has."""
    found: dict[str, Trace] = {}
    for trace in Run(run).traces():
        thread = trace.id.rpartition("/")[0]
        if thread not in found or found[thread].turn < trace.turn:
            found[thread] = trace
    return {f"{t}/0-{x.turn}" if x.turn else f"{t}/0": x for t, x in found.items()}


def said(trace: Trace) -> tuple[str, str]:
    """Reasoning and content, taken out of the ids by the tokenizer's own decoder."""
    backend = load_tokenizer(str(TARGET)).backend
    text = backend.decode(
        trace.output_ids[: -1 if trace.stop_id else None], skip_special_tokens=False
    )
    reasoning, closer, content = text.partition("</think>")
    assert closer
    return reasoning, content


def test_messages_are_what_was_rendered_and_what_came_back(run: Path, tmp_path: Path) -> None:
    for to in ("openai", "automodel"):
        rows, report = exported(run, to, tmp_path)
        wanted = last_traces(run)
        assert set(rows) == set(wanted)
        for name, trace in wanted.items():
            reasoning, content = said(trace)
            answer = {"role": "assistant", "content": content, "reasoning_content": reasoning}
            assert rows[name]["messages"] == [*json.loads(trace.messages or ""), answer]
            assert "tools" not in rows[name]
        assert report.rows < report.turns == Run(run).count()


@pytest.mark.parametrize("to", ["sharegpt", "torchspec", "specforge-chat", "eagle"])
def test_reasoning_stands_between_the_markers_where_there_is_no_place_for_it(
    to: str, run: Path, tmp_path: Path
) -> None:
    rows, report = exported(run, to, tmp_path)
    wanted = last_traces(run)
    missing = {"sharegpt": set(), "specforge-chat": set(), "torchspec": {"twice/0/0"},
               "eagle": {"twice/0/0", "sys/0/0"}}[to]  # fmt: skip
    assert set(wanted) - set(rows) == missing
    assert report.left_out.get("unheld", 0) == len(missing)
    roles = {"human": "user", "gpt": "assistant"} if to in ("sharegpt", "eagle") else {}
    for name, row in rows.items():
        messages = [
            {"role": roles.get(m["from"], m["from"]), "content": m["value"]} if roles else m
            for m in row["conversations"]
        ]
        reasoning, content = said(wanted[name])
        assert messages[-1] == {
            "role": "assistant", "content": f"<think>{reasoning}</think>{content}"
        }  # fmt: skip
        before = json.loads(wanted[name].messages or "")
        assert [m["role"] for m in messages[:-1]] == [m["role"] for m in before]
        for m, given in zip(messages[:-1], before, strict=True):
            thought = given.get("reasoning_content")
            shown = (
                given["content"]
                if thought is None
                else f"<think>{thought}</think>{given['content']}"
            )
            assert m["content"] == shown


def test_calls_of_tools(tools: Path, tmp_path: Path) -> None:
    trace = last_traces(tools)["t/0/0-5"]
    given = json.loads(trace.messages or "")
    calls = [m for m in given if m.get("tool_calls")]
    for to in ("openai", "automodel", "specforge-chat"):
        rows, _ = exported(tools, to, tmp_path)
        assert set(rows) == {"t/0/0-5", "p/0/0"}
        row = rows["t/0/0-5"]
        messages = row.get("messages") or row["conversations"]
        found = [m["tool_calls"] for m in messages if m.get("tool_calls")]
        if to == "specforge-chat":
            found, row["tools"] = [json.loads(f) for f in found], json.loads(row["tools"])
        assert row["tools"] == TOOLS
        assert [c["function"]["name"] for f in found for c in f] == ["look", "count", "look"]
        assert [json.loads(c["function"]["arguments"]) for f in found for c in f] == [
            {"at": "a"}, {}, {"at": "b"}
        ]  # fmt: skip
        assert [c["id"] for f in found for c in f] == [
            c["id"] for m in calls for c in m["tool_calls"]
        ]
        results = [m["content"] for m in messages if m["role"] == "tool"]
        assert results == ["R a", "R two", "R b"]
    for to in ("sharegpt", "eagle", "torchspec"):
        rows, report = exported(tools, to, tmp_path)
        assert set(rows) == {"p/0/0"}
        assert report.left_out == {"unheld": 6}


def test_the_drift_is_that_of_the_rows(run: Path, tmp_path: Path) -> None:
    """On rows of one turn the fields of a chat API lose what `eyas drift` says that they lose."""
    loaded = load_tokenizer(str(TARGET))
    measured = measure_drift(Run(run), open_run_target(Run(run), loaded)).ways["chat"]
    alone = [t.id for t in Run(run).traces()]
    _, report = exported(run, "openai", tmp_path)
    assert report.drift["rows"] == len(last_traces(run))
    assert report.drift["rows_changed"] <= measured.rows_changed
    singles = make_run(
        tmp_path / "singles",
        [t for t in Run(run).traces() if t.turn == 0],
        **Run(run).manifest.model_dump(include={"fingerprint", "profile", "tokenizer"}),
    )
    _, report = exported(singles, "openai", tmp_path)
    one = measure_drift(Run(singles), open_run_target(Run(singles), loaded)).ways["chat"]
    assert {**one.as_dict()} == report.drift
    assert report.drift["rows"] == len([name for name in alone if name.endswith("/0")])


def test_a_conversation_ends_before_a_turn_that_is_left_out(run: Path, tmp_path: Path) -> None:
    """The messages of later turns would bring back the answer that was not wanted."""
    traces = list(Run(run).traces())
    values = Run(run).manifest.model_dump(include={"fingerprint", "profile", "tokenizer"})
    for trace in traces:
        if trace.id == "three/0/1":
            trace.marks = ["loop"]
        if trace.id == "p1/0/0":
            trace.marks = ["loop"]
    marked = make_run(tmp_path / "marked", traces, parts=3, **values)
    rows, report = exported(marked, "openai", tmp_path, drop_marked=("loop",))
    assert "three/0/0" in rows
    assert not [name for name in rows if name.startswith(("p1/", "three/0/0-"))]
    assert report.left_out == {"marked": 2, "behind_left_out": 2}


def test_rows_without_messages_are_counted(run: Path, tmp_path: Path) -> None:
    values = Run(run).manifest.model_dump(include={"fingerprint", "profile", "tokenizer"})
    traces = [next(Run(run).traces()), a_trace("raw/0", 0, [1, 2], [3])]
    mixed = make_run(tmp_path / "mixed", traces, **values)
    rows, report = exported(mixed, "openai", tmp_path)
    assert (len(rows), report.left_out) == (1, {"no_messages": 1})


@pytest.mark.parametrize("to", TEXT)
def test_splits_and_shuffles_of_texts(to: str, run: Path, tmp_path: Path) -> None:
    whole, before = exported(run, to, tmp_path)
    report = export_run(
        run, to=to, out=tmp_path / "out", split=(("a", 0.5), ("b", 0.5)), shuffle=1, shards=2
    )
    found = {}
    for file in sorted((tmp_path / "out").glob("*.jsonl")):
        found.update({row["id"]: row for row in map(json.loads, file.read_text().splitlines())})
    assert found == whole
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 4
    causes = {name: value for name, value in report.drift.items() if name != "examples"}
    assert causes == {name: v for name, v in before.drift.items() if name != "examples"}


@pytest.mark.parametrize(
    ("choices", "said_"),
    [
        ({"mask": "no-reasoning"}, "--mask no-reasoning: --to openai is text"),
        ({"merge_turns": True}, "a conversation is one row there in any case"),
        ({"max_length": 9, "on_longer": "cut"}, "there is no id at which to cut"),
        ({"columns": ("turn",)}, "--columns: --to openai has the columns"),
    ],
)
def test_choices_that_text_has_not(choices: Any, said_: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said_):
        export_run(run, to="openai", out=tmp_path / "x", **choices)


def test_another_tokenizer_is_refused(run: Path, tools: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are not those of the run"):
        export_run(run, to="openai", out=tmp_path / "x", tokenizer=Run(tools).manifest.tokenizer)
    assert not list(tmp_path.iterdir())


def test_the_command_states_the_drift(run: Path, tmp_path: Path) -> None:
    shown = run_eyas("export", str(run), "--to", "eagle", "--out", str(tmp_path / "e.jsonl"))
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert any(line.startswith("drift     ") and "have other ids" in line for line in lines)
    assert any(line.startswith("trainer   format only") for line in lines)
    assert "left out  2 with roles, tools or an order" in shown.stdout
