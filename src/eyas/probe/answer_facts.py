"""How a template begins, keeps and ends answers, as findings. No server is asked.

Invariant: that of `eyas.probe.facts`.
"""

from __future__ import annotations

from eyas.findings import Findings, Verdict
from eyas.tokens import Profile, Tokenizer
from eyas.tokens.facts import TemplateFacts


def look_at_class(
    findings: Findings, profile: Profile, facts: TemplateFacts, *, own_tokenizer: bool = True
) -> None:
    """How the reasoning begins, as far as rendering shows it."""
    end = (facts.prompt_end or "")[-60:]
    opener = profile.opener.text if profile.opener is not None else ""
    verdict: Verdict = "ok"
    unseen = facts.prompt_end is None and facts.first_user_refusal is None
    if unseen:
        verdict, text = "unproven", "the user's text is not in the prompt, so nothing can be seen"
    elif facts.reasoning == "open":
        text = f"the prompt opens the reasoning: it ends {end!r}"
        if facts.opener_tail:
            text += (
                f"; {facts.opener_tail!r} follows the opener, which is so not the last of the ids"
            )
        if own_tokenizer and len(facts.opener_ids) > 1:
            text += f"; the opener is several ids, {list(facts.opener_ids)}"
    elif facts.reasoning == "closed":
        text = f"the prompt closes the reasoning at once: it ends {end!r}"
    elif facts.reasoning == "generated" and facts.markers == "template":
        what = f"writes the opener {opener!r} itself" if opener else "reasons, without markers"
        text = f"the model {what}; the prompt ends {end!r}"
    elif facts.reasoning == "generated":
        text = f"the template knows no reasoning; the vocabulary has {opener!r}, so the model may"
    elif facts.reasoning == "none" and facts.prompt_end is not None:
        text = f"no reasoning; the prompt ends {end!r}"
    else:
        verdict, text = "unproven", "a single question is not rendered, so nothing can be seen"
    findings.add(
        "reasoning",
        verdict,
        text,
        reasoning=facts.reasoning,
        markers=facts.markers,
        opener=opener or None,
        opener_ids=list(facts.opener_ids) if own_tokenizer else None,
    )


def look_at_history(findings: Findings, facts: TemplateFacts) -> None:
    """Whether the next prompt begins with the earlier prompt and answer."""
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
        "append_only_without_reasoning": facts.append_only_without_reasoning,
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
    if facts.append_only_with:
        switch = f" (it would with {facts.append_only_with})"
    elif facts.append_only_without_reasoning:
        switch = f" (it would with {facts.append_only_without_reasoning}, without reasoning)"
    else:
        switch = ""
    joint = ", but writes earlier turns otherwise" if facts.earlier_reasoning == "none" else ""
    where = f"; {facts.first_difference}" if facts.first_difference else ""
    findings.add(
        "history",
        "note",
        f"the template {kept}{joint}, so the next prompt does not begin with the earlier prompt "
        f"and output{switch}{where}; each turn is a row of its own",
        **evidence,
    )


def look_at_end(findings: Findings, tokenizer: Tokenizer, facts: TemplateFacts) -> None:
    """How history writes the end of an answer, beside how it is generated."""
    if not facts.turn_end_ids:
        return
    written = tokenizer.decode(facts.turn_end_ids)
    texts = end_texts(tokenizer, facts)
    if not facts.ends_differently:
        texts.insert(0, f"history ends an answer with {written!r}")
    odd = facts.ends_differently or facts.stop_is_role_marker
    findings.add("stop", "note" if odd else "ok", "; ".join(texts))


def end_texts(tokenizer: Tokenizer, facts: TemplateFacts) -> list[str]:
    """What is unusual about the end of an answer in history."""
    texts = []
    if facts.stop_is_role_marker:
        texts.append("a stop id begins the next turn as well: the next prompt has it once")
    if facts.ends_differently and facts.turn_end_ids:
        written = ", ".join(tokenizer.name(i) for i in facts.turn_end_ids[:1])
        texts.append(f"history ends answers with {written}, which is not how they are generated")
    return texts
