"""Findings: what a probe or a verification saw, each with its verdict and its evidence.

Invariant: a finding says what was seen, never only what was concluded; one that could not be
looked at is `unproven`, which is neither good nor bad.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "note", "warning", "unproven", "failed"]
"""`ok` was proven; `note` is worth knowing; `warning` may be wrong for some rows; `unproven`
could not be looked at here; `failed` means that a capture would be (or a run is) wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    """What was looked at, as a word for programs: ``tokenizer``, ``prompt_echo``, …"""
    verdict: Verdict
    text: str
    """What was seen and what it means, in a sentence; where it failed, what to do."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The ids, texts and figures behind it, as plain JSON values."""


@dataclass(slots=True)
class Findings:
    """Findings in the order in which they were made."""

    on_finding: Callable[[Finding], None] | None = None
    """Called with each finding as it is made, so that a user sees it at once."""
    items: list[Finding] = field(default_factory=list)

    def add(self, name: str, verdict: Verdict, text: str, **evidence: Any) -> Finding:
        """Record a finding."""
        finding = Finding(name, verdict, text, evidence)
        self.take(finding)
        return finding

    def take(self, finding: Finding) -> None:
        """Record a finding that was made elsewhere."""
        self.items.append(finding)
        if self.on_finding is not None:
            self.on_finding(finding)

    def of(self, verdict: Verdict) -> list[Finding]:
        """Those with one verdict."""
        return [finding for finding in self.items if finding.verdict == verdict]

    @property
    def failed(self) -> bool:
        """Whether any finding failed."""
        return any(finding.verdict == "failed" for finding in self.items)

    def as_dicts(self) -> list[dict[str, Any]]:
        """For ``--json`` and the manifest."""
        return [
            {"name": f.name, "verdict": f.verdict, "text": f.text, "evidence": f.evidence}
            for f in self.items
        ]
