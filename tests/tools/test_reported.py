"""Faults that people reported of tool conversations elsewhere, with the outcome they should have had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from capturing import capture_from, write_prompts
from eyas import Run
from fault_server import FaultServer
from tools.small import NAMED_IDS, SMALL, call, small_home, tool
from tools.talking import Family, Talker, kimi

TOOLS = [tool("get_weather", "city"), tool("get_time", "city")]
PARIS, ROME = {"city": "Paris"}, {"city": "Rome"}


def captured(
    folder: Path, family: Family, template: str | None, messages: list[Any], script: Any
) -> tuple[Any, Run]:
    home = small_home(folder / "home") if template is None else small_home(
        folder / "home", template)  # fmt: skip
    prompts = write_prompts(folder / "p.jsonl", [{"id": "c", "messages": messages, "tools": TOOLS}])
    with FaultServer(Talker(home, family, script)) as server:
        summary = capture_from(server, prompts, folder / "run", tokenizer=str(home.folder))
    return summary, Run(folder / "run")


def test_another_call_never_gets_the_recorded_result(tmp_path: Path) -> None:
    """The recording calls get_weather(Paris); the target get_time(Paris) and get_weather(Rome)."""
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": None, "tool_calls": [call("get_weather", PARIS, "1")]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny in Paris"},
        {"role": "assistant", "content": "..."},
        {"role": "user", "content": "Q2"},
    ]
    script = {"Q": [("get_time", PARIS), ("get_weather", ROME)]}
    summary, run = captured(tmp_path, SMALL, None, messages, script)
    assert (summary.input, summary.done, summary.rejected) == (3, 1, 2)
    (trace,) = run.traces()
    assert trace.marks == ["tool_calls", "tool_result_missing"]
    assert {row.reason for row in run.rejected()} == {"tool_result_missing"}
    assert "get_time" in next(run.rejected()).detail
    assert not any("sunny" in (row.messages or "") for row in [trace, *run.rejected()])


def test_ids_of_calls_stay_as_they_were_sampled(tmp_path: Path) -> None:
    """The recording has ids of its own, and the same function is called in two turns."""
    family = Family(
        "named", "", "", _small_kimi, "<|end|>", make_id=lambda n, name: f"functions.{name}:{n}"
    )
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "tool_calls": [call("get_weather", PARIS, "call_ab12")]},
        {"role": "tool", "tool_call_id": "call_ab12", "content": "R sunny"},
        {"role": "assistant", "tool_calls": [call("get_weather", ROME, "call_cd34")]},
        {"role": "tool", "tool_call_id": "call_cd34", "content": "R rainy"},
        {"role": "assistant", "content": "..."},
    ]
    script = {
        "Q": lambda _: family.called([("get_weather", PARIS)], 0),
        "R sunny": lambda _: family.called([("get_weather", ROME)], 1),
        "R rainy": "Done.",
    }
    summary, run = captured(tmp_path, family, NAMED_IDS, messages, script)
    assert (summary.done, summary.rejected) == (3, 0)
    last = max(run.traces(), key=lambda trace: trace.turn)
    shown = json.loads(last.messages or "")
    called = [one["id"] for m in shown for one in m.get("tool_calls", ())]
    answered = [m["tool_call_id"] for m in shown if m["role"] == "tool"]
    assert called == answered == ["functions.get_weather:0", "functions.get_weather:1"]


def _small_kimi(calls: list[tuple[str, dict[str, Any], str]]) -> str:
    whole = kimi(calls)
    for theirs, ours in (
        ("<|tool_calls_section_begin|>", "<|calls|>"),
        ("<|tool_calls_section_end|>", "<|calls_end|>"),
        ("<|tool_call_begin|>", "<|call|>"),
        ("<|tool_call_argument_begin|>", "<|arguments|>"),
        ("<|tool_call_end|>", "<|call_end|>"),
    ):
        whole = whole.replace(theirs, ours)
    return whole


def test_definitions_that_are_no_json_refuse_the_row(tmp_path: Path) -> None:
    home = small_home(tmp_path / "home")
    rows = [
        {"id": "bad", "prompt": "Q", "tools": "[{"},
        {"id": "good", "prompt": "Q", "tools": TOOLS},
    ]
    with FaultServer(Talker(home, SMALL, {"Q": "A."})) as server:
        summary = capture_from(
            server,
            write_prompts(tmp_path / "p.jsonl", rows),
            tmp_path / "run",
            tokenizer=str(home.folder),
        )
    assert (summary.input, summary.done, summary.rejected) == (2, 1, 1)
    (row,) = Run(tmp_path / "run").rejected()
    assert row.reason == "bad_tools"
    assert "not JSON" in row.detail
