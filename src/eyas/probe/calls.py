"""How the target's calls of tools would be read and answered, as a finding.

Invariant: what is said was found by rendering; no server is asked.
"""

from __future__ import annotations

from eyas.findings import Findings, Verdict
from eyas.tools.form import ToolForm


def look_at_calls(findings: Findings, form: ToolForm, rows: str = "") -> None:
    """Say what reads calls, how arguments are written, and what could go wrong.

    Args:
        findings: takes what is seen.
        form: what was found of the template.
        rows: how many rows have tools, in words; "" where no input is looked at.
    """
    texts = [rows] if rows else []
    verdict: Verdict = "ok"
    if not form.shows_tools:
        verdict = "warning"
        texts.append(
            "the chat template shows no definitions of tools, so the target is told of none; "
            "rows are marked tools_ignored"
        )
    if form.problem is not None:
        verdict = "warning"
        texts.append(f"{form.problem}; a conversation ends where the target calls a tool")
    else:
        texts.append(
            f"calls are read by {form.reader_name}, which reads back what the template writes; "
            f"arguments are written from {'JSON text' if form.as_text else 'an object'}"
        )
        if not form.parallel:
            texts.append("the template writes one call an answer, so several end a conversation")
        if form.call_end is None:
            verdict = "warning"
            texts.append(
                "no stop id stands behind a call in what the template writes: the target may go on "
                "after it; --stop-token-id names one"
            )
    findings.add(
        "calls",
        verdict,
        "; ".join(texts),
        reader=form.reader_name,
        as_text=form.as_text,
        parallel=form.parallel,
        shows_tools=form.shows_tools,
        shows_results=form.shows_results,
        call_end=form.call_end,
        problem=form.problem,
    )
