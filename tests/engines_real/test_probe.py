"""Probe, capture, verify and scoring again on every real engine: honest ones pass, and a row
whose ids were changed stands out."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from capturing import run_eyas, write_prompts
from engines_real.servers import Served, SetUp
from eyas import CaptureConfig, Run, TargetConfig, capture
from eyas.demo.problems import generate as problems
from eyas.engines import connect
from eyas.findings import Finding, Findings
from eyas.probe import Probe, probe
from eyas.tokens import load_tokenizer
from eyas.verify.rescore import rescore
from eyas.verify.run import verify_run

OPENED = [SetUp("llama_cpp"), SetUp("sglang"), SetUp("vllm")]
OWN = [SetUp("sglang", "own-opener"), SetUp("vllm", "own-opener")]
PARSED = [SetUp("sglang", parser="qwen3"), SetUp("vllm", parser="qwen3")]
CHAT = [SetUp(name, "smollm2", dtype="bfloat16") for name in ("llama_cpp", "sglang", "vllm")]

honest = pytest.mark.parametrize("served", [*OPENED, *OWN, *PARSED, *CHAT], indirect=True, ids=str)
scoring = pytest.mark.parametrize("served", [*OPENED[1:], *CHAT[1:]], indirect=True, ids=str)


def finding(done: Probe, name: str) -> Finding:
    return next(f for f in done.findings.items if f.name == name)


def sampled(served: Served) -> dict[str, float]:
    return {"temperature": 0.6, "top_p": 0.9} if served.name == "smollm2" else {}


@honest
def test_an_honest_engine_passes_the_probe(served: Served) -> None:
    done = probe(
        TargetConfig.model_validate(
            {"url": served.url, "tokenizer": str(served.model), **sampled(served)}
        )
    )
    assert not done.failed, [f.text for f in done.findings.of("failed")]
    assert done.findings.of("warning") == []
    scores = "unproven" if served.engine == "llama_cpp" else "ok"
    verdicts = {name: finding(done, name).verdict
                for name in ("tokenizer", "question", "sampling", "accounts", "reasoning", "stop",
                             "served_template")}  # fmt: skip
    assert set(verdicts.values()) == {"ok"}, verdicts
    assert finding(done, "scores").verdict == scores, finding(done, "scores").text
    where = finding(done, "reasoning").text
    if served.name == "own-opener":
        assert "the model writes" in where
    elif served.name == "demo":
        assert "the prompt ends with '<think>' [510]" in where
    else:
        assert "neither template nor vocabulary" in where
    assert finding(done, "chat_api").verdict == "note"


def captured(served: Served, folder: Path) -> Path:
    questions = [p.question for p in problems(5, 12, "held_out")]
    rows = [{"id": f"q{at}", "prompt": question} for at, question in enumerate(questions)]
    summary = capture(
        CaptureConfig.model_validate(
            {
                "prompts": [str(write_prompts(folder / "prompts.jsonl", rows))],
                "out": str(folder / "run"),
                "url": served.url,
                "tokenizer": str(served.model),
                "max_new_tokens": 300 if served.name != "smollm2" else 40,
                "logprobs": True,
                **sampled(served),
                # A chat model says the same in many ways: of its likeliest words alone it is
                # sure that a lost one stands out.
                "temperature": 0.0 if served.name == "smollm2" else 1.0,
            }
        )
    )
    assert summary.pending == 0
    assert summary.done > 0
    return folder / "run"


def rescored(run: Path, served: Served) -> Finding:
    async def score() -> Findings:
        findings = Findings()
        engine = await connect(served.url)
        tokenizer = load_tokenizer(str(served.model))
        await rescore(Run(run), engine, tokenizer, findings, count=100)
        await engine.close()
        return findings

    return asyncio.run(score()).items[-1]


def changed(run: Path, folder: Path, *, logprobs: bool) -> tuple[Path, str]:
    """A copy of a run of which one row lost an id in its first half."""
    copy = folder / f"changed-{logprobs}"
    shutil.copytree(run, copy)
    (path,) = (copy / "traces").glob("*.parquet")
    table = pq.read_table(path)
    rows: list[dict[str, Any]] = table.to_pylist()
    row = max(rows, key=lambda r: len(r["output_ids"]))
    at = len(row["output_ids"]) // 3
    for name in ("output_ids", "logprobs"):
        row[name] = [*row[name][:at], *row[name][at + 2 :]]
    if not logprobs:
        for other in rows:
            other["logprobs"] = None
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return copy, row["id"]


@scoring
def test_a_run_verifies_and_a_changed_row_stands_out(served: Served, tmp_path: Path) -> None:
    run = captured(served, tmp_path)
    findings = Findings()
    verify_run(Run(run), load_tokenizer(str(served.model)), findings)
    assert not findings.failed, [f.text for f in findings.of("failed")]
    found = rescored(run, served)
    assert found.verdict == "ok", found.text
    copy, row_id = changed(run, tmp_path, logprobs=True)
    found = rescored(copy, served)
    assert found.verdict == "failed", found.text
    assert [row["id"] for row in found.evidence["wrong"]] == [row_id]
    # Without the first log-probabilities no honest row may be suspect.
    copy, row_id = changed(run, tmp_path, logprobs=False)
    found = rescored(copy, served)
    assert {row["id"] for row in found.evidence.get("wrong", [])} <= {row_id}


@pytest.mark.parametrize("served", OPENED, indirect=True, ids=str)
def test_the_commands(served: Served, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "What is 3+4?"}])
    run, where = str(tmp_path / "run"), ["--url", served.url, "--tokenizer", str(served.model)]
    probed = run_eyas("probe", *where, "--json")
    assert probed.returncode == 0, probed.stderr
    assert json.loads(probed.stdout)["server"]["engine"] == served.engine
    done = run_eyas("capture", str(prompts), "--out", run, "--max-new-tokens", "300", *where)
    assert done.returncode == 0, done.stderr
    verified = run_eyas("verify", run, "--rescore", "1")
    assert verified.returncode == 0, verified.stdout
