"""How full the servers were, by a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from capturing import capture_from, numbered, write_prompts
from eyas import usage
from eyas.cli.summary import print_summary
from eyas.engines import server as servers
from eyas.engines.server import Server
from eyas.progress import Use
from eyas.status import Status, StatusFile
from eyas.usage import Usage
from fault_server import Answer, Fault, FaultServer
from virtual import Slots, server_of


class World:
    """Servers, requests that begin and end by hand, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *slots: int) -> None:
        self.now = 100.0
        for module in (usage, servers):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(servers.asyncio, "current_task", lambda: None)
        self.servers = [
            server_of(Slots(f"http://{n}", [], slots=count)) for n, count in enumerate(slots)
        ]
        self.usage = Usage(self.servers)
        self.usage.look(left=True)

    def begin(self, server: Server, count: int) -> list[int]:
        server.held += count
        return [server.begin(9)[0] for _ in range(count)]

    def wait(self, seconds: float, *, left: bool) -> Use:
        self.now += seconds
        return self.usage.look(left=left)


def test_what_was_missed_and_what_could_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 4)
    (server,) = world.servers
    numbers = world.begin(server, 3)
    assert world.wait(10, left=True) == Use(0.75, 0.75, 0.0)
    world.begin(server, 1)
    assert world.wait(10, left=True) == Use(0.875, 0.875, 0.0)
    for number in numbers:
        server.end(number)
    # One of four goes on; no row is left that the others could have taken.
    assert world.wait(20, left=False) == Use((70 + 20) / 160, 0.875, 20.0)


def test_requests_that_came_and_went_between_two_looks_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 2)
    (server,) = world.servers
    (number,) = world.begin(server, 1)
    world.now += 3
    server.end(number)
    assert world.wait(1, left=True).share == 3 / 8


def test_a_server_that_is_down_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2, 2)
    first, second = world.servers
    world.begin(first, 2)
    world.wait(5, left=True)
    second.up = False
    assert world.wait(0, left=True).share == 0.5
    assert world.wait(5, left=True) == Use(20 / 30, 20 / 30, 0.0)


def test_nothing_is_said_where_no_places_were_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2)
    world.servers[0].up = False
    world.wait(0, left=True)
    assert world.wait(5, left=True).share in (None, 0.0)


def test_the_summary_and_the_status_say_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A capture's own figures: half of each prompt was cached, the last row took longer."""

    def half(body: Answer, honest: Answer) -> Fault:
        honest["meta_info"]["cached_tokens"] = len(body["input_ids"]) // 2
        return Fault(answer=honest, delay_s=1.5 if len(server.requests) == 40 else 0.01)

    with FaultServer(policy=half) as server:
        prompts = write_prompts(tmp_path / "p.jsonl", numbered(40))
        summary = capture_from(server, prompts, tmp_path / "run", concurrency=4)
    use = summary.use
    assert use.share is not None
    assert use.share_with_rows_left is not None
    assert 0 < use.share < use.share_with_rows_left <= 1
    assert 1 <= use.below_half_s <= summary.seconds
    with StatusFile(tmp_path / "run") as file:
        file.finish(summary)
    status = Status.load(tmp_path / "run")
    assert status is not None
    assert status.use.share == round(use.share, 4)
    assert status.tokens.cached == summary.cached_tokens
    print_summary(summary)
    said = capsys.readouterr().out
    assert f"servers   {use.share:.1%} of places used, {use.share_with_rows_left:.1%} while" in said
    assert f"below half for the last {use.below_half_s:.1f}s" in said
    assert summary.cached_tokens is not None
    share = summary.cached_tokens / summary.prompt_tokens
    assert 0.4 < share <= 0.5
    assert f"cached    {share:.0%} of the prompt tokens" in said
