"""Tool conversations of six families of models, each prompt compared with transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capturing import capture_from, write_prompts
from eyas import Run, Summary
from eyas.findings import Findings
from eyas.tools.packaged import typescript
from eyas.trace import Trace
from eyas.verify.run import verify_run
from fault_server import FaultServer
from tools.small import SMALL, small_home
from tools.talking import FAMILIES, Family, Home, Reply, Talker

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Get the {what} of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city's name."}},
                "required": ["city"],
            },
        },
    }
    for name, what in (("get_weather", "weather"), ("get_time", "time"))
]

PARIS, ROME = {"city": "Paris"}, {"city": "Rome"}
FIRST, SECOND, THIRD = "Weather and time in Paris?", "And the weather in Rome?", "Thanks!"
SUNNY, NOON, RAINY = "sunny, 21 degrees", "noon exactly", "rainy, 14 degrees"


def recorded(*, reverse: bool = True) -> list[dict[str, Any]]:
    """Two calls in one answer, their results in the other order; then one; then none."""

    def calls(*asked: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
        made = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for call_id, name, arguments in asked
        ]
        return {"role": "assistant", "content": None, "tool_calls": made}

    results = [
        {"role": "tool", "tool_call_id": "call_1", "content": SUNNY},
        {"role": "tool", "tool_call_id": "call_2", "content": NOON},
    ]
    return [
        {"role": "user", "content": FIRST},
        calls(("call_1", "get_weather", PARIS), ("call_2", "get_time", PARIS)),
        *(reversed(results) if reverse else results),
        {"role": "assistant", "content": "Sunny at noon."},
        {"role": "user", "content": SECOND},
        calls(("call_3", "get_weather", ROME)),
        {"role": "tool", "tool_call_id": "call_3", "content": RAINY},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": THIRD},
        {"role": "assistant", "content": "Welcome."},
    ]


@pytest.fixture(scope="module", params=["small", *FAMILIES])
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES.get(request.param, SMALL)


@pytest.fixture(scope="module")
def home(
    family: Family, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Home:
    folder = tmp_path_factory.mktemp(family.name)
    if family is SMALL:
        return small_home(folder)
    return family.prepare(request.getfixturevalue("shared"), folder)


@pytest.fixture(autouse=True)
def loaded_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary takes seconds to load, and each capture would do so."""
    monkeypatch.setattr("eyas.target.load_tokenizer", lambda *_, **__: home.tokenizer)


class Capture:
    """One conversation captured, and what transformers says of each of its prompts."""

    __test__ = False

    def __init__(
        self,
        family: Family,
        home: Home,
        folder: Path,
        script: dict[str, Any],
        messages: list[dict[str, Any]] | None = None,
        **more: Any,
    ) -> None:
        self.family, self.home, self.out = family, home, folder / "run"
        row = {"id": "c", "messages": messages or recorded(), "tools": TOOLS}
        with FaultServer(Talker(home, family, script)) as server:
            self.summary: Summary = capture_from(
                server,
                write_prompts(folder / "p.jsonl", [row]),
                self.out,
                tokenizer=str(home.folder),
                **more,
            )
        run = Run(self.out)
        self.traces = {trace.turn: trace for trace in run.traces()}
        self.reasons = {row.turn: row.reason for row in run.rejected()}

    def verified(self) -> list[str]:
        findings = Findings()
        verify_run(Run(self.out), self.home.tokenizer, findings)
        return [finding.name for finding in findings.of("failed")]

    def marks(self, turn: int) -> set[str]:
        return set(self.traces[turn].marks)

    def check_prompts(self, *turns: list[dict[str, Any]]) -> None:
        """Each trace's prompt against messages written by hand: those before its answer."""
        said = [message for turn in turns for message in turn]
        more: dict[str, Any] = {}
        if "tools_ts_str" in (self.home.tokenizer.chat_template or ""):
            more["tools_ts_str"] = typescript(self.home.tokenizer, TOOLS)
        at = 0
        for turn, trace in sorted(self.traces.items()):
            at = next(n for n in range(at, len(said)) if said[n]["role"] == "assistant")
            expected = self.home.render(said[:at], tools=TOOLS, **more)
            shown = self.home.tokenizer.decode
            assert trace.prompt_ids == expected, (
                f"turn {turn}:\n{shown(trace.prompt_ids)}\n-- transformers:\n{shown(expected)}"
            )
            at += 1
        assert at == len(said)


