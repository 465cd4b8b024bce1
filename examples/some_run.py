"""The run that an example reads: the one named on its command line, else a small new one."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def given_or_captured() -> Iterator[Path]:
    """The run directory; a captured one is gone when the block ends."""
    if len(sys.argv) > 1:
        yield Path(sys.argv[1])
        return
    with tempfile.TemporaryDirectory(prefix="eyas-example-") as temporary:
        example = runpy.run_path(str(Path(__file__).with_name("01_capture.py")))
        example["capture_sixteen"](Path(temporary))
        yield Path(temporary) / "run"
