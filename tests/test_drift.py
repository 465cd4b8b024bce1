"""What text would lose: every cause on a row made for it, and the counts by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capturing import capture_from, numbered, paired, run_eyas, write_prompts
from eyas.demo.server import TARGET
from eyas.drift import CAUSES, DriftReport, measure_drift
from eyas.drift.causes import common_ids
from eyas.run_target import open_run_target
from eyas.store import Run
from eyas.tokens import ChatTemplate, build_profile, load_tokenizer
from fault_server import FaultServer
from fault_server import Target as Pretended
from tools.small import small_home, tool
from tools.talking import Home, make_home
from writing import trace_of, write_run


def template(answer: str, generation: str = "<|assistant|><think>") -> str:
    """A template that writes an earlier answer so, and asks for one so."""
    return (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{{- '<|user|>' + m.content + '<|end|>' -}}{%- else -%}" + answer + "{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '" + generation + "' -}}{%- endif -%}"
    )


KEEPS = template(
    "{{- '<|assistant|><think>' + (m.reasoning_content | default('') | trim) + '</think>' "
    "+ m.content | trim + '<|end|>' -}}"
)
DROPS = template("{{- '<|assistant|><think></think>' + m.content + '<|end|>' -}}")
UNMARKED = template("{{- '<|assistant|>' + m.content + '<|end|>' -}}")
ENDLESS = template("{{- '<|assistant|><think>' + m.reasoning_content + '</think>' + m.content -}}")
ENDS_OTHERWISE = template(
    "{{- '<|assistant|><think>' + m.reasoning_content + '</think>' + m.content + '<|system|>' -}}"
)
ADDS = template("{{- '<|assistant|><think></think>' + m.content + '<|end|>' -}}", "<|assistant|>")
SQUEEZES = template(
    "{{- '<|assistant|><think>' + (m.reasoning_content | replace('\\n\\n', '\\n')) + '</think>' "
    "+ m.content + '<|end|>' -}}"
)
BARE = template("{{- '<|assistant|>a' + m.content[1:] + '<|end|>' -}}", "<|assistant|>a")


def longest_common(first: list[int], second: list[int]) -> int:
    """The usual table."""
    row = [0] * (len(second) + 1)
    for x in first:
        before = row[:]
        for at, y in enumerate(second, 1):
            row[at] = before[at - 1] + 1 if x == y else max(before[at], row[at - 1])
    return row[-1]


@given(st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 4), max_size=40))
def test_what_is_common_is_what_the_table_says(first: list[int], second: list[int]) -> None:
    assert common_ids(first, second) == longest_common(first, second)


@dataclass
class Stage:
    """A target by its template, and runs of it that are written by hand."""

    home: Home
    folder: Path

    def ids(self, text: str) -> list[int]:
        return self.home.tokenizer.encode(text)

    def spelled(self, text: str) -> list[int]:
        """An id a byte: the same text in other pieces."""
        table = {self.home.tokenizer.join([i]): i for i in range(self.home.tokenizer.size)}
        return [table[bytes([byte])] for byte in text.encode()]

    def measure(self, output: list[int], **more: Any) -> DriftReport:
        """The drift of a run of one row."""
        messages = [{"role": "user", "content": "Why?"}]
        prompt = more.pop("prompt_ids", None) or self.home.render(messages)
        tokenizer = self.home.tokenizer
        profile = build_profile(tokenizer, ChatTemplate.of(tokenizer))
        start, end, _, _ = profile.spans(tokenizer, prompt, output)
        stopped = output[-1] in profile.stop_ids
        row = trace_of(
            0, prompt, output, messages=json.dumps(messages), reasoning_start=start,
            reasoning_end=end, stop_id=output[-1] if stopped else None,
            finish_reason="stop" if stopped else "length", **more,
        )  # fmt: skip
        self.folder.mkdir()
        path = write_run(self.folder / "run", [row], source=self.home.folder)
        run = Run(path)
        return measure_drift(run, open_run_target(run, tokenizer))


def stage(tmp_path: Path, written: str) -> Stage:
    demo = load_tokenizer(str(TARGET))
    ends = ["<|end|>"]
    home = make_home(tmp_path / "home", demo.backend, dict(demo.special_tokens_map), written, ends)
    return Stage(home, tmp_path / "runs")


def causes(report: DriftReport) -> dict[str, str | None]:
    """The one row's cause, a way."""
    assert all(way.rows == 1 for way in report.ways.values()), report
    return {name: next(iter(way.causes), None) for name, way in report.ways.items()}


