"""The order in which conversations are sent, and what must not depend on it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capturing import capture_from, check_run, numbered, run_eyas, write_prompts
from eyas import Run
from eyas.config import config_yaml, make_config, read_config_file
from eyas.conversation import Conversation
from eyas.demo.server import TARGET
from eyas.errors import ConfigError
from eyas.order import LongestFirst, Waiting
from eyas.store.lengths import Lengths
from fault_server import FaultServer, Target

# -- what waits ----------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e9)))
def test_what_waits_comes_back_whole_in_falling_order(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[float]
) -> None:
    """Property: each item once, the greatest first, equal ones as they came."""
    shared = object()
    waiting = Waiting(tmp_path_factory.getbasetemp(), [shared])
    for number, rank in enumerate(ranks):
        waiting.put((number, rank, shared, "ä" * number), rank)
    assert len(waiting) == len(ranks)
    taken = [waiting.take() for _ in ranks]
    assert [item[:2] for item in taken] == sorted(enumerate(ranks), key=lambda pair: -pair[1])
    assert all(item[2] is shared and item[3] == "ä" * item[0] for item in taken)
    assert len(waiting) == 0
    waiting.close()


def test_what_waits_leaves_no_file(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    waiting.put("x" * 100_000, 1.0)
    assert list(tmp_path.iterdir()) == []
    waiting.close()


@dataclass
class Thread:
    conversation: Conversation
    key: bytes
    turn: int = 0
    tokens: float | None = None


def thread(number: int, turns: int = 1, characters: int = 5, turn: int = 0) -> Thread:
    key = number.to_bytes(8, "big") + bytes(8)
    stretches = [[{"role": "user", "content": "x" * characters}] for _ in range(turns)]
    return Thread(Conversation(key, None, stretches), key, turn)


def lengths(tmp_path: Path, tokens: dict[int, int]) -> Lengths:
    """As an earlier run would tell them."""

    class Known(Lengths):
        def __init__(self) -> None:
            return None

        def of(self, key: bytes, given_id: str | None) -> int | None:
            return tokens.get(int.from_bytes(key[:8], "big"))

    return Known()


def numbers(threads: list[Thread]) -> list[int]:
    return [int.from_bytes(one.key[:8], "big") for one in threads]


def test_the_longest_of_what_was_read_goes_at_once_as_far_as_there_is_room(tmp_path: Path) -> None:
    """An eighth of what was met; all others when everything was."""
    tokens = {number: 7 * number % 32 for number in range(32)}
    order = LongestFirst(lengths(tmp_path, tokens), tmp_path)
    first = numbers(order.sift(map(thread, range(16)), room=9, all_met=False))
    assert [tokens[number] for number in first] == sorted(tokens[n] for n in range(16))[:13:-1]
    assert order.sift(map(thread, range(16, 24)), room=0, all_met=False) == []
    rest = numbers(order.sift(map(thread, range(24, 32)), room=0, all_met=True))
    assert sorted(first + rest) == list(range(32))
    assert [tokens[number] for number in rest] == sorted(
        (tokens[number] for number in rest), reverse=True
    )
    assert len(order) == 0


def test_some_short_ones_go_before_all_others(tmp_path: Path) -> None:
    """They tell the servers' paces; neither the longest nor trifles do."""
    tokens = {number: 7 * number % 64 for number in range(64)}
    order = LongestFirst(lengths(tmp_path, tokens), tmp_path, tasters=10)
    first = numbers(order.sift(map(thread, range(32)), room=9, all_met=False))
    met = sorted((tokens[number] for number in range(32)), reverse=True)
    assert sorted(tokens[number] for number in first[:8]) == sorted(met[20:28])
    assert [tokens[number] for number in first[8:]] == met[:3]
    rest = numbers(order.sift(map(thread, range(32, 64)), room=9, all_met=True))
    assert len(rest) == 64 - len(first)
    assert [tokens[number] for number in rest[2:]] == sorted(
        (tokens[number] for number in rest[2:]), reverse=True
    )
    assert len({*first, *rest}) == 64


