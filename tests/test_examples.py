"""Each example runs, without arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("0*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the examples start the demo's engine")
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_python_of_the_readme_reads_a_run(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the examples start the demo's engine")
    pytest.importorskip("duckdb", reason="the README reads a run with it")
    first = [sys.executable, str(EXAMPLES[0]), str(tmp_path)]
    subprocess.run(first, check=True, capture_output=True, timeout=600)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    reading, capturing = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    compile(capturing, "README.md", "exec")  # it needs a server of the reader's
    done = subprocess.run(
        [sys.executable, "-c", reading],
        capture_output=True, text=True, cwd=tmp_path, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
