"""`python peak.py FILE -m MODULE ...`: run a module, and leave its peak memory (KiB) in a file.

The system's own account of a child, `ru_maxrss`, begins with what its parent had.
"""

from __future__ import annotations

import atexit
import runpy
import sys
from pathlib import Path


def peak_kib() -> int:
    """The peak of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


if __name__ == "__main__":
    file, _, module = sys.argv[1:4]
    atexit.register(lambda: Path(file).write_text(str(peak_kib())))
    sys.argv = sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
