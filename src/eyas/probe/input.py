"""What in the input a capture would treat in a way of its own: control strings, tools.

Invariant: a bounded look, and it says how far it went; nothing is sent for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice
from typing import NamedTuple

from eyas.conversation import BadLine, Conversation
from eyas.findings import Findings
from eyas.ids import first_difference
from eyas.probe.calls import look_at_calls
from eyas.prompting import Chat, Prompting, Refusal
from eyas.readers import PromptReader
from eyas.target import Target
from eyas.tokens.control_text import POLICIES, control_strings

ROWS, SECONDS = 10_000, 2.0
"""How far the input is looked through: so many rows, or so long."""

_AROUND = 2


class Held(NamedTuple):
    """Control strings in a stretch of the input."""

    rows: int
    """Rows that were looked at."""
    touched: int
    """Rows whose text holds a control string."""
    strings: Counter[str]
    """Each string and how many rows hold it."""
    first: Conversation | None
    """The first such row."""
    with_tools: int
    """Rows with tools, or with recorded results of tools."""


def look_at_input(target: Target, findings: Findings, prompts: PromptReader) -> None:
    """How many rows hold control strings, and what each policy would do to one of them; how calls of
    tools are read, where rows have tools."""
    if target.template is None:
        return
    if not prompts.rereadable:
        findings.add(
            "control_text",
            "note",
            "the prompts come through a pipe, so they were not looked through beforehand; "
            f"--control-text is {target.config.control_text}",
        )
        return
    held = find_control_text(target, prompts)
    of = f"of the first {held.rows:,} rows"
    if held.with_tools:
        form = Prompting(target.tokenizer, target.modes, target.profile).tool_form
        if form is not None:
            look_at_calls(findings, form, f"{held.with_tools:,} {of} have tools")
    policy = target.config.control_text
    if held.first is None:
        findings.add("control_text", "ok", f"none {of} holds control strings in its text")
        return
    shown = ", ".join(f"{string!r} {count:,}" for string, count in held.strings.most_common(4))
    made = {name: _prompt(target, held.first, name) for name in POLICIES}
    first = held.first
    where = f"{first.source}:{first.line}" if first.line else first.source
    findings.add(
        "control_text",
        "note" if policy == "allow" else "ok",
        f"{held.touched:,} {of} hold control strings in their text ({shown}); --control-text is "
        f"{policy}. {where} {_shown(target, made)}",
        rows=held.rows,
        touched=held.touched,
        strings=dict(held.strings),
        example={
            name: prompt.detail if isinstance(prompt, Refusal) else prompt
            for name, prompt in made.items()
        },
    )


def find_control_text(
    target: Target, items: Iterable[Conversation | BadLine], *, rows: int = ROWS,
    seconds: float = SECONDS,
) -> Held:  # fmt: skip
    """Look through the beginning of an input."""
    seen = touched = with_tools = 0
    strings: Counter[str] = Counter()
    first: Conversation | None = None
    deadline = time.monotonic() + seconds
    for item in islice(items, rows):
        seen += 1
        if isinstance(item, Conversation) and item.prompt_ids is None:
            use = item.tool_use
            with_tools += use is not None
            results = () if use is None else chain.from_iterable(use.results.values())
            brought = [None if use is None else use.tools, *(r.content for r in results)]
            found = control_strings(target.tokenizer, [*item.turns, *brought])
            if found:
                touched += 1
                strings.update(set(found))
                first = first or item
        if time.monotonic() > deadline:
            break
    return Held(seen, touched, strings, first, with_tools)


def _prompt(target: Target, item: Conversation, policy: str) -> list[int] | Refusal:
    """The prompt of the first turn that holds a control string, all before it without answers."""
    prompting = Prompting(target.tokenizer, target.modes, target.profile, control_text=policy)
    tools = None if item.tool_use is None else item.tool_use.tools
    turn = next((turn for turn in item.turns if control_strings(target.tokenizer, turn)), None)
    prompt = prompting.prompt(Chat(item.turns[0] if turn is None else turn, tools))
    return prompt if isinstance(prompt, Refusal) else list(prompt.ids)


def _shown(target: Target, prompts: dict[str, list[int] | Refusal]) -> str:
    """What becomes of the first control string, by policy."""
    allowed, escaped = prompts["allow"], prompts["escape"]
    if isinstance(allowed, Refusal):
        return f"is refused by the template: {allowed.detail}"
    name = target.tokenizer.name
    if isinstance(escaped, Refusal):
        return f"would keep its control ids under allow and be rejected under escape and refuse ({escaped.detail})"
    at = first_difference(allowed, escaped)
    if at >= min(len(allowed), len(escaped)):
        return "has the same ids under allow and escape: the template does not show that text"
    back = 0
    while back < min(len(allowed), len(escaped)) - at and allowed[-1 - back] == escaped[-1 - back]:
        back += 1
    was, now = allowed[at : len(allowed) - back], escaped[at : len(escaped) - back]
    return (
        f"holds {', '.join(map(name, was[:_AROUND])) or 'nothing'} under allow, "
        f"{target.tokenizer.decode(now)[:40]!r} {now[:12]} under escape, and is rejected under "
        "refuse"
    )