def test_what_survives_is_not_counted(tmp_path: Path) -> None:
    at = stage(tmp_path, KEEPS)
    report = at.measure(at.ids("It is so.</think>Since two and two<|end|>"))
    assert causes(report) == {"text": None, "chat": None, "history": None}
    assert {way.ids_lost for way in report.ways.values()} == {0}


@pytest.mark.parametrize(
    ("written", "said", "text", "chat"),
    [
        (KEEPS, "It is.</think>So. \n<|end|>", None, "space"),
        (KEEPS, " \nIt is.</think>So.<|end|>", None, "space"),
        (SQUEEZES, "It is.\n\nSo be it.\n\nOr not.</think>So.<|end|>", None, "space"),
        (DROPS, "It is.</think>So.<|end|>", None, "reasoning_left_out"),
        (UNMARKED, "It is.</think>So.<|end|>", None, "reasoning_left_out"),
        (UNMARKED, "</think>So.<|end|>", None, "marker_lost"),
        (ENDS_OTHERWISE, "It is.</think>So.<|end|>", None, "other_end"),
        (KEEPS, "It is.</think>So", None, "end_added"),
        (KEEPS, "It is", None, "end_added"),
        (ADDS, "So.<|end|>", None, "marker_added"),
    ],
)
def test_each_cause_of_a_template(
    written: str, said: str, text: str | None, chat: str, tmp_path: Path
) -> None:
    at = stage(tmp_path, written)
    output = at.ids(said)
    report = at.measure(output, marks=[] if said.endswith(">") else ["truncated"])
    assert causes(report) == {"text": text, "chat": chat, "history": chat}
    gone = {
        "space": at.ids(said)[:-1],
        "reasoning_left_out": at.ids("It is.</think>So."),
        "marker_lost": at.ids("</think>"),
        "other_end": [506],
        "end_added": [],
        "marker_added": [],
    }[chat]
    way = report.ways["chat"]
    assert way.ids == len(output)
    if chat == "reasoning_left_out":  # the markers may be there, the reasoning is not
        marker = written == UNMARKED
        assert way.ids_lost == len(at.ids("It is.")) + marker
    elif chat == "space":
        assert 0 < way.ids_lost <= len(gone)
    else:
        assert way.ids_lost == len(gone)


def test_a_template_that_writes_no_end(tmp_path: Path) -> None:
    at = stage(tmp_path, ENDLESS)
    report = at.measure(at.ids("It is.</think>So.<|end|>"))
    # As an earlier turn it ends with the user's header.
    assert causes(report) == {"text": None, "chat": "stop_lost", "history": "other_end"}
    assert report.ways["chat"].ids_lost == 1


