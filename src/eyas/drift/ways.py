"""What ids a row would have had, had only text been kept of its answer.

Invariant: nothing is taken from the row's own ids but the text that the way keeps; control strings
in that text become control ids, as in every script that tokenizes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.modes import Mode
from eyas.prompting import Prompting, declarations
from eyas.tokens.answers import outline, put_words
from eyas.tools.calls import result_message

WAYS = {
    "text": "decoded as a whole and encoded again",
    "chat": "kept as the chat API's fields and rendered again by the template",
    "history": "rendered by the template as an earlier turn of a conversation that goes on",
}
"""The ways in which text is kept, by name."""
NEXT = "Go on."
"""What the user says behind an answer that is to be an earlier turn."""
RESULT = "Done."
"""What a tool says behind a call."""


class NotRendered(NamedTuple):
    """Why a way gives nothing for a row."""

    why: str


@dataclass(frozen=True, slots=True)
class Row:
    """What is looked at of a trace."""

    id: str
    prompt_ids: list[int]
    output_ids: list[int]
    reasoning: tuple[int, int] | None
    """Positions of the first id of the reasoning and of the id behind its last one, in prompt and
    output together; None where there is none."""
    closed: bool
    """Whether the reasoning has a closer."""
    complete: bool
    """Whether the model ended the turn itself."""
    messages: list[Message] | None
    """What the prompt was rendered from; None for ready-made ids."""
    tools: list[dict[str, Any]] | None
    mode: Mode

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids


def texts(prompting: Prompting, row: Row, answer: Message | None) -> dict[str, str | NotRendered]:
    """The text that each way keeps of a row: up to the end of its answer, in ``history`` too.

    Args:
        answer: as a chat client has it; None where there are no messages or no template.
    """
    found: dict[str, str | NotRendered] = {"text": prompting.tokenizer.decode(row.ids)}
    if row.messages is None:
        found["chat"] = found["history"] = NotRendered("it was captured from ready-made ids")
    elif answer is None:
        found["chat"] = found["history"] = NotRendered("its chat template is not at hand")
    else:
        messages = [*row.messages, answer]
        found["chat"] = _attempt(lambda: rendered(prompting, row, messages, last=True))
        found["history"] = _attempt(lambda: _as_history(prompting, row, messages))
    return found


def _attempt(make: Any) -> str | NotRendered:
    try:
        made = make()
    except TemplateRefusal as error:
        return NotRendered(str(error))
    return made if made is not None else NotRendered("the template does not show the answer")


def _as_history(prompting: Prompting, row: Row, messages: list[Message]) -> str | None:
    """The conversation up to the answer's end, once somebody has said something behind it."""
    at = len(messages) - 1
    calls = messages[at].get("tool_calls") or []
    follows = [result_message(call, RESULT) for call in calls] or [
        {"role": "user", "content": NEXT}
    ]
    text = rendered(prompting, row, [*messages, *follows])
    marked, words = put_words(messages, at)
    shape = outline(
        rendered(prompting, row, [*marked, *follows]),
        words,
        prompting.tokenizer,
        row.mode.ends | prompting.profile.stop_ids,
    )
    if shape is None or not text.endswith(shape.after):
        return None
    end = "" if shape.end is None else _name(prompting, shape.end)
    return text[: len(text) - len(shape.after)] + end


def _name(prompting: Prompting, control_id: int) -> str:
    return next(text for text, i in prompting.tokenizer.control.items() if i == control_id)


def rendered(
    prompting: Prompting, row: Row, messages: Sequence[Message], *, last: bool = False
) -> str:
    """What the template writes; with `last` the answer is all, and no other one is asked for."""
    template = row.mode.template
    assert template is not None
    more = declarations(prompting.tokenizer, template, row.tools)
    return template.render(messages, tools=row.tools, add_generation_prompt=not last, **more)


def answer_of(prompting: Prompting, row: Row) -> Message | None:
    """A row's answer as a chat client has it: reasoning, content and calls apart, nothing stripped."""
    if row.messages is None or row.mode.template is None:
        return None
    if row.tools is None:
        return prompting.take_apart(row.prompt_ids, row.output_ids)
    return prompting.take_calls(row.prompt_ids, row.output_ids, row.tools).message
