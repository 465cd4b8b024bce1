"""What the template does, how the reasoning stands and how the answer stops.

Invariant: what rendering shows and what generating shows are set beside each other; facts are
kept under the template's hash, since families change from revision to revision.
"""

from __future__ import annotations

import dataclasses
import re

from eyas.errors import TemplateRefusal
from eyas.findings import Findings, Verdict
from eyas.probe.question import QUESTION, Answers
from eyas.target import Target
from eyas.tokens.facts import TemplateFacts


def look_at_template(target: Target, findings: Findings, facts: TemplateFacts) -> None:
    """BOS, date, switches, roles: all by rendering."""
    assert target.template is not None
    bos = "writes BOS itself" if facts.writes_bos else "writes no BOS"
    more = ", and the tokenizer alone would add another, which is not done" if (
        facts.bos_would_double) else ""  # fmt: skip
    findings.add(
        "template",
        "ok",
        f"template {facts.hash[:12]} {bos}{more}",
        hash=facts.hash,
        writes_bos=facts.writes_bos,
    )
    _control_strings(target, findings)
    if facts.shows_date:
        findings.add(
            "date",
            "note",
            f"the template prints the day; every prompt gets {target.template.date.isoformat()} "
            "for the whole run (--date)",
            date=target.template.date.isoformat(),
        )
    _switches(target, findings, facts)
    _roles(findings, facts)


_LOOKS_LIKE_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜\s]{1,40}｜>|\[/?[A-Z_]{3,24}\]|</?[a-z_]{3,20}>"
)


def _control_strings(target: Target, findings: Findings) -> None:
    """Whether what looks like a control string in a rendered prompt is one id."""
    template, tokenizer = target.template, target.tokenizer
    assert template is not None
    user = {"role": "user", "content": QUESTION}
    try:
        text = template.render([user, {"role": "assistant", "content": "4"}, user])
    except TemplateRefusal:
        return  # what it refuses is said elsewhere
    found = sorted(set(_LOOKS_LIKE_CONTROL.findall(text)))
    several = {s: ids for s in found if len(ids := tokenizer.encode(s)) > 1}
    if several:
        shown = ", ".join(f"{s!r} {ids}" for s, ids in several.items())
        findings.add(
            "control_strings",
            "warning",
            f"the template writes what looks like control strings and is several ids for this "
            f"tokenizer: {shown}. Some models are made so; else template and tokenizer do not "
            "belong together",
            several=several,
        )
    else:
        findings.add(
            "control_strings",
            "ok",
            f"{len(found)} control strings in a rendered prompt are one id each",
            strings=found,
        )


def _switches(target: Target, findings: Findings, facts: TemplateFacts) -> None:
    effects = [f"{s.name}={s.value!r}: {s.effect}" for s in facts.switches]
    there = "; ".join(effects[:6]) or "none"
    if target.template is not None and target.template.kwargs:
        ignored = sorted({*target.template.ignored_kwargs, *facts.ignored_kwargs})
        unknown = target.template.ignored_kwargs
        if unknown:
            findings.add(
                "switches",
                "warning",
                f"the template never reads {', '.join(unknown)}, so giving it changes nothing; "
                f"switches that do something: {there}",
                ignored=ignored,
                switches=[s._asdict() for s in facts.switches],
            )
            return
        if ignored:
            findings.add(
                "switches",
                "note",
                f"{', '.join(ignored)} as given changes nothing (it is the default); switches that "
                f"do something: {there}",
                ignored=ignored,
                switches=[s._asdict() for s in facts.switches],
            )
            return
    findings.add(
        "switches",
        "ok",
        f"switches that do something: {there}",
        switches=[s._asdict() for s in facts.switches],
    )


def _roles(findings: Findings, facts: TemplateFacts) -> None:
    odd = {role: what for role, what in facts.roles.items() if what != "kept"}
    texts = [f"{role.replace('_', ' ')}: {what}" for role, what in odd.items()]
    if facts.alternation:
        texts.append("two user messages in a row: refused")
    findings.add(
        "roles",
        "note" if texts else "ok",
        f"roles that the template does not keep: {'; '.join(texts)}"
        if texts
        else "system (also later), developer and tool messages are kept",
        roles=facts.roles,
        alternation=facts.alternation,
    )


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
        _history(findings, facts)


def _history(findings: Findings, facts: TemplateFacts) -> None:
    if facts.append_only is None:
        findings.add("history", "unproven", "the template renders no conversation of two turns")
        return
    kept = {
        "kept": "keeps earlier reasoning",
        "stripped": "strips earlier reasoning",
        "rewritten": "writes earlier reasoning in another way",
        "none": "knows no reasoning",
    }.get(facts.earlier_reasoning, "hides what becomes of earlier reasoning")
    evidence = {
        "append_only": facts.append_only,
        "append_only_with": facts.append_only_with,
        "earlier_reasoning": facts.earlier_reasoning,
        "first_difference": facts.first_difference,
    }
    if facts.append_only:
        findings.add(
            "history",
            "ok",
            f"the template {kept}; the next prompt begins with the earlier prompt and output",
            **evidence,
        )
        return
    switch = f" (it would with {facts.append_only_with})" if facts.append_only_with else ""
    findings.add(
        "history",
        "note",
        f"the template {kept}, so the next prompt does not begin with the earlier prompt and "
        f"output{switch}; each turn is a row of its own",
        **evidence,
    )


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
    if facts is not None and facts.stop_is_role_marker:
        texts.append("a stop id begins the next turn as well: the next prompt has it once")
    if facts is not None and facts.ends_differently and facts.turn_end_ids:
        written = ", ".join(tokenizer.name(i) for i in facts.turn_end_ids[:1])
        texts.append(f"history ends answers with {written}, which is not how they are generated")
    findings.add("stop", verdict, "; ".join(texts), **evidence)