def test_the_shortest_can_be_had_once_everything_was_met(tmp_path: Path) -> None:
    tokens = {number: 10 * number for number in range(200)}
    order = LongestFirst(lengths(tmp_path, tokens), tmp_path)
    given = order.sift(map(thread, range(100)), room=0, all_met=False)
    assert given == []
    assert order.shortest(5, 1000.0) == []
    given = order.sift(map(thread, range(100, 200)), room=0, all_met=True)
    assert numbers(order.shortest(5, 1000.0)) == [0, 1, 2, 3, 4]
    assert numbers(order.shortest(5, 60.0)) == [5, 6]
    assert order.shortest(5, 60.0) == []
    while more := order.sift([], room=9, all_met=True):
        given += more
    assert numbers(given) == list(range(199, 6, -1))
    assert len(order) == 0
    assert order.shortest(5, 1e9) == []


def test_who_is_not_known_goes_first_the_most_turns_before(tmp_path: Path) -> None:
    order = LongestFirst(lengths(tmp_path, {0: 10, 1: 99999}), tmp_path)
    threads = [thread(0), thread(1), thread(2), thread(3, turns=3), thread(4, characters=9)]
    assert numbers(order.sift(threads, room=9, all_met=True)) == [3, 4, 2, 1, 0]
    assert "2 conversations are in the earlier run" in order.told
    assert "3 are not" in order.told


def test_the_samples_of_a_conversation_stay_together(tmp_path: Path) -> None:
    order = LongestFirst(lengths(tmp_path, {0: 10, 1: 20}), tmp_path)
    threads = [thread(0), thread(0), thread(1), thread(1)]
    assert order.sift(threads, room=1, all_met=False) == []  # two have no room
    assert numbers(order.sift([], room=9, all_met=True)) == [1, 1, 0, 0]


def test_what_is_left_is_told_in_tokens(tmp_path: Path) -> None:
    order = LongestFirst(lengths(tmp_path, {0: 90, 1: 30}), tmp_path)
    assert order.tokens_left(7.0) is None
    resumed = thread(0, turns=3, turn=1)  # a third of it is there already
    given = order.sift([resumed, thread(1), thread(2, turns=2)], room=9, all_met=True)
    assert order.tokens_left(7.0) == 60 + 30 + 2 * 7
    for one in given:
        order.begun(one)
    assert order.tokens_left(7.0) == 0.0


# -- captures ------------------------------------------------------------------------------------


def unit_rows(run: Path) -> dict[str, tuple[Any, ...]]:
    return {
        row.id: (row.key, row.seed, row.template_kwargs, tuple(row.prompt_ids), row.output_ids)
        for row in Run(run).traces()
    }


def mixed(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows with exact duplicates, shared ids, several turns, and lines that cannot be used."""
    chosen = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for at in range(count):
        kind = chosen.randrange(6)
        if kind == 0:
            rows.append({"id": "same", "prompt": f"differs {at}"})
        elif kind == 1:
            rows.append({"id": "double", "prompt": "the very same"})
        elif kind == 2:
            rows.append({"id": f"t{at}", "turns": ["one", f"two {at}", "three"][: 1 + at % 3]})
        elif kind == 3:
            rows.append({"id": f"bad{at}", "prompt": 5})
        else:
            rows.append({"prompt": f"question {at}"})
    return rows


MIX = [{"weight": 1, "a": 1}, {"weight": 2, "a": 2}]
"""Template switches by weight: each thread has one of them."""


@pytest.mark.parametrize(
    "more", [{}, {"n": 2}, {"limit": 70}, {"shard": "1/2"}, {"template_kwargs": MIX}]
)
@pytest.mark.parametrize("by", ["longest", "run"])
def test_units_are_the_same_whatever_the_order(
    by: str, more: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    """Keys, names, occurrences, seeds and counts are told by the input's order alone."""
    prompts = write_prompts(tmp_path / "p.jsonl", mixed(150))
    with FaultServer(target) as server:
        plain = capture_from(server, prompts, tmp_path / "plain", **more)
        order = "longest" if by == "longest" else str(tmp_path / "plain")
        ordered = capture_from(server, prompts, tmp_path / "ordered", order=order, **more)
    assert unit_rows(tmp_path / "ordered") == unit_rows(tmp_path / "plain")
    counts = ("input", "done", "rejected", "pending", "extra")
    assert [getattr(ordered, name) for name in counts] == [getattr(plain, name) for name in counts]


def test_the_longest_answers_of_an_earlier_run_are_asked_for_first(
    target: Target, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(300))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "earlier")
        by_prompt = {
            tuple(row.prompt_ids): len(row.output_ids) for row in Run(tmp_path / "earlier").traces()
        }
        server.requests.clear()
        capture_from(server, prompts, tmp_path / "run", order=str(tmp_path / "earlier"),
                     concurrency=1)  # fmt: skip
        asked = [by_prompt[tuple(body["input_ids"])] for body in server.requests]
    assert len(asked) == 300
    # What was sent while the input was read are the longest of what was met until then.
    head = asked[:40]
    assert min(head) > sorted(asked)[150]
    assert asked[40:] == sorted(asked[40:], reverse=True)


