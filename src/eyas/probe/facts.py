"""What rendering alone shows of a template, as findings. No server is asked.

Invariant: what is said here is said the same way by the probe and by ``eyas template``; ids are
named only where the tokenizer is the template's own.
"""

from __future__ import annotations

import re

from eyas.errors import TemplateRefusal
from eyas.findings import Findings, Verdict
from eyas.prompting import TYPESCRIPT
from eyas.tokens import ChatTemplate, Tokenizer
from eyas.tokens.facts import TemplateFacts
from eyas.tokens.switches import Switch

_LOOKS_LIKE_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜\s]{1,40}｜>|\[/?[A-Z_]{3,24}\]|</?[a-z_]{3,20}>"
)
_SHOWN = 6
"""How many switches are named in a line; all are in the evidence."""


def look_at_rendering(
    findings: Findings,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    facts: TemplateFacts,
    *,
    own_tokenizer: bool = True,
) -> None:
    """BOS, control strings, date, switches, roles, what messages may hold, versions.

    Args:
        findings: takes what is seen.
        tokenizer: the template's own, or one that stands in for it.
        template: the template, with the switches that were given.
        facts: what was found of it.
        own_tokenizer: whether it is the template's own.
    """
    _template(findings, facts, own_tokenizer)
    if own_tokenizer:
        _control_strings(findings, tokenizer, template)
    _date(findings, template, facts)
    _switches(findings, template, facts)
    _roles(findings, facts)
    _content(findings, facts)
    _tools(findings, template, facts)
    _finished(findings, tokenizer, facts)
    _versions(findings, facts)
    if own_tokenizer and facts.border_merges:
        findings.add(
            "borders",
            "note",
            "an answer that begins with a line feed, tokenized together with the prompt, takes "
            "an id from it; eyas joins ids and never text",
        )


def _template(findings: Findings, facts: TemplateFacts, own_tokenizer: bool) -> None:
    text = f"template {facts.hash[:12]}"
    if own_tokenizer:
        text += " writes BOS itself" if facts.writes_bos else " writes no BOS"
        if facts.bos_would_double:
            text += ", and the tokenizer alone would add another, which is not done"
    verdict: Verdict = "ok"
    if facts.first_user_refusal is not None:
        verdict = "warning"
        text += f"; it refuses a single user message: {facts.first_user_refusal}"
    findings.add("template", verdict, text, hash=facts.hash, writes_bos=facts.writes_bos)


