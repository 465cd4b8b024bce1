"""An answer with calls taken apart, and put together as the template writes it again.

Invariant: an answer whose calls were read becomes a message that, wherever there is one, the
template renders to the very text that the target generated; where there is none, reasoning and
calls are as they were read, and the template's rendering decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.tools.calls import Reading, ids_for, message_calls, result_message
from eyas.tools.form import tool_form

_SPACES = 4
"""How much of the space between content and calls is tried as the content's own."""


class Answer(NamedTuple):
    """An answer as the next prompt is to show it."""

    message: Message
    fault: str | None = None
    """Why calls in it could not be read, as a sentence."""

    @property
    def calls(self) -> list[Message]:
        """Its ``tool_calls``."""
        calls: list[Message] = self.message.get("tool_calls", [])
        return calls


def with_calls(
    plain: Message,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    profile: Profile,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    tools: list[dict[str, Any]] | None,
) -> Answer:
    """An answer, of which `plain` is the message without regard to calls, with its calls."""
    form = tool_form(tokenizer, template, profile)
    found = form.read(tokenizer, profile, prompt_ids, output_ids, tools)
    if not found.calls:
        return Answer(plain, found.fault)
    message = {name: value for name, value in plain.items() if name != "content"}
    said = message_calls(found.calls, ids_for(found.calls, output_ids), as_text=form.as_text)
    region = _region(tokenizer, profile, prompt_ids, output_ids)
    choices = _contents(region, found)
    for content in choices:
        answer = {**message, "content": content, "tool_calls": said}
        if region in _rendered(template, answer, tools):
            return Answer(answer)
    return Answer({**message, "content": choices[0], "tool_calls": said})


def _region(
    tokenizer: Tokenizer, profile: Profile, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> str:
    """The text of content and calls: what stands between reasoning and stop id."""
    first = profile.spans(tokenizer, prompt_ids, output_ids)[2] - len(prompt_ids)
    last = len(output_ids) - (output_ids[-1] in profile.stop_ids)
    return tokenizer.decode(output_ids[first:last])


def _contents(region: str, found: Reading) -> list[str]:
    """What the content may be: without the space before the calls, or with some of it."""
    stripped = found.content or ""
    at = region.find(stripped)
    if at < 0:
        return [stripped]
    lead = region[:at]
    content = stripped if lead.strip() else lead + stripped  # a marker is no part of it
    rest = region[at + len(stripped) :]
    spaces = min(_SPACES, len(rest) - len(rest.lstrip()))
    return [content + rest[:n] for n in range(spaces + 1)]


def _rendered(template: ChatTemplate, answer: Message, tools: list[dict[str, Any]] | None) -> str:
    """What the template writes of the answer in a conversation of its own."""
    messages = [{"role": "user", "content": "?"}, answer]
    results = [result_message(call, "!") for call in answer["tool_calls"]]
    with suppress(TemplateRefusal):
        return template.render(messages, add_generation_prompt=False, tools=tools)
    with suppress(TemplateRefusal):  # one that makes prompts only
        return template.render([*messages, *results], tools=tools)
    return ""
