"""Files that are there whole or not at all.

Invariant: a path written here holds either its old bytes or all of its new ones, whatever
happens; every failure to write is a DiskFull error with the system's own words.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eyas.errors import DiskFull


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failed write into a sentence."""
    try:
        yield
    except OSError as error:
        room = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
        said = room.get(error.errno or 0, error.strerror or str(error))
        raise DiskFull(
            f"cannot write {path}: {said}. Everything that was reported as done is safe; "
            "make room and run the same command again.",
            full=error.errno in room,
        ) from error


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, make it durable and rename it to `path`.

    Raises:
        DiskFull: if any step fails; the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        try:
            write(temporary)
            sync_file(temporary)
            os.replace(temporary, path)
            sync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a small file's bytes."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(data)

    write_atomically(path, write)


def sync_file(path: Path) -> None:
    """fsync a file by path."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable (where the file system can)."""
    with suppress(OSError):  # some network file systems refuse to fsync a directory
        sync_file(path)