def _control_strings(findings: Findings, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Whether what looks like a control string in a rendered prompt is one id."""
    user = {"role": "user", "content": "What is 2+2?"}
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


def _date(findings: Findings, template: ChatTemplate, facts: TemplateFacts) -> None:
    name, fixed = facts.date_switch or ("", "")
    if not facts.shows_date and not facts.shows_time:
        if name:
            findings.add(
                "date",
                "note",
                f"the template prints a day of its own, {fixed!r}, unless the switch {name} names "
                "another",
                switch=name,
            )
        return
    what = "the day and the time" if facts.shows_time else "the day"
    at = " at midnight" if facts.shows_time else ""
    findings.add(
        "date",
        "note",
        f"the template prints {what}; every prompt gets {template.date.isoformat()}{at} for the "
        "whole run (--date)" + (f"; the switch {name} goes before it" if name else ""),
        date=template.date.isoformat(),
    )


def _switches(findings: Findings, template: ChatTemplate, facts: TemplateFacts) -> None:
    # Those that change the reasoning are what people look for.
    ordered = sorted(facts.switches, key=lambda s: "reasoning" not in s.effect)
    there = "; ".join(map(switch_text, ordered[:_SHOWN])) or "none"
    if len(ordered) > _SHOWN:
        there += f"; {len(ordered) - _SHOWN} more"
    unknown = template.ignored_kwargs
    ignored = sorted({*unknown, *facts.ignored_kwargs}) if template.kwargs else []
    verdict: Verdict = "ok"
    text = f"switches that do something: {there}"
    if unknown:
        verdict = "warning"
        text = (
            f"the template never reads {', '.join(unknown)}, so giving it changes nothing; {text}"
        )
    elif ignored:
        verdict = "note"
        text = f"{', '.join(ignored)} as given changes nothing (it is the default); {text}"
    findings.add(
        "switches",
        verdict,
        text,
        ignored=ignored,
        switches=[switch._asdict() for switch in facts.switches],
    )


def switch_text(switch: Switch) -> str:
    """``enable_thinking=False: reasoning: open -> closed, the prompt ends '…'``."""
    text = f"{switch.name}={switch.value!r}: {switch.effect}"
    if switch.prompt_end is not None and "reasoning:" in switch.effect:
        text += f", the prompt ends {switch.prompt_end[-60:]!r}"
    return text


def _roles(findings: Findings, facts: TemplateFacts) -> None:
    if facts.first_user_refusal is not None and "kept" not in facts.roles.values():
        return  # why is said already
    odd = {role: what for role, what in facts.roles.items() if what != "kept"}
    texts = [f"{role.replace('_', ' ')}: {what}" for role, what in odd.items()]
    lines = []
    if texts:
        lines.append(f"roles that the template does not keep: {'; '.join(texts)}")
    if facts.alternation:
        lines.append("two user messages in a row are refused")
    if facts.system_place == "merged":
        lines.append("the system message becomes part of the user's first")
    if facts.system_place == "moved":
        lines.append("the system message stands before the last user message, so it moves")
    if facts.takes.empty_system and facts.roles["system"] == "kept":
        lines.append("an empty system message makes another prompt than none")
    good = "system (also later), developer and tool messages are kept"
    findings.add(
        "roles",
        "note" if texts or facts.alternation or facts.system_place == "moved" else "ok",
        "; ".join(lines if texts else [good, *lines]),
        roles=facts.roles,
        alternation=facts.alternation,
        system_place=facts.system_place,
    )


_PARTS = {
    "printed": "is printed as Python writes lists",
    "dropped": "is dropped without a word",
}


def _content(findings: Findings, facts: TemplateFacts) -> None:
    takes = facts.takes
    texts = []
    if takes.only_parts:
        texts.append("content is taken only as a list of parts; as text it is refused or lost")
    elif takes.parts != "kept":
        texts.append(
            f"content given as a list of parts {_PARTS.get(takes.parts, 'is ' + takes.parts)} "
            "(eyas gives it as text)"
        )
    if takes.trims_user:
        texts.append("white space at the ends of the user's text is cut")
    if takes.user_markers:
        texts.append("thinking markers in the user's own text are changed")
    if facts.first_user_refusal is not None:
        texts = []
    if texts:
        findings.add("content", "warning" if takes.only_parts else "note", "; ".join(texts))


def _tools(findings: Findings, template: ChatTemplate, facts: TemplateFacts) -> None:
    if facts.first_user_refusal is not None and facts.takes.calls != "kept":
        return
    texts = tool_texts(facts)
    if TYPESCRIPT in template.reads and not template.by_function:
        texts.insert(
            0,
            "a list of tools is written as TypeScript by the model's own tokenizer code, and as "
            "JSON by the template alone; a capture writes it as that code does",
        )
    findings.add(
        "tools",
        "note" if texts else "ok",
        "; ".join(texts) or "tools, calls (arguments as object or JSON text) and results are kept",
        takes=facts.takes.as_dict(),
    )


def tool_texts(facts: TemplateFacts) -> list[str]:
    """What is to be known of a template's tools, a sentence each."""
    takes = facts.takes
    if takes.tools == takes.calls == "dropped":
        return ["the template knows no tools: a list of them and calls are dropped without a word"]
    texts = []
    if takes.tools == "dropped":
        texts.append("a list of tools is dropped without a word")
    elif takes.tools != "kept":
        texts.append(f"a list of tools is {takes.tools}")
    if takes.calls == "dropped":
        return [*texts, "calls in earlier answers are dropped without a word"]
    if takes.calls != "kept":
        return [*texts, f"a call in an earlier answer is {takes.calls}"]
    if takes.arguments != "kept":
        texts.append(f"a call's arguments must be JSON text; an object is {takes.arguments}")
    elif takes.arguments_as_text == "encoded twice":
        texts.append("a call's arguments must be an object; JSON text is encoded twice")
    elif takes.arguments_as_text != "kept":
        texts.append(
            f"a call's arguments must be an object; JSON text is {takes.arguments_as_text}"
        )
    if takes.call_ids is not None:
        texts.append(f"ids of calls are not free: {takes.call_ids}")
    if takes.null_content != "kept":
        texts.append(f"a call without content is {takes.null_content}")
    if takes.call_reasoning == "dropped":
        texts.append("the reasoning before a call is dropped once a new question follows")
    if takes.calls_append_only is False:
        texts.append("the prompt of a new question does not begin with that of the call's result")
    if facts.append_only and facts.append_only_with_tools is False:
        texts.append("with a list of tools the next prompt does not begin with the earlier one")
    return texts


def _finished(findings: Findings, tokenizer: Tokenizer, facts: TemplateFacts) -> None:
    """What a conversation loses that is rendered as training data would be."""
    texts = []
    if facts.last_turn_reasoning == "dropped" and facts.reasoning in ("open", "generated"):
        texts.append(
            "a finished conversation is rendered without its last answer's reasoning, so there "
            "is nothing to train on in text made with this template (a run's ids hold it)"
        )
    inline = facts.takes.inline
    if inline == "kept" and facts.reasoning == "open":
        texts.append("reasoning left inside an answer's content stays there, behind another opener")
    elif inline == "stripped":
        texts.append("reasoning left inside an earlier answer's content is cut out")
    elif inline.startswith("refused"):
        texts.append(f"reasoning left inside an answer's content is {inline}")
    texts += _spans(tokenizer, facts)
    if texts:
        findings.add("finished", "note", "; ".join(texts), spans=list(facts.takes.spans))


def _spans(tokenizer: Tokenizer, facts: TemplateFacts) -> list[str]:
    """What the template's own training mask would get wrong."""
    if not facts.takes.spans:
        return []
    span, opened = facts.takes.spans[0], facts.reasoning == "open"
    end = tokenizer.decode(facts.turn_end_ids)
    texts = []
    if opened and facts.opener_ids and tokenizer.decode(facts.opener_ids).strip() in span:
        texts.append("its {% generation %} mask covers the opener, which the prompt writes")
    if end and end not in span:
        texts.append("its {% generation %} mask leaves out the end of the answer")
    return texts


def _versions(findings: Findings, facts: TemplateFacts) -> None:
    takes = facts.takes
    texts = []
    if takes.calls == "kept" and takes.null_content_4 != takes.null_content:
        printed = takes.null_content_4 == "printed"
        what = "is printed as None" if printed else f"is {takes.null_content_4}"
        texts.append(f"a call whose content is null {what}")
    if takes.reasoning_names_4:
        texts.append("reasoning_content is not shown under the names that it reads")
    if texts:
        findings.add(
            "versions",
            "note",
            f"a server with transformers 4 renders otherwise: {'; '.join(texts)} (eyas renders "
            "as transformers 5)",
        )
