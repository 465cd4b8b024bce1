"""Conversations as the user gave them, before any model or engine is known.

Invariant: a conversation's `key` depends on its given id, messages and tools alone, never on
the file, line or order in which it was found, so that a run can be continued after the input
was shuffled, split or appended to.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from eyas.ids import as_json

Message = dict[str, Any]
"""One chat message: ``role`` (str), ``content`` (str), and nothing that is None."""


class Result(NamedTuple):
    """What a tool gave in the recording, and the call that it answered."""

    name: str | None
    """The tool's name; None where the recording does not tell."""
    arguments: str | None
    """The call's arguments as `plain_arguments` writes them; None where they are not known."""
    content: str


@dataclass(slots=True)
class ToolUse:
    """What a conversation with tools has besides its messages."""

    tools: list[dict[str, Any]] | None
    """Definitions as chat templates take them (OpenAI's shape); None where none are given."""
    results: dict[int, tuple[Result, ...]] = field(default_factory=dict)
    """Recorded results by the turn (0-based) that they begin."""


@dataclass(slots=True)
class Conversation:
    """One row of the input.

    Either `turns` or `prompt_ids` is filled. `turns` holds, for each assistant answer to be
    generated, the non-assistant messages that come before it (recorded answers are dropped).
    Results of tools are in `tool_use` instead, and stand before the other messages of a turn.
    """

    key: bytes
    """16 bytes that identify the content; exact duplicates differ by their occurrence."""
    given_id: str | None
    """The id that the input gave, if any. For show; several conversations may share it."""
    turns: list[list[Message]]
    prompt_ids: Sequence[int] | None = None
    """Ready-made prompt ids, sent as they are."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The other columns of the input row."""
    source: str = ""
    """The input file's name."""
    line: int = 0
    """Line (JSON Lines, CSV) or row (others) in that file, counted from 1. Never identity."""
    shape: str = ""
    """The recognised shape, for example ``messages`` or ``turns``."""
    marks: tuple[str, ...] = ()
    """Marks that every trace of this conversation carries, such as ``leading_assistant``."""
    tool_use: ToolUse | None = None
    """Tools and recorded results; None for a conversation that has neither."""

    @property
    def n_turns(self) -> int:
        return 1 if self.prompt_ids is not None else len(self.turns)


@dataclass(slots=True)
class BadLine:
    """A piece of the input that cannot be used; it goes to ``rejected/`` and stops nothing."""

    key: bytes
    """16 bytes that identify the line by its bytes."""
    reason: str
    """A short name, for example ``invalid_json``."""
    detail: str
    """A sentence: what is wrong with which value."""
    source: str
    line: int
    text: str
    """What stood there, cut to a length that can be shown."""


_LENGTH = struct.Struct("<Q").pack


def digest(*parts: bytes) -> bytes:
    """16 bytes of BLAKE2b over length-prefixed parts (so that borders between them count)."""
    framed: list[bytes] = []
    for part in parts:
        framed += (_LENGTH(len(part)), part)
    return hashlib.blake2b(b"".join(framed), digest_size=16).digest()


_CANONICAL = orjson.OPT_SORT_KEYS


def conversation_key(given_id: str | None, content: Any) -> bytes:
    """The key of a conversation: its given id and its messages, tools or prompt ids.

    `content` is anything JSON can hold; the order of the keys in a message plays no part.
    """
    name = b"\0" if given_id is None else given_id.encode("utf-8", "surrogatepass")
    return digest(b"conversation", name, orjson.dumps(content, as_json, _CANONICAL))


def plain_arguments(arguments: Any) -> str:
    """A call's arguments in the one form in which they are compared: JSON with sorted keys.

    Whole numbers are written without a fraction, and entries that are null count as absent.
    """
    return json.dumps(_plain(arguments or {}), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if type(value) is dict:
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def nth_key(key: bytes, occurrence: int) -> bytes:
    """The key of the n-th exact duplicate (0 is the first one and keeps its key)."""
    return key if occurrence == 0 else digest(b"again", key, occurrence.to_bytes(8, "little"))


def row_key(key: bytes, sample: int, turn: int) -> bytes:
    """16 bytes for one unit of work: (conversation, sample, turn)."""
    return digest(key, sample.to_bytes(4, "little"), turn.to_bytes(4, "little"))


def seed_for(base_seed: int, key: bytes, sample: int, turn: int) -> int:
    """The request's sampling seed: 31 bits of hash(base seed, key, sample, turn)."""
    unit = sample.to_bytes(4, "little") + turn.to_bytes(4, "little")
    raw = digest(b"seed", str(base_seed).encode(), key, unit)
    return int.from_bytes(raw[:4], "little") & 0x7FFFFFFF
