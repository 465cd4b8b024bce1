"""Small conversations whose rendering shows what a chat template does.

Invariant: a scene is text or a refusal in the template's own words; no exception leaves it. Its
words are such that no template writes them itself, so finding one proves that it was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.markers import prompt_state
from eyas.tokens.profile import Profile

SYSTEM, USER, AGAIN = "qzsystem", "qzuser", "qzagain"
REASONING, ANSWER, RESULT = "qzreasoning", "qzanswer", "qzresult"
ARGUMENT = "qzargument"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "What to look at."}},
                "required": ["at"],
            },
        },
    }
]


def system(text: str = SYSTEM, role: str = "system") -> Message:
    return {"role": role, "content": text}


def user(text: str = USER) -> Message:
    return {"role": "user", "content": text}


def answer(content: str = ANSWER, reasoning: str | None = REASONING) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def exchange(reasoning: bool = True) -> list[Message]:
    """An answer in other words than `answer`, and a question that follows."""
    said = answer("qzsaid", "qzthought" if reasoning else None)
    return [said, user("qzfurther")]


NINE = "call00001"
"""A call's id of the nine letters that Mistral demands; every other template takes it too."""


def tool_cycle(
    *,
    arguments_as_text: bool,
    content: str | None = "",
    reasoning: str | None = None,
    call_id: str = NINE,
) -> list[Message]:
    """A question, a call and its result."""
    arguments: Any = f'{{"at": "{ARGUMENT}"}}' if arguments_as_text else {"at": ARGUMENT}
    function = {"name": "look", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    asks: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
    if reasoning is not None:
        asks["reasoning_content"] = reasoning
    result = {"role": "tool", "content": RESULT, "tool_call_id": call_id, "name": "look"}
    return [user(), asks, result]


class Scenes:
    """One template under some switches: what it renders, each scene once."""

    def __init__(
        self, template: ChatTemplate, profile: Profile, switches: Mapping[str, Any] | None = None
    ) -> None:
        self.template = template
        self.profile = profile
        self.switches = dict(switches or {})
        self._seen: dict[str, tuple[str | None, str | None]] = {}

    def under(self, switches: Mapping[str, Any]) -> Scenes:
        """The same scenes with more switches."""
        return Scenes(self.template, self.profile, {**self.switches, **switches})

    def attempt(
        self,
        messages: list[Message],
        *,
        answered: bool = False,
        as_given: bool = False,
        **more: Any,
    ) -> tuple[str | None, str | None]:
        """(text, None), or (None, the template's own words where it refuses).

        Args:
            messages: a conversation.
            answered: it ends with an answer, so there is no generation prompt.
            as_given: render as transformers 4 does (see `ChatTemplate.render_as_given`).
            more: switches.
        """
        if "strftime_now" in more:
            return self._attempt(messages, answered, as_given, more)
        key = repr((messages, answered, as_given, more))
        if key not in self._seen:
            self._seen[key] = self._attempt(messages, answered, as_given, more)
        return self._seen[key]

    def _attempt(
        self, messages: list[Message], answered: bool, as_given: bool, more: dict[str, Any]
    ) -> tuple[str | None, str | None]:
        render = self.template.render_as_given if as_given else self.template.render
        try:
            text = render(messages, add_generation_prompt=not answered, **{**self.switches, **more})
        except TemplateRefusal as error:
            cause = error.__cause__
            return None, str(cause) or type(cause).__name__
        except Exception as error:  # a switch may have the name of an argument of ours
            return None, str(error) or type(error).__name__
        return text, None

    def text(self, messages: list[Message], **more: Any) -> str | None:
        """The text alone; None where the template refuses."""
        return self.attempt(messages, **more)[0]

    @property
    def prompt(self) -> str | None:
        """The generation prompt of one question."""
        return self.text([user()])

    @property
    def history(self) -> str | None:
        """The generation prompt of a third question; the first answer had reasoning.

        Not of a second: some templates keep the reasoning of the last answer alone.
        """
        return self.text([user(), answer(), user(AGAIN), *exchange()])

    @property
    def finished(self) -> str | None:
        """A conversation that ends with an answer, as training data would be rendered."""
        return self.text([user(), answer()], answered=True)

    def standard(self) -> list[str | None]:
        """One rendering of every kind, to see whether anything changes at all."""
        cycle = tool_cycle(arguments_as_text=False)
        return [
            self.prompt,
            self.text([system(), user()]),
            self.history,
            self.finished,
            self.text([user()], tools=TOOLS),
            self.text(cycle, tools=TOOLS),
        ]

    def reasoning_of(self, prompt: str | None) -> str:
        """What a generation prompt does: open, closed, generated, none or unknown."""
        if prompt is None:
            return "unknown"
        opener, closer = self.profile.opener, self.profile.closer
        if opener is None or closer is None:
            written, found, _ = (self.finished or "").partition(REASONING)
            if not found:
                return "none"
            # Some open it in plain words, which history does not repeat.
            header, lead = (text.rpartition(USER)[2] for text in (prompt, written))
            opens = header.startswith(lead) and header[len(lead) :].strip()
            return "open" if opens else "generated"
        state = prompt_state(prompt, opener.text, closer.text)
        return "generated" if state == "none" else state