def says(text: str, family: Family) -> list[dict[str, Any]]:
    return [family.message(text)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_results_are_given_to_calls_in_any_order(
    family: Family, home: Home, tmp_path: Path
) -> None:
    """Several calls in one answer where the template can write that, else one after the other."""
    if family.parallel:
        first: list[Reply] = [[("get_time", PARIS), ("get_weather", PARIS)]]
        script: dict[str, Any] = {FIRST: first[0], SUNNY: "Sunny at noon!"}
    else:
        first = [[("get_time", PARIS)], [("get_weather", PARIS)]]
        script = {FIRST: first[0], NOON: first[1], SUNNY: "Sunny at noon!"}
    script |= {SECOND: [("get_weather", ROME)], RAINY: "It rains.", THIRD: "Bye."}
    got = Capture(family, home, tmp_path, script)
    extra = len(first) - 1
    assert (got.summary.input, got.summary.done, got.summary.rejected) == (5 + extra, 5 + extra, 0)
    asked: list[dict[str, Any]] = []
    number = 0
    for reply in first:
        assert isinstance(reply, list)
        asked.append(family.message(reply, number))
        asked += [
            family.result(name, number + n, NOON if name == "get_time" else SUNNY)
            for n, (name, _) in enumerate(reply)
        ]
        number += len(reply)
    got.check_prompts(
        [user(FIRST), *asked, family.message("Sunny at noon!")],
        [user(SECOND), family.message([("get_weather", ROME)], number)],
        [family.result("get_weather", number, RAINY), family.message("It rains.")],
        [user(THIRD), family.message("Bye.")],
    )
    called = {turn for turn in got.traces if "tool_calls" in got.marks(turn)}
    assert called == {*range(len(first)), len(first) + 1}
    assert not any({"role_header", "history_drift"} & set(t.marks) for t in got.traces.values())
    assert got.verified() == []


def test_a_call_without_a_result_ends_the_conversation(
    family: Family, home: Home, tmp_path: Path
) -> None:
    script = {FIRST: "I do not know.", SECOND: [("get_weather", {"city": "Roma"})]}
    got = Capture(family, home, tmp_path, script)
    assert got.summary.input == 5
    assert got.marks(0) >= {"no_tool_call"}
    assert got.marks(2) >= {"tool_calls", "tool_result_missing"}
    assert got.reasons == {
        1: "no_tool_call", 3: "tool_result_missing", 4: "tool_result_missing",
    }  # fmt: skip
    got.check_prompts(
        [user(FIRST), family.message("I do not know.")],
        [user(SECOND), family.message([("get_weather", {"city": "Roma"})])],
    )
    assert got.verified() == []


def test_the_nearest_result_is_given_if_asked_for(
    family: Family, home: Home, tmp_path: Path
) -> None:
    asked: list[Any] = [("get_weather", {"city": "Roma"})]
    script = {FIRST: "I do not know.", SECOND: asked, RAINY: "Rain.", THIRD: "Bye."}
    got = Capture(family, home, tmp_path, script, tool_results="nearest")
    assert got.reasons == {1: "no_tool_call"}
    got.check_prompts(
        [user(FIRST), family.message("I do not know.")],
        [user(SECOND), family.message(asked)],
        [family.result("get_weather", 0, RAINY), family.message("Rain.")],
        [user(THIRD), family.message("Bye.")],
    )
    assert ["tool_result_nearest" in got.marks(turn) for turn in (0, 2, 3, 4)] == [
        False, False, True, True,
    ]  # fmt: skip


def test_a_call_that_is_not_in_the_recording_may_still_have_a_result(
    family: Family, home: Home, tmp_path: Path
) -> None:
    """The target asks for the weather alone, gets it, and asks for the time afterwards."""
    steps: list[Reply] = [[("get_weather", PARIS)], [("get_time", PARIS)]]
    script = {
        FIRST: steps[0], SUNNY: steps[1], NOON: "All known.",
        SECOND: "No idea.", THIRD: "Bye.",
    }  # fmt: skip
    got = Capture(family, home, tmp_path, script)
    assert (got.summary.input, got.summary.done, got.summary.rejected) == (6, 5, 1)
    assert got.reasons == {4: "no_tool_call"}
    got.check_prompts(
        [user(FIRST), family.message(steps[0]), family.result("get_weather", 0, SUNNY)],
        [family.message(steps[1], 1), family.result("get_time", 1, NOON)],
        [family.message("All known."), user(SECOND), family.message("No idea.")],
        [user(THIRD), family.message("Bye.")],
    )


def test_a_call_that_cannot_be_read_ends_the_conversation(
    family: Family, home: Home, tmp_path: Path
) -> None:
    if family.name == "llama-3.1":
        broken = f"<|python_tag|>print(1){family.end}"
    else:
        whole = family.called([("get_weather", PARIS)], 0)
        cut = max(whole.rfind(text) for text in ("Paris", "</arg_value>"))
        broken = whole[:cut] + (family.call_end or family.end)
    got = Capture(family, home, tmp_path, {FIRST: lambda _: broken})
    assert got.marks(0) >= {"tool_call_unread"}
    assert set(got.reasons.values()) == {"tool_call_unread"}
    assert (got.summary.input, got.summary.done, got.summary.rejected) == (5, 1, 4)


def test_calls_that_come_back_with_other_ids_are_marked(
    family: Family, home: Home, tmp_path: Path
) -> None:
    """Written without spaces, which the template puts into arguments that it is given as objects."""
    spelled = family.called([("get_weather", ROME)], 0)
    other = spelled.replace('": ', '":')
    if other == spelled:
        pytest.skip("its calls hold no JSON")
    script = {FIRST: lambda _: other, RAINY: "Rain.", SECOND: "?", THIRD: "Bye."}
    got = Capture(family, home, tmp_path, script)
    drifts = [turn for turn in sorted(got.traces) if "history_drift" in got.marks(turn)]
    if family.as_text:  # the target's own spelling is given back
        assert drifts == []
    else:
        assert drifts == [turn for turn in sorted(got.traces) if turn]
    assert len(got.traces) > 1
    assert got.verified() == []


def test_content_beside_calls_is_put_together_again(
    family: Family, home: Home, tmp_path: Path
) -> None:
    """The next prompt begins with the ids of the prompt and of the answer before it."""
    if not family.content:
        pytest.skip("its template shows no content beside calls")
    asked: list[Any] = [("get_weather", ROME)]
    spoken = family.called(asked, 0, content="Let me see.")
    script = {FIRST: lambda _: spoken, RAINY: "Rain.", SECOND: "?", THIRD: "Bye."}
    got = Capture(family, home, tmp_path, script)
    before, after = got.traces[0], got.traces[1]
    whole: Trace = before
    if family.reasoning is None or family.name != "deepseek-r1":  # that template drops reasoning
        stop = 0 if family.call_end in ("", family.end) else 1
        ids = whole.input_ids
        assert after.prompt_ids[: len(ids) - stop] == ids[: len(ids) - stop]
    shown = json.loads(after.messages or "")[1]
    assert shown["content"].strip() == "Let me see."
    assert [call["function"]["name"] for call in shown["tool_calls"]] == ["get_weather"]