def test_the_same_text_in_other_pieces(tmp_path: Path) -> None:
    at = stage(tmp_path, KEEPS)
    again = at.ids("and the two")
    odd = at.spelled("and the two")
    report = at.measure([*at.ids("It is.</think>"), *odd, 506])
    assert causes(report) == dict.fromkeys(report.ways, "other_pieces")
    for way in report.ways.values():
        assert way.ids_lost == len(odd) - longest_common(odd, again)
        (example,) = way.examples["other_pieces"]
        assert example["output_position"] == len(at.ids("It is.</think>"))
        assert example["pieces"][1] == "a"
        assert "".join(example["pieces_again"][1:]).startswith("an")


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        ("<|user|>", "text_to_control"),
        (b"\xe6", "unfinished_character"),
        (b"\xef", "unfinished_character"),
        (600, "no_text"),
    ],
)
def test_ids_that_text_cannot_say(odd: Any, cause: str, tmp_path: Path) -> None:
    at = stage(tmp_path, KEEPS)
    table = {at.home.tokenizer.join([i]): i for i in range(at.home.tokenizer.size)}
    match odd:
        case str():
            ids = at.spelled(odd)
        case bytes():
            ids = [table[odd]]
        case _:
            ids = [odd]
    report = at.measure([*at.ids("It is.</think>So"), *ids, *at.ids(".<|end|>")])
    assert causes(report) == dict.fromkeys(report.ways, cause)
    lost = 0 if odd == b"\xef" else len(ids)  # U+FFFD begins with that very byte
    assert {way.ids_lost for way in report.ways.values()} == {lost}


def test_one_id_across_the_border(tmp_path: Path) -> None:
    at = stage(tmp_path, BARE)
    report = at.measure(at.ids("nd so<|end|>"))
    assert list(report.ways["text"].causes) == ["seam"]
    assert report.ways["text"].prompts_changed == 1


def test_a_prompt_in_other_pieces(tmp_path: Path) -> None:
    at = stage(tmp_path, KEEPS)
    user = at.ids("<|user|>")
    odd = [*user, *at.spelled("the one"), *at.ids("<|end|><|assistant|><think>")]
    report = at.measure(at.ids("It is.</think>So.<|end|>"), prompt_ids=odd)
    assert causes(report)["text"] == "prompt"
    assert report.ways["text"].prompts_changed == 1
    assert report.ways["text"].ids_lost == 0  # the answer comes back


def test_calls_that_are_written_otherwise(tmp_path: Path) -> None:
    home = small_home(tmp_path / "home")
    tools = [tool("look", "at")]
    said = '<tool_call>\n{"name":"look","arguments":{"at":"a"}}\n</tool_call><|end|>'
    messages = [{"role": "user", "content": "Look."}]
    row = trace_of(
        0, home.render(messages, tools=tools), home.tokenizer.encode(said),
        messages=json.dumps(messages), tools=json.dumps(tools), marks=["tool_calls"],
    )  # fmt: skip
    run = Run(write_run(tmp_path / "run", [row], source=home.folder))
    report = measure_drift(run, open_run_target(run, home.tokenizer))
    assert causes(report) == {"text": None, "chat": "calls", "history": "calls"}
    assert report.ways["chat"].ids_lost == 0  # spaces are put between


def test_rows_that_cannot_be_rendered_are_counted_apart(tmp_path: Path) -> None:
    refuses = KEEPS.replace(
        "{%- for m", "{%- if messages | length > 2 -%}{{- raise_exception('no more') -}}{%- endif -%}{%- for m", 1
    )  # fmt: skip
    at = stage(tmp_path, refuses)
    report = at.measure(at.ids("It is.</think>So.<|end|>"))
    assert report.ways["history"].rows == 0
    assert dict(report.ways["history"].not_measured) == {"the chat template refuses: no more": 1}
    rows = [trace_of(1, [1, 2], at.ids("</think>a<|end|>"), messages=None)]
    run = Run(write_run(tmp_path / "ready", rows, source=at.home.folder))
    report = measure_drift(run, open_run_target(run, at.home.tokenizer))
    assert dict(report.ways["chat"].not_measured) == {"it was captured from ready-made ids": 1}
    assert report.ways["text"].rows == 1


