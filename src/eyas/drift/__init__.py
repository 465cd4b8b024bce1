"""How many rows and ids of a run would be others, had only text been kept.

Invariant: a way is measured over every row that it can be measured of, and why it cannot be of the
others is counted; memory holds a batch and some examples.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson

from eyas.conversation import Message
from eyas.drift.causes import CAUSES, Difference, compare
from eyas.drift.ways import WAYS, NotRendered, Row, answer_of, texts
from eyas.errors import DamagedRun
from eyas.prompting import Prompting
from eyas.run_target import RunTarget
from eyas.store import TRACES, Run
from eyas.trace import ended_itself

__all__ = ["CAUSES", "COLUMNS", "WAYS", "DriftReport", "WayDrift", "measure_drift", "row_of"]

COLUMNS = ("id", "key", "sample", "prompt_ids", "output_ids", "finish_reason", "reasoning_start",
            "reasoning_end", "marks", "messages", "tools", "stop_id")  # fmt: skip
_BATCH = 64
_EXAMPLES = 3
"""Examples a cause."""
_AROUND = 3
"""Ids that an example shows from the parting on."""


@dataclass
class WayDrift:
    """What one way loses."""

    rows: int = 0
    """Rows that it could be measured of."""
    rows_changed: int = 0
    prompts_changed: int = 0
    """Those of them that differ in the prompt already."""
    ids: int = 0
    """Output ids of the rows."""
    ids_lost: int = 0
    """Those that do not come back in their order."""
    causes: Counter[str] = field(default_factory=Counter)
    """Rows by what differs first."""
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Some rows a cause."""
    not_measured: Counter[str] = field(default_factory=Counter)
    """Other rows by why it could not be measured of them."""

    def add(self, prompting: Prompting, row: Row, again: list[int], answer: Message | None) -> None:
        """Count a row that text turned into other ids, or into the same.

        Args:
            again: what is made of the text.
            answer: as the text had it taken apart; None where it was not.
        """
        self.rows += 1
        self.ids += len(row.output_ids)
        found = compare(prompting, row, again, answer)
        if found is None:
            return
        self.rows_changed += 1
        self.prompts_changed += found.position < len(row.prompt_ids)
        self.ids_lost += found.lost
        self.causes[found.cause] += 1
        examples = self.examples.setdefault(found.cause, [])
        if len(examples) < _EXAMPLES:
            examples.append(_example(prompting, row, again, found))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the shares."""
        return {
            "rows": self.rows,
            "rows_changed": self.rows_changed,
            "rows_changed_share": self.rows_changed / self.rows if self.rows else None,
            "prompts_changed": self.prompts_changed,
            "ids": self.ids,
            "ids_lost": self.ids_lost,
            "ids_lost_share": self.ids_lost / self.ids if self.ids else None,
            "causes": dict(self.causes.most_common()),
            "examples": self.examples,
            "not_measured": dict(self.not_measured.most_common()),
        }


@dataclass
class DriftReport:
    """What each way loses."""

    rows: int = 0
    """Rows that were looked at."""
    ways: dict[str, WayDrift] = field(default_factory=lambda: {name: WayDrift() for name in WAYS})

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        ways = {name: {"way": WAYS[name], **way.as_dict()} for name, way in self.ways.items()}
        return {"rows": self.rows, "ways": ways}


def measure_drift(
    run: Run,
    target: RunTarget,
    *,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    on_row: Callable[[int], None] = lambda _: None,
) -> DriftReport:
    """Compare a run's rows with what text would give; streams.

    Args:
        limit: look at the first rows only.
        sample: look at so many rows, drawn at random by `seed`.
        on_row: called with the number of rows seen so far.

    Raises:
        DamagedRun: the run cannot be read.
    """
    report = DriftReport()
    rows = _rows(run, target.prompting, _chosen(run, limit, sample, seed), limit)
    while batch := list(islice(rows, _BATCH)):
        report.rows += len(batch)
        _measure(target, batch, report)
        on_row(report.rows)
    return report


def _measure(target: RunTarget, batch: list[Row], report: DriftReport) -> None:
    prompting = target.prompting
    answers = [answer_of(prompting, row) for row in batch]
    kept = [texts(prompting, row, answer) for row, answer in zip(batch, answers, strict=True)]
    for name, way in report.ways.items():
        made = [one[name] for one in kept]
        again = iter(
            prompting.tokenizer.encode_batch([text for text in made if isinstance(text, str)])
        )
        for row, answer, text in zip(batch, answers, made, strict=True):
            if isinstance(text, NotRendered):
                way.not_measured[text.why] += 1
                continue
            ids = next(again)
            shown = None if name == "text" else answer
            way.add(prompting, row, ids, shown)


def _example(prompting: Prompting, row: Row, again: list[int], found: Difference) -> dict[str, Any]:
    first, last = max(0, found.position - 1), found.position + _AROUND
    ids, tokenizer = row.ids[first:last], prompting.tokenizer
    return {
        "id": row.id,
        "position": found.position,
        "output_position": found.position - len(row.prompt_ids),
        "ids": ids,
        "pieces": [p.decode("utf-8", "replace") for p in tokenizer.pieces(ids)],
        "ids_again": again[first:last],
        "pieces_again": [p.decode("utf-8", "replace") for p in tokenizer.pieces(again[first:last])],
        "ids_lost": found.lost,
    }


def _chosen(run: Run, limit: int | None, sample: int | None, seed: int) -> Callable[[int], bool]:
    """Whether the row of a number is looked at."""
    if sample is None:
        return lambda number: limit is None or number < limit
    there = run.count() if limit is None else min(limit, run.count())
    drawn = set(random.Random(seed).sample(range(there), min(sample, there)))
    return drawn.__contains__


def _rows(
    run: Run, prompting: Prompting, chosen: Callable[[int], bool], limit: int | None
) -> Iterator[Row]:
    number = 0
    for batch in run.batches(TRACES, COLUMNS, batch_size=_BATCH):
        if limit is not None and number >= limit:
            return
        wanted = [at for at in range(len(batch)) if chosen(number + at)]
        number += len(batch)
        for record in batch.take(wanted).to_pylist() if wanted else ():
            yield row_of(record, prompting)


def row_of(record: dict[str, Any], prompting: Prompting) -> Row:
    """What is looked at of a trace, which has the columns `COLUMNS`.

    Raises:
        DamagedRun: if its messages, tools or key are none.
    """
    try:
        messages = orjson.loads(record["messages"]) if record["messages"] else None
        tools = orjson.loads(record["tools"]) if record["tools"] else None
        mode = prompting.modes.of(bytes.fromhex(record["key"]), record["sample"])
        if not isinstance(messages, list | None) or not isinstance(tools, list | None):
            raise ValueError("its messages or tools are no list")
    except (ValueError, TypeError) as error:  # a damaged row may hold anything
        raise DamagedRun(
            f"row {record['id']!r} cannot be read ({error}); eyas verify says what is wrong with "
            "the run"
        ) from error
    start, end, output = record["reasoning_start"], record["reasoning_end"], record["output_ids"]
    last = len(record["prompt_ids"]) + len(output) - (record["stop_id"] is not None)
    return Row(
        id=record["id"],
        prompt_ids=record["prompt_ids"],
        output_ids=output,
        reasoning=None if start is None else (start, last if end is None else end),
        closed=end is not None,
        complete=ended_itself(record["finish_reason"], record["marks"]),
        messages=messages,
        tools=tools or None,
        mode=mode,
    )
