"""Faults that hit 2% and 20% of all requests: no row is lost, doubled, wrong or rejected for them.

Property: whatever goes wrong between the client and the engine, `input == done`, every row is the
right answer to its own prompt, and no id is there twice.
"""

from __future__ import annotations

import email.utils
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from capturing import (
    capture_from,
    check_run,
    eyas_command,
    numbered,
    paired,
    wait_for,
    write_prompts,
)
from eyas import Run, fleet
from eyas.checks import REFUSALS
from eyas.demo.server import TARGET
from eyas.engines import roster, tries
from fault_server import Answer, Fault, FaultServer, Policy, asks_one_token

Make = Callable[[random.Random, Answer], Fault]
"""(random numbers, honest answer) -> what comes instead."""
_LONG_S = 3600.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of a hundredth."""
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(tries, "_ONE_TOKEN_S", 0.3)
    monkeypatch.setattr(roster, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(roster, "_LONGEST_LOOK_S", 0.02)
    monkeypatch.setattr(fleet, "_TEND_S", 0.02)
    monkeypatch.setattr(fleet, "_QUIET_S", 0.5)


def whole(honest: Answer) -> tuple[bytes, bytes]:
    """The head and the body of an honest answer."""
    body = json.dumps(honest).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body), body


def cut_within(_: random.Random, honest: Answer) -> Fault:
    head, body = whole(honest)
    return Fault(raw=head + body[: len(body) // 2])


def cut_anywhere(chosen: random.Random, honest: Answer) -> Fault:
    everything = b"".join(whole(honest))
    return Fault(raw=everything[: chosen.randrange(1, len(everything))])


def short_of_its_length(_: random.Random, honest: Answer) -> Fault:
    """A whole JSON object, and yet not all that was promised."""
    head, body = whole(honest)
    return Fault(raw=head.replace(b"%d" % len(body), b"%d" % (len(body) + 7)) + body)


def chunked(honest: Answer, *, last: bool) -> bytes:
    _, body = whole(honest)
    half = len(body) // 2
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:])]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
        chunks if last else chunks[:1]
    )


def with_meta(honest: Answer, **changes: object) -> Fault:
    return Fault(answer={**honest, "meta_info": {**honest["meta_info"], **changes}})


def status(number: int, **headers: str) -> Make:
    return lambda _, __: Fault(status=number, body=b'{"error": {"message": "no"}}', headers=headers)


def date_of(_: random.Random, __: Answer) -> Fault:
    until = email.utils.formatdate(time.time() - 1, usegmt=True)
    return Fault(status=429, body=b"", headers={"Retry-After": until})


KINDS: dict[str, Make] = {
    "the connection is dropped": lambda _, __: Fault(drop=True),
    "no connection is accepted for a while": lambda _, __: Fault(away_s=0.02),
    **{f"status {n}": status(n) for n in (408, 425, 429, 500, 502, 503, 504, 599)},
    "429 with seconds": status(429, **{"Retry-After": "0.01"}),
    "429 with a date": date_of,
    "503 at once again": status(503, **{"Retry-After": "0"}),
    "cut in the status line": lambda _, honest: Fault(raw=whole(honest)[0][:9]),
    "cut in the headers": lambda _, honest: Fault(raw=whole(honest)[0][:40]),
    "cut after the headers": lambda _, honest: Fault(raw=whole(honest)[0]),
    "cut within the body": cut_within,
    "cut before the last byte": lambda _, honest: Fault(raw=b"".join(whole(honest))[:-1]),
    "cut anywhere": cut_anywhere,
    "short of its length": short_of_its_length,
    "cut within chunks": lambda _, honest: Fault(raw=chunked(honest, last=False)),
    "cut before the last chunk": lambda _, honest: Fault(raw=chunked(honest, last=True)),
    "an error under 200": lambda _, __: Fault(body=b'{"error": {"message": "boom"}}'),
    "an error of the old form": lambda _, __: Fault(body=b'{"object": "error", "message": "x"}'),
    "an abort": lambda _, honest: with_meta(
        {**honest, "output_ids": honest["output_ids"][:2]},
        finish_reason={"type": "abort", "message": "Aborted"}, completion_tokens=2,
    ),
    "an abort in the queue": lambda _, honest: with_meta(
        {**honest, "output_ids": [], "text": ""},
        finish_reason={"type": "abort", "message": "Abort in waiting queue"}, completion_tokens=0,
    ),
    "a page of a proxy": lambda _, __: Fault(
        body=b"<html>maintenance</html>", headers={"Content-Type": "text/html"}
    ),
    "nothing": lambda _, __: Fault(body=b""),
    "null": lambda _, __: Fault(body=b"null"),
    "no HTTP": lambda _, __: Fault(raw=b"SSH-2.0-OpenSSH_9.6\r\n"),
    "204": lambda _, __: Fault(status=204, body=b""),
    "a stall": lambda _, __: Fault(delay_s=_LONG_S),
}  # fmt: skip


def striking(kinds: list[Make], share: float, seed: int = 0) -> Policy:
    """Each request is hit with a probability; the third try of a prompt comes through, so that
    no row meets its last by chance."""
    chosen = random.Random(seed)
    hit: Counter[str] = Counter()

    def policy(body: Answer, honest: Answer) -> Fault | None:
        prompt = json.dumps(body["input_ids"])
        if hit[prompt] >= 3 or chosen.random() >= share:
            hit[prompt] = 0
            return None
        hit[prompt] += 1
        return chosen.choice(kinds)(chosen, honest)

    return policy


@pytest.mark.parametrize("share", [0.02, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_at_a_time(kind: str, share: float, server: FaultServer, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", numbered(80))
    server.policy = striking([KINDS[kind]], share)
    summary = capture_from(server, prompts, tmp_path / "run", concurrency=8)
    assert (summary.done, summary.rejected, summary.pending) == (80, 0, 0)
    assert len(check_run(server.target, tmp_path / "run", summary)) == 80


def test_all_faults_and_a_server_that_crashes(server: FaultServer, tmp_path: Path) -> None:
    """A fifth of the requests fails in some way, and now and then all that is in flight."""
    prompts = write_prompts(tmp_path / "p.jsonl", [*numbered(150), *paired(75)])
    all_kinds = [*KINDS.values(), lambda _, __: Fault(crash_s=0.02)]
    server.policy = striking(all_kinds, 0.2)
    summary = capture_from(server, prompts, tmp_path / "run", concurrency=16)
    assert (summary.done, summary.rejected, summary.pending) == (300, 0, 0)
    assert len(check_run(server.target, tmp_path / "run", summary)) == 300


FIELDS = (
    "output_ids", "text", "prompt_token_ids", "meta_info", "meta_info.id",
    "meta_info.finish_reason", "meta_info.finish_reason.type", "meta_info.finish_reason.matched",
    "meta_info.prompt_tokens", "meta_info.completion_tokens", "meta_info.cached_tokens",
    "meta_info.weight_version", "meta_info.weight_versions", "meta_info.output_token_logprobs",
)  # fmt: skip
WRONG = (None, True, 0, -1, 2.5, 10**30, "", "7", "\u0000", [], [None], [[1]], ["a"], {}, {"a": 1})


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_wrong_kind_ends_no_capture(
    field: str, server: FaultServer, tmp_path: Path
) -> None:
    """Each row gets another wrong value: it is refused by name, or right all the same."""
    given: dict[str, object] = {}

    def policy(body: Answer, honest: Answer) -> Fault | None:
        if asks_one_token(body):
            return None
        prompt = json.dumps(body["input_ids"])
        given.setdefault(prompt, WRONG[len(given) % len(WRONG)])
        place, (*parents, last) = honest, field.split(".")
        for name in parents:
            place = place[name]
        place[last] = given[prompt]
        return Fault(answer=honest)

    prompts = write_prompts(tmp_path / "p.jsonl", numbered(len(WRONG) + 1))
    server.policy = policy
    summary = capture_from(server, prompts, tmp_path / "run", tries=1, give_up_after=0.0)
    # Other weights stop a capture; nothing else does.
    assert (summary.pending == 0) is (field != "meta_info.weight_version")
    for row in Run(tmp_path / "run").rejected():
        assert row.reason in {*REFUSALS, "malformed_answer", "error_body"}


def arguments(server: FaultServer, prompts: Path, out: Path) -> list[str]:
    return ["capture", str(prompts), "--no-probe", "--out", str(out), "--url", server.url,
            "--tokenizer", str(TARGET), "--concurrency", "32"]  # fmt: skip


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_all_faults_and_kills_in_between(
    share: float, server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill -9` again and again, each time somewhere else; the same command goes on."""
    rows = [*numbered(300), *paired(100)]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    server.policy = striking([make for kind, make in KINDS.items() if kind != "a stall"], share)
    monkeypatch.setattr(server, "delay_s", 0.01)
    command = eyas_command(*arguments(server, prompts, tmp_path / "run"))
    chosen = random.Random(1)
    durable: set[str] = set()
    for _ in range(3):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = len(server.requests) + chosen.randint(20, 150)
        wait_for(lambda until=until: len(server.requests) >= until, child)
        child.send_signal(signal.SIGKILL)
        child.wait()
        kept = {trace.id for trace in check_run(server.target, tmp_path / "run")}
        assert durable <= kept
        durable = kept
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    traces = check_run(server.target, tmp_path / "run")
    assert durable <= {trace.id for trace in traces}
    assert Counter(trace.id for trace in traces) == Counter(
        [*(f"q{n}/0/0" for n in range(300)), *(f"p{n}/0/{t}" for n in range(100) for t in (0, 1))]
    )
    assert not list(Run(tmp_path / "run").rejected())
    assert not list((tmp_path / "run" / "journal").iterdir())
