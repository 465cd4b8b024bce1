"""A run that is whole verifies; whatever is changed in it is found and named."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from capturing import capture_from, numbered, paired, run_eyas, write_prompts
from eyas import Run
from eyas.demo.server import TARGET
from eyas.engines import connect
from eyas.findings import Finding, Findings
from eyas.tokens import load_tokenizer
from eyas.verify.rescore import rescore, sample
from eyas.verify.run import verify_run
from fault_server import CLOSER, FaultServer, Target


@pytest.fixture(scope="module")
def whole(server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty rows, two of them refused, some cut by their budget, with log-probabilities."""
    folder = tmp_path_factory.mktemp("verify")
    rows = [*numbered(40), *paired(10), {"id": "bad", "prompt": 5}, {"id": "empty", "prompt": ""}]
    prompts = write_prompts(folder / "p.jsonl", rows)
    capture_from(server, prompts, folder / "run", max_new_tokens=35, logprobs=True)
    return folder / "run"


def verified(run: Path) -> Findings:
    findings = Findings()
    verify_run(Run(run), load_tokenizer(str(TARGET)), findings)
    return findings


def rescored(run: Path, url: str, count: int = 100) -> Finding:
    async def score() -> Findings:
        findings = Findings()
        engine = await connect(url)
        await rescore(Run(run), engine, load_tokenizer(str(TARGET)), findings, count=count)
        await engine.close()
        return findings

    (finding,) = asyncio.run(score()).items
    return finding


Change = Callable[[list[dict[str, Any]]], None]


def damaged(whole: Path, folder: Path, change: Change, part: str = "traces") -> Path:
    """A copy of the run with rows of its first part changed."""
    run = folder / "run"
    shutil.copytree(whole, run)
    path = sorted((run / part).glob("*.parquet"))[0]
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return run


def test_a_whole_run_verifies(whole: Path) -> None:
    findings = verified(whole)
    assert [f.verdict for f in findings.items] == ["ok"] * len(findings.items)
    assert {f.name for f in findings.items} == {
        "tokenizer", "template", "profile", "parts", "rows", "counts",
    }  # fmt: skip


