"""Each example runs, without arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("0*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the examples start the demo's engine")
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
