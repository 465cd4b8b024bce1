"""Figures of a run, against figures counted by hand."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from capturing import capture_from, config_for, numbered, paired, write_prompts
from eyas import Run, capture
from eyas.cli.stats import _few
from eyas.stats import Lengths, run_stats
from fault_server import Answer, Fault, FaultServer, Target


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_quantiles_are_those_of_the_sorted_list(lengths: list[int]) -> None:
    kept = Lengths()
    for length in lengths:
        kept.add(length)
    figures, ordered = kept.figures(), sorted(lengths)
    assert (figures["rows"], figures["total"]) == (len(lengths), sum(lengths))
    assert math.isclose(figures["mean"], sum(lengths) / len(lengths))
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        rank = max(1, -(-len(ordered) * percent // 100))
        assert figures[name] == ordered[rank - 1]


def test_later_turns_of_long_conversations_are_shown_together() -> None:
    turns = {str(turn): 40 - turn for turn in range(33)}
    assert _few(turns) == {**{str(t): 40 - t for t in range(7)}, "7-32": sum(range(8, 34))}
    assert _few({"0": 2}) == {"0": 2}


def test_nothing_has_figures_too() -> None:
    assert set(Lengths().figures().values()) == {0}


def test_a_run_counted_by_hand(tmp_path: Path) -> None:
    target = Target()

    def policy(body: Answer, honest: Answer) -> Fault | None:
        asked = target.tokenizer.decode(body["input_ids"])
        if "What is 3 " not in asked:
            return None
        honest["meta_info"]["prompt_tokens"] += 1
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", [*numbered(30), *paired(5), {"prompt": 5}])
    with FaultServer(target, policy=policy) as server:
        capture_from(server, prompts, tmp_path / "run", max_new_tokens=25)
    run = Run(tmp_path / "run")
    traces, figures = list(run.traces()), run_stats(run)
    cut = [trace for trace in traces if trace.finish_reason == "length"]
    assert 0 < len(cut) < len(traces)
    assert (figures["rows"], figures["truncated"]) == (len(traces), len(cut))
    assert figures["truncated_share"] == len(cut) / len(traces)
    assert figures["finish_reasons"] == {"stop": len(traces) - len(cut), "length": len(cut)}
    assert figures["rejected_reasons"]["prompt_tokens"] == 2  # q3, and the first turn of p3
    assert figures["rejected_reasons"]["bad_prompt"] == 1
    assert figures["rejected"] == sum(figures["rejected_reasons"].values())
    tokens = figures["tokens"]
    assert tokens["prompt"]["total"] == sum(len(trace.prompt_ids) for trace in traces)
    assert tokens["output"]["total"] == sum(len(trace.output_ids) for trace in traces)
    closed = [t.output_ids.index(511) for t in traces if 511 in t.output_ids]
    still_open = [len(t.output_ids) for t in traces if 511 not in t.output_ids]
    assert tokens["reasoning"]["total"] == sum(closed) + sum(still_open)
    assert tokens["answer"]["rows"] == len(closed)
    answers = [
        len(t.output_ids) - t.output_ids.index(511) - 1 - (t.finish_reason == "stop")
        for t in traces
        if 511 in t.output_ids
    ]
    assert tokens["answer"]["total"] == sum(answers)


def test_an_answer_whose_reasoning_is_closed_at_once(tmp_path: Path) -> None:
    target = Target()
    a = target.plain[0]

    def policy(_: Answer, honest: Answer) -> Fault:
        honest["output_ids"] = [511, a, a, 506]
        honest["text"] = target.tokenizer.decode([511, a, a])
        honest["meta_info"]["completion_tokens"] = 4
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
    with FaultServer(target, policy=policy) as server:
        capture(config_for(server, prompts, tmp_path / "run"), probe=False)
    tokens = run_stats(Run(tmp_path / "run"))["tokens"]
    assert (tokens["reasoning"]["rows"], tokens["answer"]["total"]) == (0, 6)
