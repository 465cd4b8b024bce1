"""Figures of a run, in one streaming pass over a few columns."""

from __future__ import annotations

from collections import Counter
from typing import Any

from eyas.store import REJECTED, TRACES, Run


class Lengths:
    """Lengths of something, kept as a histogram: memory grows with distinct lengths only."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, length: int) -> None:
        self._counts[length] += 1

    def figures(self) -> dict[str, float]:
        """rows, total, mean, p50, p90, p99 and max (nearest-rank quantiles)."""
        rows = self._counts.total()
        if not rows:
            return {"rows": 0, "total": 0, "mean": 0.0, "p50": 0, "p90": 0, "p99": 0, "max": 0}
        total = sum(length * count for length, count in self._counts.items())
        ordered = sorted(self._counts.items())
        quantiles: dict[str, float] = {}
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            wanted, seen = max(1, -(-rows * int(share * 100) // 100)), 0
            for length, count in ordered:
                seen += count
                if seen >= wanted:
                    quantiles[name] = length
                    break
        return {"rows": rows, "total": total, "mean": total / rows, **quantiles}


def run_stats(run: Run) -> dict[str, Any]:
    """Count a run: rows, tokens, finish reasons, marks, refusals, modes, lengths.

    ``history_drift`` counts turns that stand on an earlier answer whose ids are other ones in their
    prompt, its share is that of all later turns. ``modes`` are the template switches that rows were given, as JSON.
    ``reasoning`` counts the ids between opener and closer, ``answer`` those after the closer
    (all of the output where there is no reasoning), the stop id in neither.
    """
    finish: Counter[str] = Counter()
    marks: Counter[str] = Counter()
    turns: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    lengths = {name: Lengths() for name in ("prompt", "output", "reasoning", "answer")}
    profile = run.profile()
    opener, closer = (
        [] if marker is None else list(marker.ids) for marker in (profile.opener, profile.closer)
    )
    columns = ["prompt_ids", "output_ids", "finish_reason", "stop_id", "reasoning_start",
               "reasoning_end", "marks", "turn", "template_kwargs"]  # fmt: skip
    rows = 0
    for row in run.records(TRACES, columns):
        rows += 1
        finish[row["finish_reason"]] += 1
        marks.update(row["marks"] or ())
        turns[row["turn"]] += 1
        modes[row["template_kwargs"]] += 1
        n, out = len(row["prompt_ids"]), len(row["output_ids"])
        end = n + out - (row["stop_id"] is not None)
        lengths["prompt"].add(n)
        lengths["output"].add(out)
        start, closed = row["reasoning_start"], row["reasoning_end"]
        if start is not None:
            lengths["reasoning"].add((end if closed is None else closed) - start)
        if closed is not None:
            lengths["answer"].add(max(0, end - closed - len(closer)))
        elif start is None:  # there was none, or it was closed at once
            at_once = [ids for ids in (closer, opener + closer) if ids]
            begun = [len(ids) for ids in at_once if row["output_ids"][: len(ids)] == ids]
            lengths["answer"].add(end - n - max(begun, default=0))
    for row in run.records(REJECTED, ["reason"]):
        reasons[row["reason"]] += 1
    later = sum(count for turn, count in turns.items() if turn)
    return {
        "rows": rows,
        "rejected": reasons.total(),
        "truncated": marks["truncated"],
        "reasoning_truncated": marks["reasoning_truncated"],
        "truncated_share": marks["truncated"] / rows if rows else 0.0,
        "later_turns": later,
        "history_drift": marks["history_drift"],
        "history_drift_share": marks["history_drift"] / later if later else 0.0,
        "finish_reasons": dict(finish.most_common()),
        "marks": dict(marks.most_common()),
        "rejected_reasons": dict(reasons.most_common()),
        "modes": dict(modes.most_common()),
        "turns": {str(turn): count for turn, count in sorted(turns.items())},
        "tokens": {name: lengths[name].figures() for name in lengths},
        "counts": run.manifest.counts,
    }
