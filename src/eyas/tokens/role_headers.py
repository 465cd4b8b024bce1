"""Headers of the user's, the system's and a tool's messages, found by rendering.

Invariant: what begins an answer of the assistant is never among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.errors import TemplateRefusal
from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.tokenizer import Tokenizer

_USER, _ANSWER, _PROBE = "qzuser", "qzanswer", "qzprobe"
"""Words that no template writes itself, to find our own content in what it renders."""

_LONGEST_HEADER = 8
"""A longer one holds text of the template's own (gpt-oss's preamble) and proves nothing."""


def rendered(template: ChatTemplate | None, messages: list[dict[str, Any]]) -> str | None:
    """A prompt's text; None where there is no template, or where it refuses the messages."""
    if template is None:
        return None
    try:
        return template.render(messages)
    except TemplateRefusal:
        return None


def role_headers(
    tokenizer: Tokenizer, template: ChatTemplate | None, stop_ids: frozenset[int]
) -> tuple[tuple[int, ...], ...]:
    """Ids that begin a message of the user, the system or a tool, found by rendering.

    Where the header's first control id never begins an assistant's message, that id alone is
    the header (``<|im_user|>``); else the ids up to the content are (``<|im_start|>user``).
    """
    user = {"role": "user", "content": _USER}
    answer = {"role": "assistant", "content": _ANSWER}
    tool = {"role": "tool", "content": _PROBE, "tool_call_id": "functions.f:0", "name": "f"}
    prompt = rendered(template, [user]) or ""
    assistant = tokenizer.encode(prompt[prompt.rfind(_USER) + len(_USER) :])
    turn_end = assistant[0] if assistant else None  # gpt-oss: <|end|>, which is no stop id
    headers: list[tuple[int, ...]] = []
    for messages in (
        [user, answer, {"role": "user", "content": _PROBE}],
        [{"role": "system", "content": _PROBE}, user],
        [user, answer, tool],
    ):
        text = rendered(template, messages) or ""
        ids = _header_before_probe(tokenizer, text, stop_ids, turn_end)
        if ids and ids[0] not in assistant:
            ids = ids[:1]
        if ids and not any(ids[: len(known)] == known for known in headers):
            headers.append(ids)
    return tuple(header for header in headers if not _contains(assistant, header))


def _header_before_probe(
    tokenizer: Tokenizer, text: str, stop_ids: frozenset[int], turn_end: int | None
) -> tuple[int, ...]:
    """The ids between the end of the turn before and the probe, from a control id on.

    Trailing space is left out, since it may share an id with the content behind it.
    """
    if _PROBE not in text:
        return ()
    before = text[: text.index(_PROBE)]
    if _ANSWER in before:
        before = before[before.rindex(_ANSWER) + len(_ANSWER) :]
    ids = tokenizer.encode(before.rstrip())
    control = set(tokenizer.control.values())
    control.discard(tokenizer.control.get(tokenizer.special_tokens_map.get("bos_token", ""), -1))
    last_stop = max((at for at, i in enumerate(ids) if i in stop_ids), default=-1)
    ids = ids[last_stop + 1 :]
    while ids and (ids[0] not in control or ids[0] == turn_end):
        ids.pop(0)
    return tuple(ids) if len(ids) <= _LONGEST_HEADER else ()


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    width = len(part)
    return any(list(ids[at : at + width]) == list(part) for at in range(len(ids) - width + 1))
