"""Install serving engines or trainers for the tests, each in an environment of its own.

    python scripts/install_apart.py build/engines engines/vllm engines/sglang
    python scripts/install_apart.py build/trainers trainers/speculators trainers/specforge

Invariant: an environment is used only if it is whole. ``.ready`` holds a hash of what was asked
for and is written last; anything else is removed and made anew. What cannot be installed says why
in ``<name>.failed``, and the tests that need it skip with that reason.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
TRIES = 2  # the files are large, and an index may drop one


def main() -> int:
    parser = argparse.ArgumentParser(description="Install engines or trainers for the tests.")
    parser.add_argument("root", type=Path, help="where the environments lie")
    parser.add_argument("locks", nargs="+", help="names in requirements, such as engines/vllm")
    given = parser.parse_args()
    given.root.mkdir(parents=True, exist_ok=True)
    for lock in given.locks:
        name = Path(lock).name
        failed = given.root / f"{name}.failed"
        failed.unlink(missing_ok=True)
        started = time.monotonic()
        try:
            news = install(given.root / name, REQUIREMENTS / f"{lock}.lock")
        except (subprocess.CalledProcessError, OSError) as error:
            failed.write_text(reason_of(error), encoding="utf-8")
            print(f"{name} could not be installed: {failed.read_text()}", file=sys.stderr)
        else:
            print(f"{name}: {news} ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


def install(home: Path, lock: Path) -> str:
    """Make the environment unless it is there already."""
    torch = REQUIREMENTS / "engines" / "torch.txt"
    wanted = hashlib.sha256(
        b"\0".join([torch.read_bytes(), lock.read_bytes(), sys.version.encode()])
    ).hexdigest()
    ready = home / ".ready"
    if ready.is_file() and ready.read_text(encoding="utf-8") == wanted:
        return "ready"
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    pip(home, "-r", str(torch))
    # The lock holds all but torch. It leaves out what torch for GPUs alone would pull in, so
    # nothing is resolved again.
    pip(home, "--no-deps", "--require-hashes", "-r", str(lock))
    ready.write_text(wanted, encoding="utf-8")
    return "installed"


def pip(home: Path, *arguments: str) -> None:
    command = [
        str(home / "bin" / "python"), "-m", "pip", "install", "--quiet",
        "--disable-pip-version-check", "--no-cache-dir", *arguments,
    ]  # fmt: skip
    for left in reversed(range(TRIES)):
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return
        if not left:
            raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr)


def reason_of(error: subprocess.CalledProcessError | OSError) -> str:
    """What pip calls errors, or else the last lines."""
    lines = [line.strip() for line in (getattr(error, "stderr", None) or str(error)).splitlines()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " | ".join((errors or lines)[-3:])


if __name__ == "__main__":
    sys.exit(main())
