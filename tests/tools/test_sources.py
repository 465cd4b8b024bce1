"""Results that a command or a function gives."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from capturing import wait_until_ended
from eyas.errors import ConfigError
from eyas.tools.sources import NoResult, Source, open_source

REQUEST = {"name": "look", "arguments": {"at": "ö"}, "call_id": "1", "turn": 0}


def source(text: str, timeout_s: float = 60.0) -> Source:
    found = open_source(text, timeout_s)
    assert found is not None
    return found


def result(of: Source, request: dict[str, Any] = REQUEST) -> str:
    return asyncio.run(of.result(request))  # type: ignore[arg-type]


def script(folder: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(f"import json, sys\n{body}\n", encoding="utf-8")
    return f"command:{sys.executable} {path}"


def test_a_command_gets_the_request_and_gives_the_result(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        "sys.stdout.reconfigure(encoding='utf-8'); asked = json.loads(sys.stdin.buffer.read())\n"
        "print(asked['name'], asked['arguments']['at'])",
    )
    assert result(source(command)) == "look ö"


def test_a_command_need_not_read(tmp_path: Path) -> None:
    command = script(tmp_path, "print('always the same')")
    assert result(source(command), {**REQUEST, "metadata": "x" * 10**7}) == "always the same"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.exit('no such city')", "exit code 1: no such city"),
        ("sys.exit(3)", "exit code 3: no word"),
        ("sys.stdout.buffer.write(b'\\xff')", "no UTF-8"),
        ("sys.stdout.write('x' * (17 * 2**20))", "more than"),
    ],
)
def test_a_command_that_fails_says_why(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(NoResult, match=says):
        result(source(script(tmp_path, body)))


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    command = script(
        tmp_path,
        "import os, subprocess, threading\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import threading; "
        "threading.Event().wait()'])\n"
        f"open({str(tmp_path / 'out' / 'child')!r}, 'w').write(str(child.pid))\n"
        "threading.Event().wait()",
    )
    with pytest.raises(NoResult, match="--tool-timeout"):
        result(source(command, timeout_s=3.0))
    wait_until_ended(int((tmp_path / "out" / "child").read_text()))


@pytest.mark.parametrize("text", ["command:no-such-program-here", "command:", "command:'"])
def test_a_command_that_is_none_is_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match="--tool-results"):
        open_source(text, 1.0)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_tools_here.py").write_text(
        "def look(request):\n"
        "    return request['name'] + ' at ' + request['arguments']['at']\n"
        "async def later(request):\n"
        "    return {'seen': request['arguments']}\n"
        "def nothing(request):\n"
        "    return None\n"
        "def broken(request):\n"
        "    raise KeyError('city')\n"
        "def strange(request):\n"
        "    return object()\n"
        "number = 7\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_tools_here", None)
    return "my_tools_here"


def test_functions(module: str) -> None:
    assert result(source(f"{module}:look")) == "look at ö"
    assert json.loads(result(source(f"{module}:later"))) == {"seen": {"at": "ö"}}


@pytest.mark.parametrize(
    ("name", "says"),
    [("nothing", "no result"), ("broken", "KeyError"), ("strange", "neither text nor JSON")],
)
def test_a_function_that_gives_nothing_says_so(module: str, name: str, says: str) -> None:
    with pytest.raises(NoResult, match=says):
        result(source(f"{module}:{name}"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nosuchmodule_x:f", "cannot be imported"),
        ("my_tools_here:missing", "has no 'missing'"),
        ("my_tools_here:number", "no function"),
        ("sometimes", "stop, nearest"),
    ],
)
def test_a_function_that_is_none_is_refused_at_once(module: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_source(text, 1.0)


def test_stop_and_nearest_need_no_source() -> None:
    assert open_source("stop", 1.0) is None
    assert open_source("nearest", 1.0) is None
