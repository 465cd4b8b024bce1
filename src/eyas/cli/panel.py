"""The lines that say how a capture stands.

Invariant: no line is wider than it may be, and none holds a control character: what came from
outside is escaped, and a figure is shown whole or not at all.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from eyas.cli.tokens import printable

if TYPE_CHECKING:
    from eyas.status import Server, Status

LABEL = 10
"""Columns of the label at the beginning of a line."""
SERVERS_SHOWN = 8
_PROBLEMS_SHOWN = 3
_WIDEST = 160
_QUIET_S = 60.0
"""A pause without a finished row that is worth telling."""


class Line(NamedTuple):
    """One line of a panel."""

    label: str
    text: str
    worry: bool = False
    """Something that a user should look at."""
    rank: int = 0
    """Where there is no room for all lines those of the highest rank go first."""

    @property
    def plain(self) -> str:
        return f"{self.label:<{LABEL}}{self.text}" if self.label else self.text


def panel(status: Status, *, width: int, height: int, encoding: str = "utf-8") -> list[Line]:
    """How a capture stands, in at most `height` lines of at most `width` columns."""
    lines = [*_counts(status), *_speed(status), *_requests(status), *_servers(status)]
    lines += [*_finish(status), *_problems(status)]
    if len(lines) > max(1, height):
        kept = sorted(range(len(lines)), key=lambda at: (lines[at].rank, at))[: max(1, height)]
        lines = [lines[at] for at in sorted(kept)]
    room = min(width, _WIDEST) - LABEL
    if room < LABEL:  # too narrow for labels
        return [Line("", fit(line.text, min(width, _WIDEST), encoding), line.worry)
                for line in lines]  # fmt: skip
    return [Line(line.label, fit(line.text, room, encoding), line.worry) for line in lines]


def one_line(status: Status) -> str:
    """The same in one line, for log files."""
    speed, counts = status.rates.last_minute, status.counts
    parts = [
        f"{_of_total(status)} rows",
        f"{counts.rejected:,} rejected",
        f"{counts.truncated:,} truncated",
        f"{status.in_flight:,} in flight",
        f"{speed.output_tokens:,.0f} output tokens/s",
    ]
    down = sum(not server.up for server in status.servers)
    if down:
        parts.append(f"{down} of {len(status.servers)} servers down")
    if status.quiet_seconds >= _QUIET_S:
        parts.append(f"no row for {duration(status.quiet_seconds)}")
    if status.eta_seconds is not None:
        parts.append(f"ETA {duration(status.eta_seconds)}")
    return "  ".join(parts)


def _of_total(status: Status) -> str:
    counts = status.counts
    decided = counts.done + counts.rejected
    if not counts.total:
        return f"{decided:,}"
    about = "" if counts.total_known else "~"
    share = min(100, 100 * decided // counts.total)
    return f"{decided:,}/{about}{counts.total:,} ({share}%)"


def _counts(status: Status) -> list[Line]:
    counts = status.counts
    parts = [_of_total(status), f"{counts.done:,} done", f"{counts.rejected:,} rejected"]
    if counts.pending is not None:
        about = "" if counts.total_known else "~"
        parts.append(f"{about}{counts.pending:,} pending")
    parts.append(f"{counts.truncated:,} truncated")
    times = [duration(status.seconds)]
    if status.state == "running":
        eta = status.eta_seconds
        times.append("ETA not known yet" if eta is None else f"ETA {duration(eta)}")
    quiet = status.state == "running" and status.quiet_seconds >= _QUIET_S
    if quiet:
        times.append(f"no row finished for {duration(status.quiet_seconds)}")
    lines = [Line("rows", _row(parts), rank=0)]
    if status.seconds:
        lines.append(Line("time", _row(times), worry=quiet, rank=1))
    return lines


def _speed(status: Status) -> list[Line]:
    now, overall, tokens = status.rates.last_minute, status.rates.overall, status.tokens
    if not (tokens.output or tokens.prompt):
        return []
    whole = f"{overall.output_tokens:,.0f} out and {overall.prompt_tokens:,.0f} in a second"
    if status.state == "running":
        parts = [f"{now.output_tokens:,.0f} out and {now.prompt_tokens:,.0f} in a second"]
        parts.append(f"overall {whole.removesuffix(' a second')}")
    else:
        parts = [whole]
    lines = [Line("tokens", _row(parts), rank=2)]
    totals = [f"{tokens.output:,} out and {tokens.prompt:,} in altogether"]
    if tokens.cached and tokens.prompt:
        share = min(100.0, 100 * tokens.cached / tokens.prompt)
        totals.append(f"{share:.0f}% of in cached")
    return [*lines, Line(" ", _row(totals), rank=8)]


def _requests(status: Status) -> list[Line]:
    if status.state != "running" or not (status.in_flight or status.servers):
        return []
    parts = [f"{status.in_flight:,} in flight"]
    queued = [server.queued for server in status.servers if server.queued is not None]
    if queued:
        parts.append(f"{sum(queued):,} queued")
    if len(status.servers) > 1:
        up = sum(server.up for server in status.servers)
        parts.append(f"{up} of {len(status.servers)} servers up")
    return [Line("requests", _row(parts), rank=3)]


def _servers(status: Status) -> list[Line]:
    """A line a server, or those that are down where there are many."""
    if status.state != "running":
        return []
    if len(status.servers) <= SERVERS_SHOWN:
        return [_server(server) for server in status.servers]
    down = [safe(server.url) for server in status.servers if not server.up]
    return [Line("down", _row([f"{len(down)} servers", *down]), True, rank=4)] if down else []


def _server(server: Server) -> Line:
    if not server.up:
        return Line("server", _row(["DOWN", safe(server.url)]), True, rank=4)
    parts = [safe(server.url), f"{server.in_flight:,} in flight"]
    if server.queued is not None:
        parts.append(f"{server.queued:,} queued")
    parts.append(f"{server.output_tokens_per_second:,.0f} out a second")
    return Line("server", _row(parts), rank=7)


def _finish(status: Status) -> list[Line]:
    if not status.finish_reasons:
        return []
    ordered = sorted(status.finish_reasons.items(), key=lambda item: -item[1])
    return [Line("finish", _row([f"{safe(name)} {n:,}" for name, n in ordered]), rank=6)]


def _problems(status: Status) -> list[Line]:
    shown = status.problems[-_PROBLEMS_SHOWN:]
    return [
        Line("problem", _row([safe(text)]), True, rank=5 + (len(shown) - at > 1) * 4)
        for at, text in enumerate(shown)
    ]


_GAP = "  "


def _row(parts: Sequence[str]) -> str:
    return _GAP.join(" ".join(part.split()) for part in parts)


def safe(text: str) -> str:
    """Text from outside, its control and format characters as escapes, in one line."""
    text = printable(text.replace("\n", " "))
    if text.isascii():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char)[0] == "C" else char
        for char in text
    )


def fit(text: str, columns: int, encoding: str = "utf-8") -> str:
    """Text of at most so many columns: the last parts (between two blanks) that have no room
    are left out, and only a first one that has none is cut."""
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    if cells(text) <= columns:
        return text
    kept = ""
    for part in text.split(_GAP):
        longer = f"{kept}{_GAP}{part}" if kept else part
        if cells(longer) > columns:
            break
        kept = longer
    return kept or _cut(text, columns)


def _cut(text: str, columns: int) -> str:
    """The beginning of a text, with dots where there is room for them."""
    dots = "..." if columns > 12 else ""
    used, at = len(dots), 0
    for char in text:
        used += _char_cells(char)
        if used > columns:
            break
        at += 1
    return text[:at] + dots


def cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_char_cells, text))


def _char_cells(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" or ord(char) >= 0x1F000 else 1


def duration(seconds: float) -> str:
    """``0.8s``, ``1m04s``, ``2h05m``, ``3d04h``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
