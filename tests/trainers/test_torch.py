"""The data set for torch, in an environment that has torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.store import Run
from trainers.conftest import as_row, rows_of


def test_rows_are_those_of_the_run(run: Path, ask: Callable[..., Any]) -> None:
    found = ask("speculators", "torch_rows", run, "{}").value
    rows = rows_of(run)
    assert [as_row(row["input_ids"], row["loss_mask"]) for row in found["rows"]] == rows
    assert found["ids"] == [trace.id for trace in Run(run).traces()]
    assert (found["left_out"], found["dtypes"]) == ({}, ["torch.int64"])
    for batches in found["batches"].values():
        seen = []
        for batch in batches:
            longest = max(batch["lengths"])
            for ids, mask, own, labels, length in zip(
                batch["input_ids"], batch["loss_mask"], batch["attention_mask"], batch["labels"],
                batch["lengths"], strict=True,
            ):  # fmt: skip
                assert {len(one) for one in (ids, mask, own, labels)} == {longest}
                assert own == [1] * length + [0] * (longest - length)
                assert ids[length:] == [9] * (longest - length)
                assert mask[length:] == [0] * (longest - length)
                assert labels == [i if m else -100 for i, m in zip(ids, mask, strict=True)]
                seen.append(as_row(ids[:length], mask[:length]))
        assert seen == rows


def test_what_is_left_out_is_counted(run: Path, ask: Callable[..., Any]) -> None:
    rows = list(Run(run).traces())
    lengths = sorted(len(trace.input_ids) for trace in rows)
    most = lengths[len(lengths) // 2]
    options = json.dumps({"max_length": most, "on_longer": "cut", "only": "stop"})
    found = ask("speculators", "torch_rows", run, options).value
    complete = [trace for trace in rows if trace.complete]
    longer = [trace for trace in complete if len(trace.input_ids) > most]
    lost = [trace for trace in longer if len(trace.prompt_ids) >= most]
    assert len(longer) > len(lost) > 0
    assert found["left_out"] == {
        "truncated": len(rows) - len(complete), "cut": len(longer) - len(lost),
        "unsupervised": len(lost),
    }  # fmt: skip
    assert [as_row(row["input_ids"], row["loss_mask"]) for row in found["rows"]] == [
        as_row(trace.input_ids[:most], trace.loss_mask[:most])
        for trace in complete
        if len(trace.prompt_ids) < most
    ]
