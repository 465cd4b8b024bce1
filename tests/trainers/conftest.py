"""Runs and exports, and what trainers read of them with their own code, in their own environments.

Invariant: what is compared is content, id by id and mask by mask; order only where a trainer keeps
it. A trainer that is not installed skips, and says why.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import eyas
from capturing import capture_from, numbered, paired, write_prompts
from eyas.store import Run
from fault_server import FaultServer, Target

READING = Path(__file__).parent / "reading"
VARIABLE = "EYAS_TRAINERS"

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""A training sequence and its mask."""


class Asked(NamedTuple):
    """What a script in a trainer's environment gave back."""

    value: Any
    said: str
    """What the trainer itself printed."""


def python_of(trainer: str) -> Path:
    """The Python of a trainer's environment; skips where it is not installed."""
    root = os.environ.get(VARIABLE)
    if not root:
        pytest.skip(f"{VARIABLE} names no directory of trainers; make test-trainers makes one")
    failed = Path(root) / f"{trainer}.failed"
    if failed.is_file():
        pytest.skip(f"{trainer} could not be installed: {failed.read_text(encoding='utf-8')}")
    python = Path(root).absolute() / trainer / "bin" / "python"
    if not (python.parents[1] / ".ready").is_file():
        pytest.skip(f"there is no {trainer} in {root}; make test-trainers installs it")
    return python


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Asked]:
    """Runs a script of `reading/` in a trainer's environment; its last argument is the file that it
    writes its answer to."""

    def asking(trainer: str, script: str, *arguments: Any) -> Asked:
        python, answer = python_of(trainer), tmp_path / f"{script}.json"
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(eyas.__file__).parents[1]),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hf"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [python, READING / f"{script}.py", *arguments, answer]
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, env=env
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Asked(json.loads(answer.read_text()), done.stdout + done.stderr)

    return asking


def as_row(ids: list[int], mask: list[int]) -> Row:
    return tuple(ids), tuple(int(value) for value in mask)


def rows_of(run: Path) -> list[Row]:
    """The run's rows, in its order."""
    return [as_row(trace.input_ids, trace.loss_mask) for trace in Run(run).traces()]


def content(rows: list[Row]) -> Counter[Row]:
    """Rows without regard to their order."""
    return Counter(rows)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Single turns and threads of two whose ids go on, some of them cut at their budget."""
    folder = tmp_path_factory.mktemp("trainers")
    prompts = write_prompts(folder / "p.jsonl", [*numbered(120), *paired(60)])
    kept = {"history": "tokens", "template_kwargs": {"preserve_thinking": True}}
    with FaultServer(Target()) as server:
        capture_from(server, prompts, folder / "run", max_new_tokens=40, **kept)
    traces = list(Run(folder / "run").traces())
    assert {trace.turn for trace in traces} == {0, 1}
    assert 0 < sum(not trace.complete for trace in traces) < len(traces)
    return folder / "run"
