"""The markers of a target: the texts that begin and end its reasoning, and those around content.

Invariant: a marker is named only if the template, its rendering or the vocabulary shows it. No
model's name is looked at.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from eyas.errors import TemplateRefusal
from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.tokenizer import Tokenizer

_OPENERS = re.compile(
    r"<\|channel\|>analysis<\|message\|>"
    r"|<\|channel>thought"
    r"|<\|open\|>think<\|sep\|>"
    r"|<\|?(?:[\w-]+[:_])?(?:think(?:ing)?|thought|reasoning)(?::[\w-]+)?\|?>"
    r"|\[(?:THINK|REASONING)\]"
    r"|<\|START_THINKING\|>|<\|inner_prefix\|>"
)
"""Shapes of openers in templates and vocabularies; which one counts is seen by rendering."""

_CLOSERS = {
    "<|channel|>analysis<|message|>": "<|end|>",
    "<|channel>thought": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
}
"""Closers that are more than the opener with a slash."""

_USER, _REASONING, _ANSWER, _AGAIN = "qzuser", "qzreasoning", "qzanswer", "qzagain"


class Marker(NamedTuple):
    """A reasoning marker: its text, and its ids when it stands alone."""

    text: str
    ids: tuple[int, ...]

    @property
    def single(self) -> int | None:
        return self.ids[0] if len(self.ids) == 1 else None


def find_markers(
    tokenizer: Tokenizer, template: ChatTemplate | None, prompt: str
) -> tuple[Marker | None, Marker | None, str]:
    """The opener and closer, and what the generation prompt does with them.

    An opener that the rendered prompt holds goes before one that only an answer's rendering or
    the template's text holds, and that before one that is merely an added token of the
    vocabulary.
    """
    source = template.source if template is not None else ""
    answered = _render(template, answered=True)
    candidates: dict[str, None] = {}
    for text in (prompt, answered, source, " ".join(tokenizer.control)):
        # Some templates name only the closer (DeepSeek-R1 splits answers at it).
        for match in _OPENERS.findall(text.replace("</", "<")):
            candidates[match] = None
    best: tuple[str, str] | None = None
    for text in candidates:
        closer = closer_of(text)
        shown = any(closer in where for where in (source, prompt, answered, tokenizer.control))
        if text in prompt[-80:] and (shown or prompt_state(prompt, text, closer) == "open"):
            best = text, closer
            break
        if shown:
            best = best or (text, closer)
    best = best or _written_around(tokenizer, template, answered)
    if best is None:
        return None, None, "none"
    first, last = (Marker(text, tuple(tokenizer.encode(text))) for text in best)
    return first, last, prompt_state(prompt, first.text, last.text)


def find_frame(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    reasoning: tuple[Marker | None, Marker | None],
    stop_ids: frozenset[int],
) -> tuple[tuple[Marker, ...], Marker | None]:
    """What a model writes around an answer's content besides its reasoning, as history shows it.

    gpt-oss begins the content with ``<|start|>assistant<|channel|>final<|message|>`` (behind its
    reasoning) or ``<|channel|>final<|message|>``, Command-A puts it between ``<|START_RESPONSE|>``
    and ``<|END_RESPONSE|>``. Only what holds a control string counts, and nothing that ends the
    turn. Returns what may stand before the content, the longest first, and what stands behind it.
    """
    control = tokenizer.control_pattern
    if control is None:
        return (), None
    header = _render(template, answered=False).rpartition(_USER)[2]
    openers: dict[str, None] = {}
    last: str | None = None
    for reasons, again in ((True, False), (True, True), (False, False), (False, True)):
        text = _render(template, answered=True, reasons=reasons, again=again)
        before, found, after = text.partition(_USER)[2].partition(_ANSWER)
        if not found:
            continue
        opener = _before_content(before, header, reasoning[1], control)
        markers = [marker.text for marker in reasoning if marker is not None]
        if control.search(opener) and not any(text in opener for text in markers):
            openers[opener.strip()] = None
        if again and last is None:
            last = _before_stop(after, tokenizer, stop_ids)
    known = sorted(openers, key=len, reverse=True)
    made = tuple(Marker(text, tuple(tokenizer.encode(text))) for text in known)
    return made, Marker(last, tuple(tokenizer.encode(last))) if last else None


def _before_content(
    before: str, header: str, closer: Marker | None, control: re.Pattern[str]
) -> str:
    """What stands between an answer's reasoning, or else its header, and its content."""
    if _REASONING in before:
        behind = before.rpartition(_REASONING)[2]
        return behind.partition(closer.text)[2] if closer is not None else ""
    pairs = zip(before, header, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(before), len(header)))
    # Control strings stay whole.
    at = next((m.start() for m in control.finditer(before) if m.start() < at < m.end()), at)
    written = control.findall(header)
    return "" if any(text in written for text in control.findall(before[at:])) else before[at:]


def _before_stop(text: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> str:
    """The control strings before the first stop id; "" where there are none or it never comes."""
    assert tokenizer.control_pattern is not None
    for found in tokenizer.control_pattern.finditer(text.partition(_AGAIN)[0]):
        if tokenizer.control[found.group()] in stop_ids:
            before = text[: found.start()]
            return before.strip() if tokenizer.control_pattern.search(before) else ""
    return ""


def prompt_state(prompt: str, opener: str, closer: str) -> str:
    """Whether a prompt ends inside the reasoning (``open``), behind it (``closed``) or neither
    (``none``). Whitespace behind the marker does not count."""
    tail = prompt.rstrip()
    if tail.endswith(opener.rstrip()):
        return "open"
    return "closed" if tail.endswith(closer) else "none"


def closer_of(opener: str) -> str:
    """The text that ends what an opener began."""
    if opener in _CLOSERS:
        return _CLOSERS[opener]
    return opener[0] + ("|/" + opener[2:] if opener.startswith("<|") else "/" + opener[1:])


def _render(
    template: ChatTemplate | None,
    *,
    answered: bool,
    reasons: bool = True,
    again: bool = False,
) -> str:
    """One question; with an answer (and its reasoning), and a question more. "" where refused."""
    messages = [{"role": "user", "content": _USER}]
    if answered:
        messages.append({"role": "assistant", "content": _ANSWER})
        if reasons:
            messages[-1]["reasoning_content"] = _REASONING
    if again:
        messages.append({"role": "user", "content": _AGAIN})
    if template is None:
        return ""
    try:
        return template.render(messages, add_generation_prompt=again or not answered)
    except TemplateRefusal:
        return ""


def _written_around(
    tokenizer: Tokenizer, template: ChatTemplate | None, answered: str
) -> tuple[str, str] | None:
    """Markers of a shape that is not known: what the template itself writes around reasoning.

    The opener is what stands between the end of the generation prompt and the reasoning, so
    only openers that the model generates are found; the closer is the next control string.
    """
    before, _, after = answered.partition(_REASONING)
    control = tokenizer.control_pattern
    closer = control.search(after.partition(_ANSWER)[0]) if control and after else None
    header = _render(template, answered=False).rpartition(_USER)[2]
    written = before.rpartition(_USER)[2]
    opener = written[len(header) :].strip() if written.startswith(header) else ""
    return (opener, closer.group()) if opener and closer else None
