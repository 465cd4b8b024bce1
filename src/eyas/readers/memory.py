"""What rows were found in the input, so that a capture that goes on need not parse them again.

Invariant: nothing depends on it. A block of rows is recognised by a hash of everything that what
is found in it depends on: its content, the reader's options, and the reader's own source code.
What is torn, damaged or of another reader is forgotten; where nothing can be written, nothing is
remembered.

For each input file there is a file of lines ``CRC32 JSON\\n``, a line a block, in order.
"""

from __future__ import annotations

import os
import zlib
from binascii import a2b_base64, b2a_base64
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

import numpy as np
import orjson

from eyas import conversation, ids
from eyas.conversation import digest


@dataclass(slots=True)
class Known:
    """What the rows of a block are."""

    keys: bytes
    """16 bytes a row."""
    turns: list[int]
    """How many turns each has; 0 for one that cannot be used."""
    shapes: Counter[str]
    """Conversations by the shape in which they stood."""
    last: int
    """The number of the last row, counted from the block's beginning; 0 where there is none."""


class Memory:
    """What is known of one input file. To be asked for its blocks in their order."""

    def __init__(self, folder: Path, source: str, options: object) -> None:
        """Open it.

        Args:
            folder: where such files lie.
            source: the input file.
            options: what else decides what a row is; anything with a `repr` of its own.
        """
        name = digest(os.path.realpath(source).encode("utf-8", "surrogateescape")).hex()
        path = folder / f"{name}.keys"
        self._file: IO[bytes] | None = None
        self._writes = False
        with suppress(OSError):
            self._salt = digest(_code(), repr(options).encode("utf-8", "backslashreplace"))
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._file = path.open("r+b")

    def recall(self, content: bytes) -> Known | None:
        """What the next block is, if it has this content."""
        if self._file is None or self._writes:
            return None
        try:
            at = self._file.tell()
            known = _parsed(self._file.readline(), self._name(content))
            if known is None:  # from here on the file tells of other blocks
                self._writes = True
                self._file.seek(at)
                self._file.truncate()
        except OSError:
            self.close()
            return None
        return known

    def keep(self, content: bytes, known: Known) -> None:
        """Note what the next block is, after `recall` did not know."""
        if self._file is None:
            return
        body = orjson.dumps({
            "block": self._name(content),
            "keys": b2a_base64(known.keys, newline=False).decode(),
            "turns": b2a_base64(np.array(known.turns, "<u4").tobytes(), newline=False).decode(),
            "shapes": known.shapes,
            "last": known.last,
        })  # fmt: skip
        try:
            self._file.write(b"%08x %b\n" % (zlib.crc32(body), body))
        except OSError:
            self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _name(self, content: bytes) -> str:
        return digest(self._salt, content).hex()


def _parsed(line: bytes, name: str) -> Known | None:
    """What a line says, if it is whole and tells of the block with this name."""
    try:
        body = line[9:-1]
        if int(line[:8], 16) != zlib.crc32(body) or (found := orjson.loads(body))["block"] != name:
            return None
        turns = np.frombuffer(a2b_base64(found["turns"]), "<u4").tolist()
        return Known(a2b_base64(found["keys"]), turns, Counter(found["shapes"]), found["last"])
    except (ValueError, LookupError, TypeError):
        return None


def _code() -> bytes:
    """A hash of the code that makes conversations and their keys."""
    used = [Path(str(module.__file__)) for module in (conversation, ids)]
    sources = [*used, *sorted(Path(__file__).parent.glob("*.py"))]
    return digest(*(path.read_bytes() for path in sources), version("orjson").encode())
