"""Hostile text: what a model, a file or a server wrote cannot steer the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capturing import run_eyas, write_prompts
from eyas.demo.server import TARGET
from fault_server import Fault, FaultServer

STEERING = "\x1b[2J\x9b3J\u202e\r\x07"
UNSAFE = ("\x1b", "\x9b", "\u202e", "\r", "\x07")


def unsafe_in(text: str) -> list[str]:
    return [char for char in UNSAFE if char in text]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    rows = [
        {"id": f"a{STEERING}", "prompt": f"hi {STEERING}", f"k{STEERING}": STEERING},
        {"id": f"bad{STEERING}", "prompt": 5, "note": STEERING},
    ]
    prompts = write_prompts(folder / "p.jsonl", rows)
    with FaultServer() as server:
        done = run_eyas("capture", str(prompts), "--out", str(folder / "run"), "--url", server.url,
                        "--tokenizer", str(TARGET))  # fmt: skip
    assert done.returncode == 3
    assert unsafe_in(done.stdout + done.stderr) == []
    return folder / "run"


@pytest.mark.parametrize("more", [[], ["--ids"], ["--json"]])
def test_a_row_is_shown_with_escapes(more: list[str], run: Path) -> None:
    shown = run_eyas("show", str(run), *more)
    assert shown.returncode == 0
    assert unsafe_in(shown.stdout) == []
    if more == ["--json"]:
        row = json.loads(shown.stdout)
        assert row["messages"][-1]["content"] == f"hi {STEERING}"


def test_stats_and_mistakes_are_escaped(run: Path) -> None:
    for command in (["stats", str(run)], ["stats", str(run), "--json"],
                    ["show", str(run), STEERING], ["show", f"/no/{STEERING}"],
                    ["capture", f"/no/{STEERING}", "--out", "o", "--url", "u",
                     "--tokenizer", str(TARGET)],
                    ["export", str(run), "--out", f"/no/{STEERING}/x"]):  # fmt: skip
        shown = run_eyas(*command)
        assert unsafe_in(shown.stdout + shown.stderr) == [], command


@pytest.mark.parametrize(("status", "told"), [(400, False), (401, True), (404, False), (200, True)])
def test_a_servers_words_are_escaped(status: int, told: bool, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x"}])
    fault = Fault(status=status, body=json.dumps({"error": f"no {STEERING}"}).encode())
    info = {"model_path": f"m{STEERING}", "version": f"9.9.9{STEERING}"} if told else None
    with FaultServer(policy=lambda _, __: fault, info=info) as server:
        shown = run_eyas("capture", str(prompts), "--out", str(tmp_path / "run"), "--url",
                         server.url, "--tokenizer", str(TARGET), "--tries", "1",
                         "--give-up-after", "0")  # fmt: skip
    assert shown.returncode in (2, 3, 4)
    assert unsafe_in(shown.stdout + shown.stderr) == []
    assert "Traceback" not in shown.stderr


def test_output_that_cannot_hold_every_character(run: Path) -> None:
    shown = run_eyas("show", str(run), env={"PYTHONIOENCODING": "ascii"})
    assert shown.returncode == 0, shown.stderr
