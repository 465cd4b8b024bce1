"""Asking the target "What is 2+2?" and judging the answers as a capture would.

Invariant: what is judged are ids that came through the very route, checks and retries of a
capture; a fault that shows in every try fails, one that comes and goes is a warning, since the
checks of the capture refuse such rows one by one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from eyas.checks import Checker, Verdict
from eyas.engines import Generation, Request, Sampling, resampled
from eyas.engines.pool import Pool
from eyas.engines.server import Server
from eyas.errors import EngineError, RowFailed, TemplateRefusal, TransportError
from eyas.findings import Findings
from eyas.ids import first_difference
from eyas.target import Target

QUESTION = "What is 2+2?"
GREEDY = Sampling(temperature=0.0)
NEUTRAL = Sampling()
"""Temperature 1 and no penalties: what scoring can be compared with on every engine."""

_ATTEMPTS = 3
_PATIENCE_S = 600.0
"""Far longer than such an answer takes anywhere."""
_BUDGET, _SHORT_BUDGET = 1024, 256
"""Tokens of an answer: enough to reason about 2+2, and enough to compare scores."""


@dataclass(slots=True)
class Answer:
    """One answer of the target that passed the checks, or the last that did not."""

    prompt_ids: list[int]
    generation: Generation
    verdict: Verdict
    refused: list[Verdict] = field(default_factory=list)
    """The verdicts of the tries before it."""

    @property
    def good(self) -> bool:
        return self.verdict.refusal is None

    @property
    def input_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.generation.output_ids]


@dataclass(slots=True)
class Answers:
    """What the target said to the same question, asked in several ways."""

    messages: list[dict[str, Any]] | None
    """None where there is no template to render them with."""
    greedy: Answer
    """At temperature 0, with log-probabilities."""
    again: Answer | None = None
    """The same once more, without log-probabilities, while others run beside it."""
    sampled: Answer | None = None
    """At temperature 1 without penalties, with log-probabilities."""
    as_captured: Answer | None = None
    """With the capture's own sampling."""


def question_messages(target: Target) -> list[dict[str, Any]]:
    """The question, behind the system message that a capture would put there."""
    system = target.config.system
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": QUESTION}]


def render_question(target: Target) -> tuple[list[dict[str, Any]] | None, list[int]]:
    """The messages (None without a template) and the prompt ids.

    Raises:
        TemplateRefusal: the template cannot render one user message.
    """
    if target.template is None:
        return None, target.tokenizer.encode(QUESTION)
    messages = question_messages(target)
    made = target.template.prompt(messages)
    text = made if isinstance(made, str) else target.tokenizer.decode(made)
    if QUESTION not in text:
        raise TemplateRefusal(
            f"the chat template leaves the user's text out of the prompt: {text[-200:]!r}"
        )
    return messages, target.tokenizer.encode(made) if isinstance(made, str) else made


