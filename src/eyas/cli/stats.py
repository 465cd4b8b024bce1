"""``eyas stats``: what is in a run."""

from __future__ import annotations

import json
from typing import Any

import typer

NAME = "stats"
EPILOG = """\b
Examples:
  eyas stats run
  eyas stats run --json
"""


def command(
    run: str = typer.Argument(..., help="The run directory."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Count a run's rows, tokens, finish reasons, reasoning and answer lengths, marks and refusals.

    Works while the run is being written.
    """
    from eyas.stats import run_stats
    from eyas.store import Run

    figures = run_stats(Run(run))
    print(json.dumps(figures, indent=2)) if as_json else _print(figures)


_TURNS = 8


def _few(turns: dict[str, int]) -> dict[str, int]:
    """Rows by turn, those of the later turns of long conversations together."""
    if len(turns) <= _TURNS:
        return turns
    names = list(turns)
    rest = names[_TURNS - 1 :]
    together = {f"{rest[0]}-{rest[-1]}": sum(turns[name] for name in rest)}
    return {name: turns[name] for name in names[: _TURNS - 1]} | together


def _print(figures: dict[str, Any]) -> None:
    from eyas.cli.tokens import printable

    print(f"rows       {figures['rows']:,} done, {figures['rejected']:,} rejected")
    inside = figures["reasoning_truncated"]
    print(f"truncated  {figures['truncated']:,} ({figures['truncated_share']:.1%})"
          + (f", {inside:,} of them inside the reasoning" if inside else ""))  # fmt: skip
    if figures["later_turns"]:
        print(f"drift      {figures['history_drift']:,} of {figures['later_turns']:,} later turns "
              f"({figures['history_drift_share']:.1%}) show an answer with other ids")  # fmt: skip
    for name, counts in (
        ("finish", figures["finish_reasons"]),
        ("marks", figures["marks"]),
        ("refused", figures["rejected_reasons"]),
        ("turns", _few(figures["turns"])),
        ("modes", figures["modes"]),
    ):
        if name == "modes" and len(counts) < 2:
            continue
        said = ", ".join(f"{key} {count:,}" for key, count in counts.items()) or "none"
        print(f"{name:<10} {printable(said)}")
    print(f"{'tokens':<11} {'total':>14} {'mean':>9} {'p50':>7} {'p90':>7} {'p99':>7} {'max':>7}")
    for name in ("prompt", "output", "reasoning", "answer"):
        row = figures["tokens"][name]
        if row["rows"]:
            print(
                f"  {name:<9} {row['total']:>14,} {row['mean']:>9.1f} {row['p50']:>7,} "
                f"{row['p90']:>7,} {row['p99']:>7,} {row['max']:>7,}"
            )
