"""No hand in between: every account that the engine gives of an answer, against the ids.

Invariant: an account that is missing proves nothing and is said to be missing; one that an
engine of this version gives, and that does not arrive, tells of something between.
"""

from __future__ import annotations

from eyas.engines.known_faults import parse_version
from eyas.findings import Findings
from eyas.probe.question import Answers
from eyas.target import Target

_ECHO_SINCE = (0, 5, 13, 0)
"""SGLang's first version with ``return_prompt_token_ids``."""


def look_at_accounts(target: Target, findings: Findings, answers: Answers) -> None:
    """Counts, log-probability ids, echo and text. Contradictions were refused by the checks."""
    generation = answers.greedy.generation
    told = {
        "counts": generation.completion_tokens is not None,
        "the echo of the prompt ids": generation.prompt_echo is not None,
        "the ids of the log-probabilities": generation.logprob_ids is not None,
        "the text": generation.text is not None,
        "the id it stopped at": type(generation.matched) is int,
    }
    given = [name for name, there in told.items() if there]
    missing = [name for name, there in told.items() if not there]
    lacks = f"; it does not give {', '.join(missing)}" if missing else ""
    findings.add(
        "accounts",
        "ok" if answers.greedy.good else "failed",
        f"the output ids agree with what else the server says: {', '.join(given)}{lacks}"
        if answers.greedy.good
        else f"the server contradicts itself ({answers.greedy.verdict.refusal})",
        given=given,
        missing=missing,
    )
    _prepended(target, findings, answers)
    if generation.renamed:
        findings.add(
            "between",
            "note",
            "the answer carries another request id than it was sent under: something between (a "
            "router or proxy) writes requests anew",
        )
    _dropped(target, findings, answers)


def _prepended(target: Target, findings: Findings, answers: Answers) -> None:
    """Ids of the prompt before those of the output, with counts and text that fit."""
    for answer in (answers.greedy, answers.again, answers.sampled, answers.as_captured):
        if answer is None or not answer.good:
            continue
        prompt, output = answer.prompt_ids, answer.generation.output_ids
        width = next(
            (n for n in range(min(8, len(prompt), len(output)), 1, -1)
             if output[:n] == prompt[-n:]), 0,
        )  # fmt: skip
        opener = target.profile.opener
        twice = (
            opener is not None
            and opener.single is not None
            and target.profile.open_position(target.tokenizer, prompt) is not None
            and opener.single in output
        )
        if width or twice:
            what = (
                f"the output begins with the prompt's last {width} ids"
                if width
                else f"the prompt opened the reasoning, and {opener and opener.text!r} stands in "
                "the output again"
            )
            findings.add(
                "prompt_in_output",
                "warning",
                f"{what}: {output[:8]}. SGLang 0.5.1 to 0.5.4.post2 puts prompt ids there; if the "
                "model did not write them, every row is wrong",
                output_ids=output[:16],
            )
            return


def _dropped(target: Target, findings: Findings, answers: Answers) -> None:
    """Fields that SGLang itself would have answered."""
    if target.info.engine != "sglang":
        return
    generation = answers.greedy.generation
    version = parse_version(target.info.version)
    dropped = []
    if generation.prompt_echo is None and version is not None and version >= _ECHO_SINCE:
        dropped.append("return_prompt_token_ids")
    if generation.logprob_ids is None and version is not None:
        dropped.append("return_logprob")
    if dropped:
        findings.add(
            "between",
            "warning",
            f"SGLang {target.info.version} answers {', '.join(dropped)}, and here nothing came: a "
            "router or proxy stands between and drops what it does not know. What it drops cannot "
            "be proven; give the server's own address if you can.",
            dropped=dropped,
        )
    elif generation.prompt_echo is None and version is None:
        findings.add(
            "between",
            "note",
            "there is no echo of the prompt ids: SGLang gives it from 0.5.13 on, so this is an "
            "older one or a router that drops the field",
        )
