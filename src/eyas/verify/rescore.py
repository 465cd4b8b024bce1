"""A sample of a run's rows, scored again by the server: are they still what the model samples?

Invariant: the rows are chosen at random with a seed, the engine's noise is measured on the
first of them, and the worst rows are named; where the engine cannot score, it is `unproven`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator

import orjson

from eyas.engines import Engine, Sampling, ServerInfo
from eyas.errors import EngineError
from eyas.findings import Findings
from eyas.scoring import TOP, Agreement, Noise, comparable, compare, measure_noise
from eyas.store import Run
from eyas.store.journal import segments
from eyas.store.parts import TRACES, part_name, parts, read_rows
from eyas.tokens import Tokenizer
from eyas.trace import Trace, from_record
from eyas.verify.run_rows import wrong_logprobs

_AT_ONCE = 4
_WORST = 5


async def rescore(
    run: Run,
    engine: Engine,
    tokenizer: Tokenizer,
    findings: Findings,
    *,
    count: int,
    seed: int = 0,
    on_row: Callable[[int], None] = lambda _: None,
) -> None:
    """Score up to `count` rows again and report.

    Raises:
        EngineError: the server cannot be reached at all.
    """
    info = await engine.identify()
    if not _same_target(run, info, findings):
        return
    chosen = sample(run, count, seed)
    rows = [row for row in chosen if _is_readable(row)]
    unreadable = [str(row.id) for row in chosen if not _is_readable(row)]
    if unreadable and not rows:
        findings.add("rescore", "unproven", f"none of {len(chosen)} rows could be scored: their "
                     "ids or their sampling cannot be read", unreadable=unreadable)  # fmt: skip
        return
    measured = await _first_noise(engine, rows)
    if measured is None:
        findings.add(
            "rescore",
            "unproven",
            f"{info.engine} at {info.url} gives no log-probabilities of a prompt, so no row can be "
            "scored again there (SGLang and vLLM can)"
            if rows
            else "the run holds no rows to score again",
        )
        return
    if not measured.usable:
        findings.add("rescore", "unproven", f"scoring the same ids thrice differs by "
                     f"{measured.largest:.2f}; nothing can be proven with such noise")  # fmt: skip
        return
    gate, done = asyncio.Semaphore(_AT_ONCE), 0

    async def one(row: Trace) -> tuple[Trace, Agreement] | None:
        nonlocal done
        async with gate:
            agreement = await _score(engine, row, measured)
        done += 1
        on_row(done)
        return None if agreement is None else (row, agreement)

    scored = [pair for pair in await asyncio.gather(*map(one, rows)) if pair is not None]
    _report(findings, tokenizer, scored, measured, len(chosen) - len(scored), unreadable)


def sample(run: Run, count: int, seed: int) -> list[Trace]:
    """Up to `count` good rows, chosen evenly over the whole run."""
    import pyarrow.parquet as pq

    sealed = parts(run.path, TRACES)
    sizes = [pq.read_metadata(path).num_rows for path in sealed]
    journal = list(_unsealed(run, {path.name for path in sealed}))
    total = sum(sizes) + len(journal)
    chosen = sorted(random.Random(seed).sample(range(total), min(count, total)))
    rows: list[Trace] = []
    first = 0
    for path, size in zip(sealed, sizes, strict=True):
        wanted = {at - first for at in chosen if first <= at < first + size}
        if wanted:
            rows += [row for n, row in enumerate(map(_trace, read_rows(path))) if n in wanted]
        first += size
    rows += [journal[at - first] for at in chosen if at >= first]
    return rows


def _unsealed(run: Run, sealed: set[str]) -> Iterator[Trace]:
    from eyas.store.journal import read_segment

    for number, segment in segments(run.path / "journal"):
        if part_name(number) not in sealed:
            for packed in read_segment(segment, "T"):
                yield _trace(packed.record())


def _trace(record: dict[str, object]) -> Trace:
    row = from_record(record)
    assert isinstance(row, Trace)
    return row


def _is_readable(row: Trace) -> bool:
    """Whether a row holds ids and a sampling that it can be scored with."""
    if not row.prompt_ids or not row.output_ids or None in row.prompt_ids + row.output_ids:
        return False
    return _sampling(row.sampling) is not None


def _sampling(text: str | None) -> Sampling | None:
    """What a row says that it was sampled with, or None where that cannot be read."""
    try:
        given = orjson.loads(text or "")
        sampling = Sampling(**{**given, "stop_token_ids": tuple(given.get("stop_token_ids", ()))})
    except (AttributeError, TypeError, ValueError):
        return None
    numbers = [x for name, x in sampling.as_dict().items() if name != "stop_token_ids"]
    if any(type(x) not in (int, float) or not math.isfinite(x) for x in numbers):
        return None
    sound = sampling.temperature >= 0 and type(sampling.top_k) is int
    return sampling if sound and set(map(type, sampling.stop_token_ids)) <= {int} else None


def _same_target(run: Run, info: ServerInfo, findings: Findings) -> bool:
    fingerprint = run.manifest.fingerprint
    for name, now in (("target", info.model), ("weight_version", info.weight_version)):
        was = fingerprint.get(name)
        if None not in (was, now) and was != now:
            findings.add(
                "rescore",
                "unproven",
                f"{info.url} serves {name} {now!r} and the run is of {was!r}, so scoring its rows "
                "there proves nothing; give the right server with --url",
            )
            return False
    return True


async def _first_noise(engine: Engine, rows: list[Trace]) -> Noise | None:
    for row in rows[:3]:  # a row that fills the context cannot be scored
        try:
            measured = await measure_noise(engine, row.input_ids, len(row.prompt_ids))
        except EngineError:
            continue
        if measured is not None:
            return measured[0]
    return None


async def _score(engine: Engine, row: Trace, noise: Noise) -> Agreement | None:
    try:
        scores = await engine.score(row.input_ids, start=len(row.prompt_ids), top=TOP)
    except EngineError:
        return None
    if scores is None or len(scores.logprobs) != len(row.output_ids):
        return None
    sampling, generated = _sampling(row.sampling), row.logprobs
    assert sampling is not None  # it is readable
    if generated is not None and wrong_logprobs(generated, len(row.output_ids)) is not None:
        generated = None
    return compare(
        row.output_ids,
        scores,
        generated=generated if comparable(engine, sampling) else None,
        sampling=sampling,
        noise=noise,
    )


def _report(
    findings: Findings,
    tokenizer: Tokenizer,
    scored: list[tuple[Trace, Agreement]],
    noise: Noise,
    skipped: int,
    unreadable: list[str],
) -> None:
    wrong = [(row, found) for row, found in scored if found.refusal is not None]
    wrong.sort(key=lambda pair: -pair[1].badness)
    ids = sum(found.ids for _, found in scored)
    compared = sum(found.compared for _, found in scored)
    left = f"; {skipped} could not be scored" if skipped else ""
    if unreadable:
        left += f" ({len(unreadable)} of them cannot be read: {', '.join(unreadable[:_WORST])})"
    evidence = {
        "rows": len(scored),
        "skipped": skipped,
        "unreadable": unreadable,
        "noise": noise.largest,
        "wrong": [{"id": row.id, **found.as_dict()} for row, found in wrong],
        "largest": {row.id: found.largest for row, found in scored},
    }
    if not scored:
        findings.add("rescore", "unproven", f"none of {skipped} rows could be scored")
    elif wrong:
        worst = "; ".join(
            f"{row.id}: {found.refusal}{found.describe(tokenizer, row.output_ids)}"
            for row, found in wrong[:_WORST]
        )
        findings.add(
            "rescore",
            "failed",
            f"{len(wrong)} of {len(scored)} rows are not what the model samples{left}. {worst}",
            **evidence,
        )
    else:
        how = (
            f"{compared:,} have the log-probabilities of their generation"
            if compared
            else "all are such as their sampling can choose"
        )
        findings.add(
            "rescore",
            "ok",
            f"{len(scored)} rows scored again: of {ids:,} output ids {how}{left}; asking thrice "
            f"differs by {noise.largest:.3f}",
            **evidence,
        )
