"""One process at a time writes a run.

Invariant: the lock is a file created with O_EXCL, which every file system keeps, network ones
included; a holder that is gone is recognised (by its process on this host, by its standing
heartbeat on another), and taking over is a rename, which only one can win.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import RunLocked, StoreError
from eyas.store.files import disk_errors

HEARTBEAT_S = 5.0
WATCH_S = 4 * HEARTBEAT_S
_TORN_S = 1.0
"""A lock without content is being made, which takes no second, or its maker died."""


class WriterLock:
    """Held while a run is written; `lost` is set if somebody took it away."""

    def __init__(self, run: Path) -> None:
        self.path = run / "writer.lock"
        self.lost = threading.Event()
        self._token = uuid.uuid4().hex
        self._since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        self._beats = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, *, watch_s: float = WATCH_S) -> None:
        """Take the lock.

        A holder on another host is watched for `watch_s` seconds; if its heartbeat stands
        still it is taken for dead.

        Raises:
            RunLocked: if it is held, with who holds it.
        """
        for _ in range(3):
            if self._create():
                self._thread = threading.Thread(target=self._beat, daemon=True)
                self._thread.start()
                return
            holder = _read(self.path)
            if holder is None:
                continue  # released, or still being written: look again
            if _alive(holder, self.path, watch_s):
                raise RunLocked(
                    f"{self.path.parent} is being written by process {holder.get('pid')} on "
                    f"{holder.get('host')} since {holder.get('since')}. Wait for it or end it; "
                    f"if it is surely gone, delete {self.path}."
                )
            stale = self.path.with_name(f"writer.lock.{self._token}")
            with suppress(FileNotFoundError):  # another process took over first
                os.rename(self.path, stale)
                taken = _read(stale)
                if taken is not None and taken.get("token") != holder.get("token"):
                    os.rename(stale, self.path)  # one who was faster, and lives: put it back
                else:
                    stale.unlink()
        raise RunLocked(f"{self.path} changes hands again and again; try again in a moment")

    def release(self) -> None:
        """Give the lock back, if it is still ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        holder = _read(self.path)
        if holder is not None and holder.get("token") == self._token:
            with suppress(OSError):
                self.path.unlink()

    def check(self) -> None:
        """Raise StoreError if another process took the lock away."""
        if self.lost.is_set():
            raise StoreError(
                f"{self.path} was taken over by another process, so this one stops writing. "
                "Nothing that was reported as done is lost."
            )

    def _create(self) -> bool:
        with disk_errors(self.path):
            try:
                handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                return False
            try:
                os.write(handle, self._content())
                os.fsync(handle)
            except OSError:
                self.path.unlink(missing_ok=True)
                raise
            finally:
                os.close(handle)
        return True

    def _content(self) -> bytes:
        return json.dumps(
            {
                "pid": os.getpid(),
                "started": _process_start(os.getpid()),
                "host": socket.gethostname(),
                "boot": _boot_id(),
                "since": self._since,
                "token": self._token,
                "beats": self._beats,
            }
        ).encode()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            holder = _read(self.path)
            if holder is not None and holder.get("token", self._token) != self._token:
                self.lost.set()
                return
            self._beats += 1
            with suppress(OSError):  # a full disk is noticed by the journal
                temporary = self.path.with_name(f".writer.lock.{self._token}.tmp")
                temporary.write_bytes(self._content())
                os.replace(temporary, self.path)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds, or held, the lock of a run."""

    pid: int | None
    host: str | None
    alive: bool
    """False for a process that ended without giving its lock back."""


def find_holder(run: Path, *, watch_s: float = WATCH_S) -> Holder | None:
    """Who holds a run's lock, for readers; None if nobody does.

    A holder on another host is believed while its heartbeat looks fresh by our clock; if it
    does not (clocks differ) it is watched for `watch_s` seconds.
    """
    path = run / "writer.lock"
    holder = _read(path)
    if holder is None:
        return None
    pid, host = holder.get("pid"), holder.get("host")
    alive = False
    if host != socket.gethostname():
        with suppress(OSError):
            alive = abs(time.time() - path.stat().st_mtime) < WATCH_S
    return Holder(
        pid=pid if isinstance(pid, int) else None,
        host=host if isinstance(host, str) else None,
        alive=alive or _alive(holder, path, watch_s),
    )


def _alive(holder: dict[str, object], path: Path, watch_s: float) -> bool:
    if holder.get("host") == socket.gethostname() and holder.get("boot") == _boot_id():
        pid = holder.get("pid")
        started = _process_start(pid) if isinstance(pid, int) else None
        return started is not None and started == holder.get("started")
    if "token" not in holder:
        watch_s = min(watch_s, _TORN_S)
    deadline = time.monotonic() + watch_s
    while time.monotonic() < deadline:
        time.sleep(min(0.5, watch_s))
        now = _read(path)
        if now is not None and now != holder:
            return True
    return False


def _read(path: Path) -> dict[str, object] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"pid": None, "host": "unknown"}


def _boot_id() -> str:
    """Changes at each boot, so that a process number of before is not taken for alive."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _process_start(pid: int) -> str | None:
    """The process's start time, which with its number names it; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:  # no /proc (macOS): the number alone must do
            os.kill(pid, 0)
        except (OSError, OverflowError):
            return None
        return "running"
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in ("Z", "X") else fields[19]
