"""Small helpers of the tests that capture: prompt files, configurations, what a run holds."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from eyas import CaptureConfig, Run, Summary, capture
from eyas.demo.server import TARGET
from eyas.store.parts import parts
from eyas.trace import Trace
from fault_server import FaultServer, Target


def write_prompts(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    """Single-turn rows with ids of their own."""
    return [{"id": f"q{at}", "prompt": f"What is {at} + {at % 7}?"} for at in range(count)]


def paired(count: int) -> list[dict[str, Any]]:
    """Two-turn rows."""
    return [{"id": f"p{at}", "turns": [f"What is {at} + 1?", "And one more?"]}
            for at in range(count)]  # fmt: skip


def config_for(server: FaultServer, prompts: Path, out: Path, **more: Any) -> CaptureConfig:
    values = {
        "prompts": [str(prompts)],
        "out": str(out),
        "url": server.url,
        "tokenizer": str(TARGET),
        "max_new_tokens": 200,
        "concurrency": 16,
        **more,
    }
    return CaptureConfig.model_validate(values)


def capture_from(
    server: FaultServer,
    prompts: Path,
    out: Path,
    *,
    archive: bool = False,
    probe: bool = False,
    **more: Any,
) -> Summary:
    """Capture (without the probe, whose requests would be counted) and check what always holds."""
    summary = capture(config_for(server, prompts, out, **more), archive=archive, probe=probe)
    check_run(server.target, out, summary)
    return summary


def check_run(target: Target, out: Path, summary: Summary | None = None) -> list[Trace]:
    """No good row is wrong, no id is there twice, and the counts add up."""
    run = Run(out)
    traces, rejected = list(run.traces()), list(run.rejected())
    for trace in traces:
        right = target.right_ids(trace.prompt_ids)
        assert trace.output_ids == (right if trace.complete else right[: len(trace.output_ids)])
        assert trace.loss_mask == [0] * len(trace.prompt_ids) + [1] * len(trace.output_ids)
    ids = Counter(row.id for row in [*traces, *rejected])
    assert max(ids.values(), default=1) == 1
    for row in rejected:
        assert row.reason
        assert row.detail
    if summary is not None:
        assert summary.input == summary.done + summary.rejected + summary.pending
        stored = len(traces) + len(rejected)
        assert stored == summary.done + summary.rejected + summary.extra
    return traces


def change_rows(
    run: Path, change: Callable[[list[Any]], None], chosen: Callable[[Any], bool]
) -> None:
    """Change (or take out) the chosen rows of a run's traces."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in parts(run, "traces"):
        table = pq.read_table(path)
        rows = table.to_pylist()
        some, others = [r for r in rows if chosen(r)], [r for r in rows if not chosen(r)]
        change(some)
        pq.write_table(pa.Table.from_pylist([*others, *some], schema=table.schema), path)


def wait_until_ended(pid: int) -> None:
    """Return once a process has ended, whosever child it is."""
    with suppress(ProcessLookupError):  # it is gone already
        process = os.pidfd_open(pid)
        select.select([process], [], [])
        os.close(process)


def reasons(out: Path) -> Counter[str]:
    """How many rows each reason refused."""
    return Counter(row.reason for row in Run(out).rejected())


def eyas_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "eyas", *arguments]


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[Any]) -> bool:
    """Wait until a condition holds; false if the child ended before."""
    while not condition():
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.005)
            return False
    return True


def run_eyas(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **more.pop("env", {})}
    return subprocess.run(
        eyas_command(*arguments), capture_output=True, text=True, timeout=600, env=env, **more
    )
