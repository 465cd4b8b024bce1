"""A file or directory that appears whole or not at all.

Invariant: what was at the place before stays there until the new one is durable beside it; a
failure or an interruption removes what was begun, and what a killed process left goes when the
same export is begun again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import ConfigError
from eyas.store.files import disk_errors, sync_directory, sync_file

RECORD = "export.yaml"
"""What every directory that an export makes has: how it was made. By it they are known."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where to write meanwhile."""

    path: Path
    """The file, or the directory (which is there)."""
    spool: Path
    """A directory for what waits."""


def check_place(target: Path, *, overwrite: bool, is_directory: bool, suffix: str) -> None:
    """Raise ConfigError where nothing can be written."""
    if target.name in ("", ".."):
        raise ConfigError(f"--out {target}: it names no file or directory")
    if not target.parent.is_dir():
        raise ConfigError(f"--out {target}: there is no directory {target.parent}")
    if is_directory and target.name.endswith((suffix, f"{suffix}.gz")):
        raise ConfigError(
            f"--out {target}: this export is several files, so --out names their directory; "
            f"{target.name} looks like a file"
        )
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ConfigError(f"{target} exists already; name another --out or give --overwrite")
    if target.is_dir() and not is_directory:
        raise ConfigError(f"--out {target} is a directory, and this export is one file")
    if target.is_dir() and any(target.iterdir()) and not (target / RECORD).is_file():
        raise ConfigError(
            f"--out {target} is a directory that no export made (it has no {RECORD}), so it is not "
            "overwritten; name another one"
        )
    if is_directory and not target.is_dir():
        raise ConfigError(f"--out {target} is a file, and this export is a directory")


@contextmanager
def staged(target: Path, *, is_directory: bool, keep: bool = True) -> Iterator[Stage]:
    """A place to write to, which becomes `target` when all went well (unless `keep` is false).

    Raises:
        DiskFull: a write failed.
    """
    aside = target.with_name(f".{target.name}.tmp")
    with disk_errors(target), ExitStack() as held:
        if aside.is_dir():
            _hold(aside, target, held)  # nobody does: its process is dead
            _put_back(aside, target)
        _remove(aside)
        aside.mkdir()
        _hold(aside, target, held)
        try:
            stage = Stage(aside / "made" / target.name, aside / "spool")
            stage.path.parent.mkdir()
            stage.spool.mkdir()
            if is_directory:
                stage.path.mkdir()
            yield stage
            if not keep:
                _remove(aside)
                return
            _make_durable(stage.path)
            if is_directory and target.is_dir():
                target.rename(aside / "old")
            stage.path.replace(target)
            sync_directory(target.parent)
        except BaseException:
            _put_back(aside, target)
            _remove(aside)
            raise
        _remove(aside)


def _hold(aside: Path, target: Path, held: ExitStack) -> None:
    """Take a hidden directory for this process, for as long as it lives.

    Raises:
        ConfigError: another process has it.
    """
    handle = os.open(aside, os.O_RDONLY)
    held.callback(os.close, handle)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"another export writes {target} at this moment; wait for it") from error
    except (ImportError, OSError):  # no such locks here
        pass


def _put_back(aside: Path, target: Path) -> None:
    """Give a directory its place again that was moved aside for a new one that did not come."""
    if (aside / "old").exists() and not target.exists():
        (aside / "old").rename(target)


def _make_durable(path: Path) -> None:
    if path.is_file():
        sync_file(path)
        return
    for place, _, files in os.walk(path):
        for name in files:
            sync_file(Path(place) / name)
        sync_directory(Path(place))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
