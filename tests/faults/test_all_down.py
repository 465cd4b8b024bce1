"""All servers down: one line that says so, a growing pause, and on as soon as one answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from capturing import capture_from, check_run, config_for, numbered, run_eyas, write_prompts
from eyas import Summary, capture, fleet
from eyas.demo.server import TARGET
from eyas.engines import roster
from fault_server import Answer, Fault, FaultServer, Policy, Target


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_TEND_S", 0.02)
    monkeypatch.setattr(roster, "_LONGEST_LOOK_S", 0.1)


def once(requests: int, do: Callable[[], object]) -> Policy:
    """Do something, on a thread, when so many requests have come."""
    seen: list[int] = []

    def policy(_: Answer, __: Answer) -> Fault | None:
        seen.append(1)
        if len(seen) == requests:
            threading.Thread(target=do).start()
        return None

    return policy


def ended(server: FaultServer) -> int:
    """Take a server away; returns its port."""
    port = int(server.url.rsplit(":", 1)[1])
    server.__exit__(None, None, None)
    return port


def test_one_line_and_on_when_one_answers(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    back: list[FaultServer] = []
    first, second = (FaultServer(target, delay_s=0.02).__enter__() for _ in range(2))

    def outage() -> None:
        port = ended(first)
        ended(second)
        while not any("are down" in line for line in said):
            threading.Event().wait(0.01)
        threading.Event().wait(0.5)  # several looks
        back.append(FaultServer(target, port=port).__enter__())

    first.policy = once(20, outage)
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(200))
    config = config_for(first, prompts, tmp_path / "run", url=[first.url, second.url],
                        concurrency=4)  # fmt: skip
    summary = capture(config, probe=False, say=said.append)
    ended(back[0])
    assert (summary.done, summary.rejected, summary.pending) == (200, 0, 0)
    assert len(check_run(target, tmp_path / "run", summary)) == 200
    assert len([line for line in said if "all 2 servers are down" in line]) == 1
    assert len([line for line in said if line.endswith("answers again")]) == 1


@pytest.mark.parametrize("down", ["gone", "answers nobody"])
def test_giving_up_keeps_everything_that_is_pending(
    down: str, target: Target, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(100))
    server = FaultServer(target, delay_s=0.02).__enter__()
    page = Fault(body=b"<html>maintenance</html>")
    server.policy = (
        once(20, lambda: ended(server))
        if down == "gone"
        else lambda _, __: page if len(server.requests) > 20 else None
    )
    summary: Summary = capture_from(server, prompts, tmp_path / "run", concurrency=4,
                                    give_up_after=0.3)  # fmt: skip
    assert 10 < summary.done < 30
    assert (summary.rejected, summary.exit_code) == (0, 4)
    assert summary.pending == 100 - summary.done
    assert "stays pending" in (summary.stopped or "")
    server.policy = None
    again = server if down != "gone" else FaultServer(target).__enter__()
    later = capture_from(again, prompts, tmp_path / "run")
    assert (later.done, later.rejected, later.pending) == (100, 0, 0)
    assert later.new == 100 - summary.done
    ended(again)


def test_the_command_gives_up_with_its_exit_code(target: Target, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(30))

    def policy(_: Answer, __: Answer) -> Fault | None:
        return Fault(status=503, body=b"{}") if len(server.requests) > 10 else None

    with FaultServer(target, policy=policy) as server:
        done = run_eyas(
            "capture", str(prompts), "--no-probe", "--out", str(tmp_path / "run"), "--url",
            server.url, "--tokenizer", str(TARGET), "--concurrency", "4", "--give-up-after", "1",
        )  # fmt: skip
    assert done.returncode == 4, done.stderr
    kept = len(check_run(target, tmp_path / "run"))
    assert f"30 = {kept} done + 0 rejected + {30 - kept} pending" in done.stdout
    assert "Traceback" not in done.stderr