def test_a_captured_run_and_the_command(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [*numbered(40), *paired(20)])
    with FaultServer(Pretended()) as server:
        capture_from(server, prompts, tmp_path / "run")
    run = Run(tmp_path / "run")
    tokenizer = load_tokenizer(str(TARGET))
    done = run_eyas("drift", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    traces = list(run.traces())
    changed = lost = 0
    for trace in traces:
        again = tokenizer.encode(tokenizer.decode(trace.input_ids))
        changed += again != trace.input_ids
        at = len(trace.prompt_ids)
        if again[:at] == trace.prompt_ids:
            lost += len(trace.output_ids) - longest_common(trace.output_ids, again[at:])
    assert 0 < changed < len(traces)
    text = figures["ways"]["text"]
    assert (text["rows"], text["rows_changed"], text["ids_lost"]) == (len(traces), changed, lost)
    assert text["ids"] == sum(len(trace.output_ids) for trace in traces)
    assert figures["ways"]["chat"]["rows_changed_share"] == 1.0  # its template drops the reasoning
    assert set(text["causes"]) <= set(CAUSES)
    few = run_eyas("drift", str(tmp_path / "run"), "--limit", "7", "--json")
    assert json.loads(few.stdout)["rows"] == 7
    drawn = [
        run_eyas("drift", str(tmp_path / "run"), "--sample", "9", "--seed", seed).stdout
        for seed in "112"
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith("9 rows;")
    assert "the reasoning is not there" in drawn[0]


@pytest.mark.parametrize(
    ("name", "said", "chat"),
    [
        ("qwen3", "<think>\nOkay.\n\nIt is 4.\n</think>\n\n2 + 2 = **4**.<|im_end|>", None),
        (
            "kimi-k2.5",
            " The user asks. It is 4. </think> 2 + 2 = 4<|im_end|>",
            "reasoning_left_out",
        ),
    ],
)
def test_templates_of_real_models(
    name: str, said: str, chat: str | None, shared: Path, tmp_path: Path
) -> None:
    """Qwen3 gives a last answer back as it was, Kimi-K2.5 without its reasoning; no earlier answer
    keeps its own."""
    at = shared / "tokenizers" / name
    tokenizer = load_tokenizer(str(at))
    template = ChatTemplate.of(tokenizer)
    profile = build_profile(tokenizer, template)
    messages = [{"role": "user", "content": "What is 2+2?"}]
    prompt, output = tokenizer.encode(template.render(messages)), tokenizer.encode(said)
    start, end, _, _ = profile.spans(tokenizer, prompt, output)
    row = trace_of(0, prompt, output, messages=json.dumps(messages), reasoning_start=start,
                   reasoning_end=end)  # fmt: skip
    run = Run(write_run(tmp_path / "run", [row], source=at))
    report = measure_drift(run, open_run_target(run, tokenizer))
    assert causes(report) == {"text": None, "chat": chat, "history": "reasoning_left_out"}


def test_what_cannot_be_read_or_rendered_is_said(tmp_path: Path) -> None:
    at = stage(tmp_path, KEEPS)
    row = trace_of(0, at.ids("<|user|>"), at.ids("</think>So<|end|>"), messages="[not JSON")
    path = write_run(tmp_path / "run", [row], source=at.home.folder)
    done = run_eyas("drift", str(path))
    assert done.returncode == 2
    assert "row 'c0/0/0' cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    row.messages = json.dumps([{"role": "user", "content": "Why?"}])
    path = write_run(tmp_path / "other", [row], source=at.home.folder, template="0" * 64)
    done = run_eyas("drift", str(path))
    assert done.returncode == 0, done.stderr
    assert "the chat template at hand is not the run's" in done.stdout
    assert done.stdout.count("1 rows not measured: its chat template is not at hand") == 2


def test_a_tokenizer_that_moved_is_asked_for(tmp_path: Path) -> None:
    at = stage(tmp_path, KEEPS)
    row = trace_of(0, at.ids("<|user|>"), at.ids("</think>So<|end|>"))
    path = write_run(tmp_path / "run", [row], source=at.home.folder)
    moved = at.home.folder.rename(tmp_path / "moved")
    done = run_eyas("drift", str(path))
    assert done.returncode == 2
    assert "--tokenizer says where it is now" in done.stderr
    assert run_eyas("drift", str(path), "--tokenizer", str(moved)).returncode == 0
