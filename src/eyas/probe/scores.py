"""The captured ids go back as one prompt and are scored: were they really sampled so?

Invariant: the engine's noise is measured first, on the very ids that are judged; where an
engine cannot score, the finding is `unproven`.
"""

from __future__ import annotations

from typing import Any

from eyas.engines import Engine, Sampling, Scores
from eyas.errors import EngineError
from eyas.findings import Findings
from eyas.probe.question import GREEDY, NEUTRAL, Answer, Answers
from eyas.scoring import (
    REPEATS,
    TOP,
    Agreement,
    Noise,
    comparable,
    compare,
    depends_on_ids,
    measure_noise,
)
from eyas.target import Target


async def score_again(target: Target, findings: Findings, answers: Answers) -> None:
    """Score the greedy and the sampled answer, and say whether they are what was sampled."""
    try:
        measured = await measure_noise(
            target.engine, answers.greedy.input_ids, len(answers.greedy.prompt_ids)
        )
    except EngineError as error:
        findings.add("scores", "unproven", f"the captured ids could not be scored: {error}")
        return
    if measured is None:
        findings.add(
            "scores",
            "unproven",
            f"{target.info.engine} gives no log-probabilities of a prompt here, so nobody but "
            "the server vouches for the ids being what the model sampled",
        )
        return
    noise, scores = measured
    if not noise.usable:
        findings.add(
            "scores",
            "unproven",
            f"scoring the same ids {REPEATS} times gave log-probabilities up to "
            f"{noise.largest:.2f} apart; nothing can be proven with such noise",
            noise=noise.largest,
        )
        return
    try:
        real = await depends_on_ids(
            target.engine, answers.greedy.input_ids, len(answers.greedy.prompt_ids), scores
        )
    except EngineError:
        real = None
    if real is False:
        findings.add(
            "scores",
            "failed",
            "with one id exchanged the server gives the same log-probabilities: what it calls "
            "scoring does not look at the ids, so it proves nothing and may hide anything",
        )
        return
    judged = [(answers.greedy, _judge(target.engine, answers.greedy, scores, GREEDY, noise))]
    for answer, sampling in (
        (answers.again, GREEDY),
        (answers.sampled, NEUTRAL),
        (answers.as_captured, target.sampling),
    ):
        if answer is None or not answer.good or answer.input_ids == answers.greedy.input_ids:
            continue
        try:
            more = await target.engine.score(
                answer.input_ids, start=len(answer.prompt_ids), top=TOP
            )
        except EngineError:
            continue
        if more is not None:
            judged.append((answer, _judge(target.engine, answer, more, sampling, noise)))
    _report(target, findings, judged, noise)


def _judge(
    engine: Engine, answer: Answer, scores: Scores, sampling: Sampling, noise: Noise
) -> Agreement:
    generation = answer.generation
    return compare(
        generation.output_ids,
        scores,
        generated=generation.logprobs
        if generation.logprob_ids is not None and comparable(engine, sampling)
        else None,
        sampling=sampling,
        noise=noise,
    )


def _report(
    target: Target, findings: Findings, judged: list[tuple[Answer, Agreement]], noise: Noise
) -> None:
    evidence: dict[str, Any] = {
        "noise": noise.largest,
        "answers": [agreement.as_dict() for _, agreement in judged],
    }
    for answer, agreement in judged:
        if agreement.refusal is not None:
            findings.add(
                "scores",
                "failed",
                f"scored again as one prompt, the answer is not what the model sampled: "
                f"{agreement.refusal}"
                f"{agreement.describe(target.tokenizer, answer.generation.output_ids)}",
                **evidence,
            )
            return
    compared = sum(agreement.compared for _, agreement in judged)
    if not compared:
        ids = sum(agreement.ids for _, agreement in judged)
        findings.add(
            "scores",
            "ok",
            f"scored again as one prompt, all {ids} ids are such as the model would choose there "
            "(the server gave no log-probabilities of their generation to compare with)",
            **evidence,
        )
        return
    largest = max(agreement.largest or 0.0 for _, agreement in judged)
    findings.add(
        "scores",
        "ok",
        f"scored again as one prompt, {compared} ids have the log-probabilities of their "
        f"generation: largest difference {largest:.3f}, where asking thrice differs by "
        f"{noise.largest:.3f}",
        **evidence,
    )