def complete(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(row for row in rows if row["finish_reason"] == "stop" and not row["marks"])


def _set(name: str, value: Any) -> Change:
    def change(rows: list[dict[str, Any]]) -> None:
        row = complete(rows)
        row[name] = value(row) if callable(value) else value

    return change


def _without_closer(row: dict[str, Any]) -> list[int]:
    return [i for i in row["output_ids"] if i != CLOSER]


def first_of_two(rows: list[dict[str, Any]]) -> dict[str, Any]:
    second = next(row for row in rows if row["turn"] == 1)
    return next(r for r in rows if r["key"] == second["key"] and r["turn"] == 0)


DAMAGE: dict[str, tuple[Change, str]] = {
    "closer lost": (_set("output_ids", _without_closer), "missing_closer"),
    "stop id lost": (_set("output_ids", lambda r: r["output_ids"][:-1]), "stop_id"),
    "stop id inside": (_set("output_ids", lambda r: [506, *r["output_ids"]]), "stop_inside"),
    "outside the vocabulary": (_set("output_ids", lambda r: [600, *r["output_ids"]]), "vocabulary"),
    "over the budget": (_set("max_new_tokens", 3), "budget"),
    "no output": (_set("output_ids", []), "no_output_ids"),
    "prompt changed": (_set("prompt_ids", lambda r: [66, *r["prompt_ids"]]), "positions"),
    "prompt of the same length": (
        _set("prompt_ids", lambda r: [*r["prompt_ids"][:2], 66, *r["prompt_ids"][3:]]), "prompt"),
    "prompt outside": (_set("prompt_ids", lambda r: [*r["prompt_ids"][:2], 99999,
                                                     *r["prompt_ids"][3:]]), "prompt_ids"),
    "marks changed": (_set("marks", ["loop"]), "marks"),
    "reasoning moved": (_set("reasoning_end", 3), "positions"),
    "log-probabilities cut": (_set("logprobs", [-0.1]), "logprobs"),
    "other weights": (_set("weight_version", "other"), "weights"),
    "finish changed": (_set("finish_reason", "length"), "marks"),
    "id changed": (_set("id", "other/0/0"), "id"),
    "row twice": (lambda rows: rows.append(rows[0]), "twice"),
    "row lost": (lambda rows: rows.remove(complete(rows)), "counts"),
    "first turn lost": (lambda rows: rows.remove(first_of_two(rows)), "turn_missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_damage_is_named(name: str, whole: Path, tmp_path: Path) -> None:
    change, fault = DAMAGE[name]
    findings = verified(damaged(whole, tmp_path, change))
    failed = {f.name for f in findings.of("failed")}
    assert fault in failed, [(f.name, f.text) for f in findings.items]


def test_a_refused_row_without_a_reason(whole: Path, tmp_path: Path) -> None:
    run = damaged(whole, tmp_path, lambda rows: rows[0].update(detail=""), "rejected")
    assert {f.name for f in verified(run).of("failed")} == {"no_reason"}


def test_a_part_that_cannot_be_read(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    part = next((run / "traces").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:500])
    (failed,) = verified(run).of("failed")
    assert failed.name == "parts"
    assert part.name in failed.text


@pytest.mark.parametrize("field", ["tokenizer_files", "template"])
def test_another_tokenizer_or_template(field: str, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["fingerprint"][field] = "0" * 64
    (run / "manifest.json").write_text(json.dumps(manifest))
    findings = verified(run)
    if field == "template":
        assert [f.name for f in findings.of("unproven")] == ["template"]
    else:
        assert [f.name for f in findings.of("failed")] == ["tokenizer"]


def test_a_profile_that_is_not_the_files(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["profile"]["vocab_size"] = 4096
    (run / "manifest.json").write_text(json.dumps(manifest))
    (failed,) = verified(run).of("failed")
    assert failed.name == "profile"
    assert "vocab_size" in failed.text


# -- scored again ----------------------------------------------------------------------------


def test_a_whole_run_scores_as_it_was_generated(whole: Path, server: FaultServer) -> None:
    found = rescored(whole, server.url)
    assert found.verdict == "ok", found.text
    assert found.evidence["rows"] == len(list(Run(whole).traces()))
    assert found.evidence["skipped"] == 0


def _exchange(row: dict[str, Any]) -> list[int]:
    ids = list(row["output_ids"])
    ids[3] = 77 if ids[3] != 77 else 78
    return ids


HIDDEN: dict[str, Change] = {
    "an id exchanged": _set("output_ids", _exchange),
    "ids of another row": lambda rows: rows[0].update(
        output_ids=rows[1]["output_ids"], logprobs=rows[1]["logprobs"]
    ),
}


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_a_row_that_was_changed_stands_out(
    name: str, logprobs: bool, whole: Path, tmp_path: Path, server: FaultServer
) -> None:
    """Also where no log-probabilities were kept: the run's sampling (top_k 40, top_p 0.95)
    could not have chosen such an id."""

    def change(rows: list[dict[str, Any]]) -> None:
        HIDDEN[name](rows)
        if not logprobs:
            for row in rows:
                row["logprobs"] = None

    found = rescored(damaged(whole, tmp_path, change), server.url)
    assert found.verdict == "failed"
    assert len(found.evidence["wrong"]) == 1
    assert found.evidence["wrong"][0]["id"] in found.text


def test_a_sample_is_random_and_repeatable(whole: Path) -> None:
    run = Run(whole)
    first = [row.id for row in sample(run, 10, seed=1)]
    assert first == [row.id for row in sample(run, 10, seed=1)]
    assert first != [row.id for row in sample(run, 10, seed=2)]
    assert len(set(first)) == 10
    assert len(sample(run, 10_000, seed=1)) == len(list(run.traces()))


def test_another_target_proves_nothing(whole: Path, target: Target) -> None:
    with FaultServer(target, info={"version": "0.5.23", "model_path": "other",
                                   "weight_version": "v9"}) as other:  # fmt: skip
        found = rescored(whole, other.url)
    assert found.verdict == "unproven"
    assert "v9" in found.text


# -- the command -----------------------------------------------------------------------------


def test_the_command(whole: Path, tmp_path: Path, server: FaultServer) -> None:
    good = run_eyas("verify", str(whole), "--rescore", "5", "--url", server.url)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "nothing is wrong" in good.stdout
    run = damaged(whole, tmp_path, DAMAGE["closer lost"][0])
    bad = run_eyas("verify", str(run), "--json")
    assert bad.returncode == 3
    said = json.loads(bad.stdout)
    assert said["ok"] is False
    assert "missing_closer" in {f["name"] for f in said["findings"] if f["verdict"] == "failed"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{file}"], "--tokenizer"),
        (["{file}", "--rescore", "3", "--tokenizer", str(TARGET)], "--rescore needs a run"),
        (["/no/such/file.jsonl", "--tokenizer", str(TARGET)], "does not exist"),
        (["{empty}", "--tokenizer", str(TARGET)], "no "),
    ],
)
def test_mistakes(arguments: list[str], said: str, tmp_path: Path) -> None:
    file, empty = tmp_path / "rows.jsonl", tmp_path / "empty"
    file.write_text('{"messages": []}\n')
    empty.mkdir()
    filled = [a.format(file=file, empty=empty) for a in arguments]
    shown = run_eyas("verify", *filled)
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1), shown.stdout + shown.stderr
    assert said in shown.stderr
