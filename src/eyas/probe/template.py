"""How the reasoning stands and how the answer stops.

Invariant: what rendering shows and what generating shows are set beside each other; facts are
kept under the template's hash, since families change from revision to revision.
"""

from __future__ import annotations

import dataclasses

from eyas.findings import Findings, Verdict
from eyas.probe.answer_facts import end_texts, look_at_history
from eyas.probe.question import Answers
from eyas.target import Target
from eyas.tokens.facts import TemplateFacts


def look_at_reasoning(
    target: Target, findings: Findings, facts: TemplateFacts | None, answers: Answers
) -> None:
    """Where the opener and the closer stand, as rendered and as generated."""
    profile, tokenizer = target.profile, target.tokenizer
    answer = answers.greedy
    prompt, output = answer.prompt_ids, answer.generation.output_ids
    if not answer.good:
        return
    if profile.opener is None or profile.closer is None:
        findings.add("reasoning", "ok", "neither template nor vocabulary knows thinking markers")
        return
    start, end, _, closers = profile.spans(tokenizer, prompt, output)
    opener, closer = profile.opener, profile.closer
    evidence = {
        "opener": {"text": opener.text, "ids": list(opener.ids)},
        "closer": {"text": closer.text, "ids": list(closer.ids)},
        "reasoning_start": start,
        "reasoning_end": end,
        "prompt_tail": prompt[-8:],
        "closers": closers,
    }
    n = len(prompt)
    opened = profile.open_position(tokenizer, prompt)
    named = f"{opener.text!r} {list(opener.ids)}"
    if opened is not None:
        behind = tokenizer.decode(prompt[opened:])
        where = f"the prompt ends with {named}" + (f" and {behind!r}" if behind else "")
    elif profile.reasoning == "closed":
        where = (
            f"the prompt closes the reasoning at once: it ends {tokenizer.decode(prompt[-4:])!r}"
        )
    elif start is not None:
        where = f"the model writes {named} itself, as output id {start - n - len(opener.ids)}"
    else:
        where = f"the prompt opens no reasoning, and the model wrote no {named}"
    verdict: Verdict = "ok"
    if start is not None and end is not None:
        where += f"; {closer.text!r} {list(closer.ids)} is output id {end - n} of {len(output)}"
    elif start is not None and "truncated" in answer.verdict.marks:
        verdict = "unproven"
        where += f"; {closer.text!r} did not come within {len(output)} ids"
    elif profile.reasoning == "closed" and closers:
        verdict = "warning"
        where += f"; yet {closer.text!r} stands in the output"
    findings.add("reasoning", verdict, where, **evidence)
    if facts is not None:
        look_at_history(findings, facts)


def look_at_stop(
    target: Target, findings: Findings, facts: TemplateFacts | None, answers: Answers
) -> None:
    """Which ids end a turn, and which one did. A new one is learnt for the checks."""
    profile, tokenizer = target.profile, target.tokenizer
    declared = ", ".join(tokenizer.name(i) for i in sorted(profile.declared_stop_ids)) or "none"
    answer = answers.greedy
    stop, matched = answer.verdict.stop_id, answer.generation.matched
    evidence = {
        "declared": sorted(profile.declared_stop_ids),
        "known": sorted(profile.stop_ids),
        "seen": stop,
        "matched": matched,
    }
    verdict: Verdict = "ok"
    texts = [f"stop ids of config and generation config: {declared}"]
    seen = [a for a in (answers.again, answers.sampled, answers.as_captured) if a is not None]
    strange = {
        i
        for a in (answer, *seen)
        if a.good and (i := a.verdict.stop_id) is not None
        if i not in profile.stop_ids and i not in tokenizer.control.values()
    }
    if strange:
        verdict = "failed"
        names = ", ".join(tokenizer.name(i) for i in sorted(strange))
        texts.append(
            f"answers ended with {names}, which is ordinary text and no stop id: the real stop id "
            "was dropped, or the answer was cut and called finished (if such ids do end turns "
            "here, name them with --stop-token-id)"
        )
    elif stop is None:
        if answer.good:
            verdict = "unproven"
            texts.append("the answer was cut before it stopped")
    elif stop in profile.declared_stop_ids:
        texts.append(f"the answer ended with {tokenizer.name(stop)}")
    else:
        verdict = "warning"
        texts.append(
            f"the answer ended with {tokenizer.name(stop)}, which they do not name (such rows are "
            "marked unusual_stop)"
        )
    if stop is not None and stop not in profile.stop_ids and not strange:
        target.profile = dataclasses.replace(profile, stop_ids=profile.stop_ids | {stop})
    if facts is not None:
        texts += end_texts(tokenizer, facts)
    findings.add("stop", verdict, "; ".join(texts), **evidence)
