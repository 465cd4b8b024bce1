"""Several servers of one target: spread, lost, stalled, joining late, and the wrong ones."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capturing import check_run, config_for, numbered, paired, write_prompts
from eyas import Run, Summary, capture, fleet
from eyas.errors import ConfigError, ServerUnreachable
from eyas.target import listed_urls
from fault_server import Answer, Fault, FaultServer, Policy, Target, asks_one_token


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_TEND_S", 0.02)
    monkeypatch.setattr(fleet, "_RETRY_S", 0.05)


@pytest.fixture
def servers(target: Target) -> Iterator[tuple[FaultServer, FaultServer]]:
    with FaultServer(target, delay_s=0.01) as first, FaultServer(target, delay_s=0.01) as second:
        yield first, second


def capture_rows(
    target: Target,
    urls: list[str],
    folder: Path,
    rows: list[dict[str, Any]],
    said: list[str] | None = None,
    **more: Any,
) -> Summary:
    prompts = write_prompts(folder / "p.jsonl", rows)
    server = FaultServer(target)  # not started: only its address is exchanged
    config = config_for(server, prompts, folder / "run", url=urls, **more)
    summary = capture(config, probe=False, say=(said if said is not None else []).append)
    check_run(target, folder / "run", summary)
    return summary


def held(until: threading.Event) -> Policy:
    """A policy that answers no row before an event.

    The first server of a capture is held until the others, which join when it runs, are there:
    without that a busy machine decides whether they come before the rows are done.
    """
    return lambda body, _: None if asks_one_token(body) else Fault(until=until)


class Said(list[str]):
    """What was said, and whether a number of lines with some words were among it."""

    def __init__(self, words: str, times: int) -> None:
        super().__init__()
        self.enough = threading.Event()
        self._words, self._times = words, times

    def append(self, line: str) -> None:
        super().append(line)
        if sum(self._words in line for line in self) >= self._times:
            self.enough.set()


def after(requests: int, do: Callable[[], object], policy: Policy | None = None) -> Policy:
    """A policy that does something once, on a thread, when so many requests have come."""
    seen: list[int] = []

    def counting(body: Answer, honest: Answer) -> Fault | None:
        seen.append(1)
        if len(seen) == requests:
            threading.Thread(target=do).start()
        return None if policy is None else policy(body, honest)

    return counting


def by_server(run: Path) -> Counter[str]:
    return Counter(trace.server for trace in Run(run).traces())


def test_equal_servers_get_equal_shares(
    target: Target, servers: tuple[FaultServer, FaultServer], tmp_path: Path
) -> None:
    full = threading.Event()
    servers[0].policy, servers[1].policy = held(full), after(8, full.set)
    urls = [server.url for server in servers]
    summary = capture_rows(target, urls, tmp_path, numbered(200), concurrency=8)
    assert summary.done == 200
    shares = by_server(tmp_path / "run")
    assert set(shares) == set(urls)
    assert min(shares.values()) > 20  # how many more depends on who gets the processor
    assert all(server.most_running <= 8 for server in servers)


def test_a_slow_server_gets_less(target: Target, tmp_path: Path) -> None:
    with FaultServer(target, delay_s=0.5) as slow, FaultServer(target, delay_s=0.01) as fast:
        urls = [slow.url, fast.url]
        assert capture_rows(target, urls, tmp_path, numbered(200), concurrency=4).done == 200
    shares = by_server(tmp_path / "run")
    assert shares[fast.url] > 4 * shares[slow.url]


def test_at_the_end_rows_leave_a_slow_server(target: Target, tmp_path: Path) -> None:
    """Its rows are begun anew on the fast one; without that the slow one decides the end."""
    stuck = threading.Event()

    def slow(body: Answer, _: Answer) -> Fault | None:
        # Slow enough to be measured as slow, then it would take for ever.
        return Fault(delay_s=3600.0) if stuck.is_set() else None

    with (
        FaultServer(target, delay_s=0.2, policy=after(12, stuck.set, slow)) as slowly,
        FaultServer(target, delay_s=0.01) as fast,
    ):
        urls = [slowly.url, fast.url]
        assert capture_rows(target, urls, tmp_path, numbered(500), concurrency=4).done == 500
    assert stuck.is_set()


def test_turns_stay_with_the_server_that_has_their_beginning(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_TEND_S", 3600.0)  # nobody is found slow, however busy the machine
    full = threading.Event()
    with (
        FaultServer(target, policy=held(full)) as first,
        FaultServer(target, policy=after(20, full.set)) as second,
    ):
        urls = [first.url, second.url]
        assert capture_rows(target, urls, tmp_path, paired(40), concurrency=20).done == 80
    where: dict[str, set[str]] = {}
    for trace in Run(tmp_path / "run").traces():
        where.setdefault(trace.conversation_id, set()).add(trace.server)
    assert all(len(places) == 1 for places in where.values())
    assert by_server(tmp_path / "run") == dict.fromkeys(urls, 40)


def test_a_server_that_dies_costs_nothing(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    both = threading.Event()
    with FaultServer(target, delay_s=0.01, policy=after(1, both.set)) as stays:
        dies = FaultServer(target, delay_s=0.02)
        dies.policy = after(20, lambda: dies.__exit__(None, None, None), held(both))
        dies.__enter__()
        urls = [dies.url, stays.url]
        summary = capture_rows(target, urls, tmp_path, numbered(300), said, concurrency=4)
    assert (summary.done, summary.rejected, summary.pending) == (300, 0, 0)
    assert any("its requests go to 1 other" in line for line in said)


def test_a_server_that_is_not_there_at_first_joins_when_it_is(
    target: Target, tmp_path: Path
) -> None:
    said: list[str] = []
    with FaultServer(target, delay_s=0.03) as first:
        late = FaultServer(target, delay_s=0.01)
        late.__enter__()
        port = int(late.url.rsplit(":", 1)[1])
        url = late.url
        late.__exit__(None, None, None)
        again = FaultServer(target, delay_s=0.01, port=port)
        first.policy = after(30, again.__enter__)
        summary = capture_rows(target, [url, first.url], tmp_path, numbered(400), said,
                               concurrency=4)  # fmt: skip
        again.__exit__(None, None, None)
    assert summary.done == 400
    assert by_server(tmp_path / "run")[url] > 50
    assert any("joins when it answers" in line for line in said)
    assert any(f"{url} joins" in line for line in said)


def test_a_file_of_servers_may_change(
    target: Target, servers: tuple[FaultServer, FaultServer], tmp_path: Path
) -> None:
    first, second = servers
    listed = tmp_path / "servers.txt"
    listed.write_text(f"# the servers\n{first.url}\n", encoding="utf-8")
    said: list[str] = []
    first.policy = after(40, lambda: listed.write_text(f"{second.url}\n", encoding="utf-8"))
    summary = capture_rows(target, [f"@{listed}"], tmp_path, numbered(400), said, concurrency=4)
    assert summary.done == 400
    shares = by_server(tmp_path / "run")
    assert shares[first.url] > 20
    assert shares[second.url] > 20
    assert any("no longer listed" in line for line in said)


def test_another_model_or_other_weights_do_not_join(target: Target, tmp_path: Path) -> None:
    info = {"version": "0.5.23", "model_path": "m", "weight_version": "a"}
    said = Said("does not join", 3)
    with (
        FaultServer(target, info=info) as right,
        FaultServer(target, info={**info, "model_path": "other"}) as other,
        FaultServer(target, info={**info, "weight_version": "b"}) as changed,
        FaultServer(target, info={**info, "version": "0.5.2"}) as bad,
    ):

        def honest(_: Answer, answer: Answer) -> Fault:
            answer["meta_info"]["weight_version"] = "a"
            return Fault(answer=answer, until=said.enough)

        right.policy = honest
        urls = [right.url, other.url, changed.url, bad.url]
        summary = capture_rows(target, urls, tmp_path, numbered(60), said, concurrency=4)
    assert summary.done == 60
    assert set(by_server(tmp_path / "run")) == {right.url}
    assert any("serves model 'other'" in line for line in said)
    assert any("weights version 'b'" in line for line in said)
    assert any("0.5.2" in line for line in said)


def test_weights_that_change_on_one_server_take_only_that_server_away(
    target: Target, tmp_path: Path
) -> None:
    both = threading.Event()

    def serving(version: str) -> Policy:
        def policy(_: Answer, answer: Answer) -> Fault:
            begun = len(stays.requests) > 10
            answer["meta_info"]["weight_version"] = version if begun else "a"
            return Fault(answer=answer, until=both)

        return policy

    said: list[str] = []
    with (
        FaultServer(target, policy=serving("b"), delay_s=0.01) as changes,
        FaultServer(target, policy=after(1, both.set, serving("a")), delay_s=0.01) as stays,
    ):
        urls = [changes.url, stays.url]
        summary = capture_rows(target, urls, tmp_path, numbered(100), said, concurrency=4)
    assert summary.done == 100
    assert {trace.weight_version for trace in Run(tmp_path / "run").traces()} == {"a"}
    assert any("weights version 'b'" in line for line in said)


def test_a_server_that_says_nothing_any_more_loses_its_rows_to_the_other(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts and never answers, and its health page does not answer either."""
    monkeypatch.setattr(fleet, "_QUIET_S", 0.5)
    monkeypatch.setattr(fleet, "_QUIET_FACTOR", 2.0)
    monkeypatch.setattr(fleet, "_HEALTH_S", 0.2)
    stuck = threading.Event()

    def policy(_: Answer, __: Answer) -> Fault | None:
        return Fault(delay_s=3600.0) if stuck.is_set() else None

    said: list[str] = []
    with (
        FaultServer(target, policy=after(20, stuck.set, policy), delay_s=0.01) as stalls,
        FaultServer(target, delay_s=0.02) as works,
    ):
        urls = [stalls.url, works.url]
        summary = capture_rows(target, urls, tmp_path, numbered(600), said, concurrency=4)
    assert (summary.done, summary.rejected, summary.pending) == (600, 0, 0)
    assert stuck.is_set()
    assert by_server(tmp_path / "run")[works.url] > 500


def test_a_retry_goes_to_another_server(target: Target, tmp_path: Path) -> None:
    """One server fails every request; with the other at hand no row fails."""
    with (
        FaultServer(target, policy=lambda _, __: Fault(status=500)) as broken,
        FaultServer(target, delay_s=0.01) as works,
    ):
        urls = [broken.url, works.url]
        summary = capture_rows(target, urls, tmp_path, numbered(40), concurrency=4, tries=3)
    assert (summary.done, summary.rejected) == (40, 0)


def test_no_server_at_all(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match="none of the 2 servers"):
        capture_rows(target, ["http://127.0.0.1:9", "http://127.0.0.1:19"], tmp_path, numbered(1))


def test_lists_of_addresses(tmp_path: Path) -> None:
    listed = tmp_path / "servers.txt"
    listed.write_text("a:1 # first\n\n#none\nb:2\na:1\n", encoding="utf-8")
    assert listed_urls(["c:3", f"@{listed}"]) == ["c:3", "a:1", "b:2"]
    with pytest.raises(ConfigError, match="No such file"):
        listed_urls(["@/no/such/file"])
    listed.write_text("# nobody\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="names no server"):
        listed_urls([f"@{listed}"])