def test_a_resumed_capture_keeps_the_order_and_doubles_nothing(
    target: Target, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", mixed(120))
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "plain")
        first = capture_from(server, prompts, tmp_path / "run", limit=50, order="longest")
        assert first.pending == 0
        again = capture_from(server, prompts, tmp_path / "run", order=str(tmp_path / "plain"))
    assert again.new == again.input - first.done - first.rejected
    assert unit_rows(tmp_path / "run") == unit_rows(tmp_path / "plain")
    check_run(target, tmp_path / "run", again)


def test_standard_input_can_be_put_in_order_too(target: Target, tmp_path: Path) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in mixed(100))
    with FaultServer(target) as server:
        done = run_eyas(
            "capture", "-", "--no-probe", "--out", str(tmp_path / "run"), "--url", server.url,
            "--tokenizer", str(TARGET), "--max-new-tokens", "200", "--order", "longest", "--json",
            input=rows,
        )  # fmt: skip
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["pending"], summary["input_known"]) == (3, 0, True)
    assert summary["input"] == summary["done"] + summary["rejected"]
    check_run(target, tmp_path / "run")


def test_a_run_that_knows_none_of_the_conversations_is_told(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    with FaultServer(target) as server:
        other = write_prompts(tmp_path / "o.jsonl", [{"prompt": "elsewhere"}])
        capture_from(server, other, tmp_path / "earlier")
        prompts = write_prompts(tmp_path / "p.jsonl", mixed(20))
        done = run_eyas(
            "capture", str(prompts), "--no-probe", "--out", str(tmp_path / "run"), "--url",
            server.url, "--tokenizer", str(TARGET), "--order", str(tmp_path / "earlier"),
        )  # fmt: skip
        said += done.stderr.splitlines()
    assert any("none of the conversations is in the earlier run" in line for line in said)


GIVEN = {"prompts": ["p.jsonl"], "out": "run", "url": "http://a:1", "tokenizer": str(TARGET)}


def test_what_is_neither_a_word_nor_a_run_is_refused(tmp_path: Path) -> None:
    for wrong in ("shortest", str(tmp_path)):
        with pytest.raises(ConfigError, match="order: it is input, longest or the directory of"):
            make_config({**GIVEN, "order": wrong})


def test_the_saved_configuration_names_the_run_by_its_whole_path(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer(target) as server:
        prompts = write_prompts(tmp_path / "p.jsonl", numbered(3))
        capture_from(server, prompts, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path)
    for order, saved in (("earlier", str(tmp_path / "earlier")), ("longest", "longest")):
        config = make_config({**GIVEN, "order": order})
        (tmp_path / "c.yaml").write_bytes(config_yaml(config))
        assert read_config_file(tmp_path / "c.yaml")["order"] == saved


def test_an_empty_run_teaches_nothing(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"id": "bad", "prompt": 5}])
    with FaultServer(target) as server:
        capture_from(server, prompts, tmp_path / "earlier")
        with pytest.raises(ConfigError, match="holds no answers to learn lengths from"):
            capture_from(server, prompts, tmp_path / "run", order=str(tmp_path / "earlier"))