async def ask(target: Target, findings: Findings) -> Answers | None:
    """Ask in all ways; None where no answer could be had at all."""
    try:
        messages, prompt_ids = render_question(target)
    except TemplateRefusal as refusal:
        findings.add("question", "failed", f"{QUESTION!r} cannot be rendered: {refusal}")
        return None
    logprobs = True
    try:
        try:
            greedy = await answer_to(target, GREEDY, prompt_ids, _BUDGET, logprobs=True)
        except RowFailed as refused:
            if target.config.logprobs:
                raise
            logprobs = False  # captures do not ask for them
            greedy = await answer_to(target, GREEDY, prompt_ids, _BUDGET, logprobs=False)
            findings.add("logprobs", "note", f"the server gives no log-probabilities: {refused}")
    except EngineError as error:
        findings.add(
            "question",
            "failed",
            f"the server did not answer {QUESTION!r} ({len(prompt_ids)} prompt ids): {error}",
            prompt_ids=prompt_ids,
        )
        return None
    answers = Answers(messages, greedy)
    _report_answer(findings, greedy)
    if not greedy.good:
        return answers
    own = target.sampling
    ways = [
        answer_to(target, GREEDY, prompt_ids, _BUDGET, logprobs=False),
        answer_to(target, NEUTRAL, prompt_ids, _SHORT_BUDGET, logprobs=logprobs, seed=1),
        answer_to(target, own, prompt_ids, _SHORT_BUDGET, logprobs=target.config.logprobs, seed=2),
    ]
    results = await asyncio.gather(*ways, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    again, sampled, as_captured = (r if isinstance(r, Answer) else None for r in results)
    answers.again, answers.sampled, answers.as_captured = again, sampled, as_captured
    _report_again(findings, greedy, results[0])
    _report_sampling(findings, target, results[2])
    return answers


async def answer_to(
    target: Target,
    sampling: Sampling,
    prompt_ids: list[int],
    budget: int = _BUDGET,
    *,
    logprobs: bool,
    seed: int = 0,
) -> Answer:
    """One answer, asked for again while the checks refuse it.

    Raises:
        EngineError: no answer could be had.
    """
    config = target.config
    whole = config.max_new_tokens
    if target.context_length is not None:
        whole = max(1, min(whole, target.context_length - len(prompt_ids)))
    budget = min(budget, whole)
    stops = target.sampling.stop_token_ids
    sampling = Sampling(**{**sampling.as_dict(), "stop_token_ids": stops})
    pool = Pool(
        [Server(resampled(target.engine, sampling), target.info)],
        tries=config.tries,
        give_up_after_s=config.give_up_after,
    )
    checker = Checker(
        target.tokenizer,
        target.profile,
        keep_missing_closer=config.on_missing_closer == "keep",
        want_logprobs=logprobs and config.logprobs,
    )
    request = Request(prompt_ids, budget, seed, logprobs)
    refused: list[Verdict] = []
    while True:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                generation = await pool.generate(request)
        except TimeoutError:
            raise TransportError(f"no answer came within {_PATIENCE_S:.0f} s") from None
        finally:
            pool.end_watches()
        verdict = checker.judge(prompt_ids, generation, request.max_new_tokens)
        if verdict.refusal == "budget" and request.max_new_tokens < whole:
            # The probe's budget is shorter than the capture's, which is what has to be kept.
            request = replace(request, max_new_tokens=whole)
            continue
        if verdict.refusal is None or len(refused) + 1 >= _ATTEMPTS:
            return Answer(prompt_ids, generation, verdict, refused)
        refused.append(verdict)


def _report_answer(findings: Findings, answer: Answer) -> None:
    """Whether the answer would be stored, in the words of the checks."""
    generation = answer.generation
    seen = {
        "prompt_ids": answer.prompt_ids,
        "output_ids": generation.output_ids,
        "finish_reason": generation.finish_reason,
        "marks": answer.verdict.marks,
    }
    if not answer.good:
        findings.add(
            "question",
            "failed",
            f"the answer to {QUESTION!r} would be refused each time ({answer.verdict.refusal}): "
            f"{answer.verdict.detail}",
            check=answer.verdict.refusal,
            **seen,
        )
        return
    if answer.refused:
        first = answer.refused[0]
        findings.add(
            "question",
            "warning",
            f"{len(answer.refused)} of {len(answer.refused) + 1} answers to {QUESTION!r} would be "
            f"refused ({first.refusal}): {first.detail}. A capture refuses such rows one by one; "
            "find out what comes and goes there before it costs GPU time.",
            check=first.refusal,
            **seen,
        )
        return
    n, m = len(answer.prompt_ids), len(generation.output_ids)
    how = "ended by itself" if answer.verdict.complete else f"was cut at its budget of {m}"
    marks = f", marked {', '.join(answer.verdict.marks)}" if answer.verdict.marks else ""
    findings.add(
        "question",
        "ok",
        f"{QUESTION!r} at temperature 0: {n} prompt ids, {m} output ids; it {how} and passes "
        f"every check{marks}",
        **seen,
    )


def _report_sampling(
    findings: Findings, target: Target, result: Answer | BaseException | None
) -> None:
    said = {k: v for k, v in target.sampling.as_dict().items() if v not in ([], None)}
    shown = ", ".join(f"{name} {value}" for name, value in said.items())
    if isinstance(result, BaseException):
        findings.add(
            "sampling",
            "failed",
            f"the server does not answer the capture's own sampling ({shown}): {result}",
            sampling=said,
        )
    elif isinstance(result, Answer) and not result.good:
        findings.add(
            "sampling",
            "failed",
            f"with the capture's own sampling ({shown}) the answer would be refused each time "
            f"({result.verdict.refusal}): {result.verdict.detail}",
            sampling=said,
            check=result.verdict.refusal,
            output_ids=result.generation.output_ids,
        )
    else:
        findings.add(
            "sampling", "ok", f"the capture's own sampling is taken: {shown}", sampling=said
        )


def _report_again(findings: Findings, greedy: Answer, result: Answer | BaseException) -> None:
    """The second answer at temperature 0, asked for without log-probabilities as captures do."""
    if isinstance(result, BaseException):
        findings.add("again", "failed", f"asked once more, the server did not answer: {result}")
        return
    if not result.good:
        findings.add(
            "again",
            "failed",
            "asked once more without log-probabilities, as a capture asks, the answer would be "
            f"refused each time ({result.verdict.refusal}): {result.verdict.detail}",
            check=result.verdict.refusal,
            output_ids=result.generation.output_ids,
        )
        return
    ids, other = greedy.generation.output_ids, result.generation.output_ids
    if ids == other:
        text = f"asked twice at temperature 0, the same {len(ids)} ids came"
        findings.add("again", "ok", text, equal=True)
        return
    at = first_difference(ids, other)
    findings.add(
        "again",
        "note",
        f"asked twice at temperature 0, the answers part at output id {at} of {len(ids)}: the "
        "engine is not deterministic when requests run beside each other, as most are not",
        equal=False,
        at=at,
        first=ids,
        second=other,
    )
