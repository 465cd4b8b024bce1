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
from eyas.scoring import TOP, Agreement, Noise, compare, noise_of
from eyas.target import Target

_REPEATS = 3


async def measure_noise(
    engine: Engine, input_ids: list[int], start: int
) -> tuple[Noise, Scores] | None:
    """Score the same ids several times; None where the engine cannot score them.

    Raises:
        EngineError: one of its kinds.
    """
    repeated: list[Scores] = []
    for _ in range(_REPEATS):
        scores = await engine.score(input_ids, start=start, top=TOP)
        if scores is None or len(scores.logprobs) != len(input_ids) - start:
            return None
        repeated.append(scores)
    return noise_of(repeated), repeated[0]


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
            f"scoring the same ids {_REPEATS} times gave log-probabilities up to "
            f"{noise.largest:.2f} apart; nothing can be proven with such noise",
            noise=noise.largest,
        )
        return
    judged = [_judge(answers.greedy, scores, GREEDY, noise)]
    sampled = answers.sampled
    if sampled is not None and sampled.good:
        try:
            more = await target.engine.score(
                sampled.input_ids, start=len(sampled.prompt_ids), top=TOP
            )
        except EngineError:
            more = None
        if more is not None:
            judged.append(_judge(sampled, more, NEUTRAL, noise))
    _report(target, findings, judged, noise, [answers.greedy, sampled])


def _judge(answer: Answer, scores: Scores, sampling: Sampling, noise: Noise) -> Agreement:
    generation = answer.generation
    return compare(
        generation.output_ids,
        scores,
        generated=generation.logprobs if generation.logprob_ids is not None else None,
        sampling=sampling,
        noise=noise,
    )


def _report(
    target: Target,
    findings: Findings,
    judged: list[Agreement],
    noise: Noise,
    answers: list[Answer | None],
) -> None:
    evidence: dict[str, Any] = {
        "noise": noise.largest,
        "greedy": judged[0].as_dict(),
        "sampled": judged[1].as_dict() if len(judged) > 1 else None,
    }
    for agreement, answer in zip(judged, answers, strict=False):
        if agreement.refusal is not None and answer is not None:
            findings.add(
                "scores",
                "failed",
                f"scored again as one prompt, the answer is not what the model sampled: "
                f"{agreement.refusal}{describe(target, agreement, answer.generation.output_ids)}",
                **evidence,
            )
            return
    ids = sum(a.ids for a in judged)
    compared = sum(a.compared for a in judged)
    largest = max((a.largest for a in judged if a.largest is not None), default=None)
    if largest is None:
        findings.add(
            "scores",
            "unproven" if not evidence["greedy"]["ids"] else "ok",
            f"scored again as one prompt, all {ids} ids are such as the model would choose there "
            "(the server gave no log-probabilities of their generation to compare with)",
            **evidence,
        )
        return
    findings.add(
        "scores",
        "ok",
        f"scored again as one prompt, {compared} ids have the log-probabilities of their "
        f"generation: largest difference {largest:.3f}, where asking thrice differs by "
        f"{noise.largest:.3f}",
        **evidence,
    )


def describe(target: Target, agreement: Agreement, output_ids: list[int]) -> str:
    """The worst id with its neighbours, as a clause."""
    if not agreement.suspects:
        return ""
    worst, name = agreement.suspects[0], target.tokenizer.name
    before = target.tokenizer.decode(output_ids[max(0, worst.position - 6) : worst.position])
    was = "" if worst.generated is None else f" from {worst.generated:.2f} when it was generated"
    best = worst.likeliest
    instead = "" if best is None else f"; the model would write {name(best[0])} ({best[1]:.2f})"
    return (
        f". Output id {worst.position}, {name(worst.id)} after {before!r}, has log-probability "
        f"{worst.scored:.2f}{was}{instead}"
    )
