"""Where the rest of a run is done soonest, when some servers are far slower than others.

Invariants: servers of about equal pace are never told apart; as long as there is work enough
until a slow server would be through with a row, the row is its own; paces are those of finished
answers (of a server without any, what its silence says at the least).

Rows of unknown length are expected to be as long as the others were; one that has been worked on
for longer is expected to take as long again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from eyas.engines.server import ENOUGH, Attempt, Server

_SLOWER = 1.5
"""Paces that differ by less are taken for equal."""
_CAUTION = 1.5
"""A row may turn out so much longer than was expected."""


class Outlook:
    """What is expected of the rest of a run."""

    def __init__(self, servers: Sequence[Server], left: Callable[[float], float]) -> None:
        """Prepare.

        Args:
            servers: all of the pool, as they come and go.
            left: the output tokens of everything that was not begun yet (infinite where nobody
                knows), given the mean of an answer.
        """
        self._servers = servers
        self._left = left
        self.mean_tokens = 0.0
        """Output tokens of an answer so far."""

    def update(self) -> None:
        """Look at the servers again: set which rows each one should not be given."""
        answered = sum(server.answered for server in self._servers)
        tokens = sum(server.output_tokens for server in self._servers)
        self.mean_tokens = tokens / answered if answered else 0.0
        paces = self._paces()
        for server in self._servers:
            server.most_tokens = math.inf
            faster = _faster(server, paces)
            if faster:
                begun_in_s = self._left(self.mean_tokens) / _rate(faster)
                gain = _CAUTION * paces[server] - min(faster.values())
                server.most_tokens = begun_in_s / gain

    def late(self) -> list[tuple[Server, list[int]]]:
        """What slow servers hold and others would be through with sooner, from the beginning.

        The attempts that are named have their expected `tokens` set.
        """
        paces = self._paces()
        found: list[tuple[Server, list[int]]] = []
        left = self._left(self.mean_tokens)
        if math.isinf(left) or not self.mean_tokens:
            return found
        for server in paces:
            faster = _faster(server, paces)
            if not faster:
                continue
            room = sum(other.free for other in faster) if not left else math.inf
            begun_in_s, pace, rate = left / _rate(faster), min(faster.values()), _rate(faster)
            numbers: list[int] = []
            for number, rest, whole in self._expected(server, paces[server]):
                through_there_s = begun_in_s + whole * pace
                if len(numbers) >= room or _CAUTION * rest * paces[server] <= through_there_s:
                    break
                begun_in_s += whole / rate
                server.attempts[number].tokens = whole
                numbers.append(number)
            if numbers:
                found.append((server, numbers))
        return found

    def _expected(self, server: Server, pace: float) -> list[tuple[int, float, float]]:
        """(number, tokens still to come, tokens altogether) of attempts, the longest rest first."""
        now, found = time.monotonic(), []
        for number, attempt in server.attempts.items():
            if attempt.moved:
                continue
            so_far = (now - attempt.sent) / pace
            expected = max(attempt.tokens or self.mean_tokens, 2 * so_far)
            if attempt.tokens is not None and so_far < attempt.tokens:
                expected = attempt.tokens
            found.append((number, expected - so_far, expected))
        return sorted(found, key=lambda item: -item[1])

    def _paces(self) -> dict[Server, float]:
        """Seconds an output token takes at each usable server, where that can be told."""
        usable = [server for server in self._servers if server.usable]
        paces = {s: s.token_s for s in usable if s.token_s is not None}
        if paces and self.mean_tokens:
            best = min(paces.values())
            for server in usable:
                if not server.answered and len(server.attempts) >= ENOUGH:
                    at_least = self._silence(list(server.attempts.values()))
                    if at_least > best:
                        paces[server] = at_least
        return paces

    def _silence(self, attempts: list[Attempt]) -> float:
        """The pace of a server that has not answered yet, at the least."""
        now = time.monotonic()
        ages = sum(now - attempt.sent for attempt in attempts)
        return ages / sum(attempt.tokens or self.mean_tokens for attempt in attempts)


def _faster(server: Server, paces: dict[Server, float]) -> dict[Server, float]:
    """The servers that are clearly faster."""
    own = paces.get(server)
    if own is None:
        return {}
    return {other: pace for other, pace in paces.items() if _SLOWER * pace < own}


def _rate(servers: dict[Server, float]) -> float:
    """Output tokens a second of servers that are full."""
    return sum(server.slots / pace for server, pace in servers.items())
