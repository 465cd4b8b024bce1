"""From messages to prompt ids, and from an answer's ids back to a message.

Invariant: whoever renders a prompt or takes an answer apart does it here (the capture's first
turns and its later ones, a continued run, verification), so that what was sent can be proven.
No server is known here, and nothing of what a run holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.modes import Mode, Modes
from eyas.tokens import Profile, Tokenizer

PROMPT_REASONS: dict[str, str] = {
    "template_refused": "the chat template refuses the conversation",
    "no_chat_template": "the row holds messages, and the tokenizer has no chat template",
}
"""Why no prompt can be made of messages."""


class Refusal(NamedTuple):
    """Why a prompt cannot be made."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Chat:
    """What one prompt is made of."""

    messages: list[Message]
    """Everything before the answer that is asked for, earlier answers included."""
    tools: list[dict[str, Any]] | None = None
    """The definitions of tools that the template is given."""
    mode: Mode | None = None
    """The switches that it is given; the run's first mode where None."""


@dataclass(frozen=True, slots=True)
class Prompting:
    """How one run makes prompts of conversations and messages of answers."""

    tokenizer: Tokenizer
    modes: Modes
    profile: Profile

    def prompts(self, chats: Iterable[Chat]) -> list[list[int] | Refusal]:
        """The prompt ids of each chat, or why it has none; texts are tokenized together."""
        rendered = [self._render(chat) for chat in chats]
        texts = [text for text in rendered if isinstance(text, str)]
        ids = iter(self.tokenizer.encode_batch(texts))
        return [next(ids) if isinstance(text, str) else text for text in rendered]

    def prompt(self, chat: Chat) -> list[int] | Refusal:
        """The prompt ids of one chat, or why it has none."""
        text = self._render(chat)
        return self.tokenizer.encode(text) if isinstance(text, str) else text

    def has_control_text(self, messages: Iterable[Message]) -> bool:
        """Whether the text of a message holds a control string."""
        return any(self.tokenizer.has_control_text(message["content"]) for message in messages)

    def take_apart(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Message:
        """An answer as a chat client would send it back; the template decides what to keep."""
        reading = self.profile.read(self.tokenizer, prompt_ids, output_ids)
        message: Message = {"role": "assistant", "content": reading.content}
        if reading.reasoning is not None:
            message["reasoning_content"] = reading.reasoning
        return message

    def _render(self, chat: Chat) -> str | Refusal:
        template = (chat.mode or self.modes.each[0]).template
        if template is None:
            return Refusal("no_chat_template", PROMPT_REASONS["no_chat_template"])
        try:
            return template.render(chat.messages, tools=chat.tools)
        except TemplateRefusal as error:
            return Refusal("template_refused", str(error))
