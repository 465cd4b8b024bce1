"""Which servers lately got prompts that begin alike, and are likely to hold that beginning.

Invariants: what every server holds tells nothing; memory is bounded, and a prompt that is too
short for its beginning to matter costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.engines.server import Server
from eyas.ids import pack

LEVELS = (2048, 256)
"""Lengths of a beginning, in ids, the longest first: computing fewer than 256 again is cheap."""
_REMEMBERED = 4096
"""Beginnings of each length."""

Marks = tuple[int, ...]
"""What a prompt's beginnings are known by, the longest first."""


class Prefixes:
    """Beginnings of prompts, and the servers to which they went."""

    def __init__(self) -> None:
        self._servers: dict[int, set[Server]] = {}

    def marks(self, prompt_ids: Sequence[int], group: bytes | None = None) -> Marks:
        """What a prompt is known by.

        Args:
            prompt_ids: its ids.
            group: whatever only prompts that are wholly equal share.
        """
        count = len(prompt_ids)
        packed = pack(prompt_ids) if count >= LEVELS[-1] else None
        marks = []
        if packed is not None:
            marks = [hash(packed.data[: 4 * n]) for n in LEVELS if count >= n]
        if group is not None:
            marks.insert(0, hash(group))
        return tuple(marks)

    def holders(self, marks: Marks, servers: Sequence[Server]) -> list[Server]:
        """Those of some servers that are likely to hold the longest beginning that only some do."""
        for mark in marks:
            known = self._servers.get(mark)
            if known and len(known) < len(servers):
                usable = [server for server in servers if server.usable]
                holding = [server for server in usable if server in known]
                if holding and len(holding) < len(usable):
                    return holding
        return []

    def sent(self, marks: Marks, server: Server) -> None:
        """A prompt goes to a server."""
        servers = self._servers
        for mark in marks:
            known = servers.pop(mark, None) or set()
            known.add(server)
            servers[mark] = known  # the newest stand last
        while len(servers) > _REMEMBERED * len(LEVELS):
            del servers[next(iter(servers))]

    def forget(self, server: Server) -> None:
        """A server lost what it held."""
        for known in self._servers.values():
            known.discard(server)
