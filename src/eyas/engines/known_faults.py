"""Faults of engine versions that bear on token ids, each with what it does and when it acts.

Invariant: only faults that were read in (or run from) the sources of the releases named; eyas
never streams, sends one prompt a request and no stop strings, so faults of those are left out.

Sources: sglang wheels 0.4.0 to 0.5.23, ``detokenizer_manager.py``, ``schedule_batch.py``,
``tokenizer_manager.py``; the finish logic of 16 of them was run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.errors import UnsuitableServerError

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KnownFault:
    """A fault of an engine's versions from `first` to `last`, both included."""

    first: Version
    last: Version
    what: str
    """What it does, and what eyas does about it."""
    fatal: bool = False
    """No row could be right: such a server is refused."""
    needs: str | None = None
    """The detail of the server without which it does not act, such as speculative decoding."""


SGLANG: tuple[KnownFault, ...] = (
    KnownFault(
        (0, 0, 0, 0),
        (0, 4, 999, 0),
        "returns no output_ids on /generate",
        fatal=True,
    ),
    KnownFault(
        (0, 5, 1, 0),
        (0, 5, 4, 2),
        "puts the prompt's last ids (up to 5) before the output's, so no row would be right",
        fatal=True,
    ),
    KnownFault(
        (0, 5, 0, 0),
        (0, 5, 17, 999),
        "says length where the last id of the budget is a stop id; such rows count as complete "
        "and are marked eos_at_cap",
    ),
    KnownFault(
        (0, 5, 5, 0),
        (0, 5, 17, 999),
        "with speculative decoding, leaves ids after the stop id where a draft crosses the "
        "budget; such rows are refused (stop_inside)",
        needs="speculative_algorithm",
    ),
    KnownFault(
        (0, 5, 0, 0),
        (0, 5, 13, 999),
        "does not notice a sampled id that equals the vocabulary's size; such rows are refused "
        "(vocabulary)",
    ),
    KnownFault(
        (0, 5, 0, 0),
        (0, 5, 12, 999),
        "cannot echo the prompt ids that it ran, so that proof is missing (from 0.5.13 on)",
    ),
)

_BY_ENGINE: dict[str, tuple[str, tuple[KnownFault, ...], str]] = {
    "sglang": ("SGLang", SGLANG, "Use SGLang 0.5.18 or newer (0.5.4.post3 at least)."),
}


def parse_version(version: str | None) -> Version | None:
    """``0.5.4.post2`` as (0, 5, 4, 2); None where the server tells none or a strange one.

    ``0.0.0.dev0`` is what a build from source without tags calls itself: it tells nothing.
    """
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version or "")
    number = () if match is None else tuple(int(part or 0) for part in match.groups())
    return number if any(number) else None


def known_faults(
    engine: str, version: str | None, details: Mapping[str, Any] | None = None
) -> list[KnownFault]:
    """The faults of this version that can act on this server."""
    number = parse_version(version)
    if number is None or engine not in _BY_ENGINE:
        return []
    return [
        fault
        for fault in _BY_ENGINE[engine][1]
        if fault.first <= number <= fault.last
        and (fault.needs is None or (details or {}).get(fault.needs))
    ]


def refuse_fatal(engine: str, version: str | None) -> None:
    """Raise UnsuitableServerError for a version from which no row would be right."""
    for fault in known_faults(engine, version):
        if fault.fatal:
            name, _, advice = _BY_ENGINE[engine]
            raise UnsuitableServerError(f"{name} {version} {fault.what}. {advice}")
