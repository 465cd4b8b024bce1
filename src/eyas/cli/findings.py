"""Findings as lines for people."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from eyas.cli.tokens import printable, use_color

if TYPE_CHECKING:
    from eyas.findings import Finding

_COLORS = {"ok": "32", "note": "36", "warning": "33", "unproven": "35", "failed": "1;31"}
_WIDTH = 100


def print_finding(finding: Finding, stream: TextIO | None = None) -> None:
    """``ok        tokenizer  client and server make the same ids …``, wrapped."""
    stream = stream or sys.stdout
    head = f"{finding.verdict:<9} {finding.name:<15} "
    if use_color(stream):
        shown = f"\x1b[{_COLORS[finding.verdict]}m{finding.verdict:<9}\x1b[0m {finding.name:<15} "
    else:
        shown = head
    text = printable(finding.text).replace("\n", "\\n")
    lines = textwrap.wrap(text, _WIDTH - len(head), break_on_hyphens=False) or [""]
    print(f"{shown}{lines[0]}", file=stream)
    for line in lines[1:]:
        print(" " * len(head) + line, file=stream)
    stream.flush()


def brief(finding: Finding, say: Callable[[str], None]) -> None:
    """Before a capture only what a user should act on is said."""
    if finding.verdict in ("warning", "unproven"):
        say(f"probe     {finding.verdict}: {finding.name}: {finding.text}")


def count_verdicts(findings: list[Finding]) -> str:
    """``9 ok, 3 note, 1 unproven``."""
    counts = dict.fromkeys(_COLORS, 0)
    for finding in findings:
        counts[finding.verdict] += 1
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
