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
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.tokens.control_text import CannotEscape, control_strings, escape, given_text
from eyas.tokens.refusals import explain
from eyas.tools.answers import Answer, with_calls
from eyas.tools.form import ToolForm, tool_form
from eyas.tools.packaged import EXTRA, typescript

PROMPT_REASONS: dict[str, str] = {
    "template_refused": "the chat template refuses the conversation",
    "no_chat_template": "the row holds messages, and the tokenizer has no chat template",
    "control_text": "the given text holds control strings, which --control-text refuses, or "
    "cannot be escaped",
    "tools_unwritten": "the chat template wants tools as the model's own code writes them",
}
"""Why no prompt can be made of messages."""


_TYPESCRIPT = "tools_ts_str"
"""What Kimi-K2.5's template reads: its tokenizer's code gives it the tools as TypeScript."""


class _Unwritten(Exception):
    """Nothing at hand writes the tools as the template wants them."""


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
    control_text: str = "allow"
    """What becomes of control strings in the text: ``allow``, ``escape`` or ``refuse``."""

    def prompts(self, chats: Iterable[Chat]) -> list[list[int] | Refusal]:
        """The prompt ids of each chat, or why it has none; texts are tokenized together."""
        rendered = [self._render(chat) for chat in chats]
        texts = [text for text in rendered if isinstance(text, str)]
        ids = iter(self.tokenizer.encode_batch(texts))
        return [next(ids) if isinstance(text, str) else text for text in rendered]

    def prompt(self, chat: Chat) -> list[int] | Refusal:
        """The prompt ids of one chat, or why it has none."""
        made = self._render(chat)
        return self.tokenizer.encode(made) if isinstance(made, str) else made

    def has_control_text(self, chat: Chat) -> bool:
        """Whether the text that was given holds a control string; the target's own answers are
        not looked at."""
        return bool(control_strings(self.tokenizer, [*given_text(chat.messages), chat.tools]))

    def take_apart(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Message:
        """An answer as a chat client would send it back; the template decides what to keep."""
        reading = self.profile.read(self.tokenizer, prompt_ids, output_ids)
        message: Message = {"role": "assistant", "content": reading.content}
        if reading.reasoning is not None:
            message["reasoning_content"] = reading.reasoning
        return message

    def take_calls(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        tools: list[dict[str, Any]] | None,
    ) -> Answer:
        """`take_apart` of an answer that may call tools."""
        plain = self.take_apart(prompt_ids, output_ids)
        template = self.modes.each[0].template
        if template is None:
            return Answer(plain)
        return with_calls(
            plain, self.tokenizer, template, self.profile, prompt_ids, output_ids, tools
        )

    @property
    def tool_form(self) -> ToolForm | None:
        """How the template writes calls and what reads them; None without a template."""
        template = self.modes.each[0].template
        return None if template is None else tool_form(self.tokenizer, template, self.profile)

    def _render(self, chat: Chat) -> str | list[int] | Refusal:
        """The prompt as text, or as ids where its control text is escaped."""
        template = (chat.mode or self.modes.each[0]).template
        if template is None:
            return Refusal("no_chat_template", PROMPT_REASONS["no_chat_template"])
        try:
            if self.control_text == "allow":
                return self._written(template, chat.messages, chat.tools)
            if self.control_text == "refuse":
                if held := self._held(chat):
                    return Refusal("control_text", f"{held} (--control-text refuse)")
                return self._written(template, chat.messages, chat.tools)
            if not control_strings(self.tokenizer, [*chat.messages, chat.tools]):
                return self._written(template, chat.messages, chat.tools)
            return escape(
                self.tokenizer,
                lambda messages, tools: self._written(template, messages, tools),
                chat.messages,
                chat.tools,
            )
        except _Unwritten:
            reason = "tools_unwritten"
            return Refusal(reason, f"{PROMPT_REASONS[reason]} (as TypeScript); {EXTRA} knows how")
        except CannotEscape as error:
            held = self._held(chat) or "an earlier answer holds control strings"
            return Refusal("control_text", f"{held}, which cannot be escaped: {error}")
        except TemplateRefusal as error:
            why = explain(template, chat.messages, chat.tools, error)
            return Refusal("template_refused", why)

    def _written(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
    ) -> str | list[int]:
        more: dict[str, Any] = {}
        if tools and _TYPESCRIPT in template.reads and not template.by_function:
            more[_TYPESCRIPT] = typescript(self.tokenizer, tools)
            if more[_TYPESCRIPT] is None:
                raise _Unwritten
        return template.prompt(messages, tools, **more)

    def _held(self, chat: Chat) -> str:
        """Where the first control string stands, in words; "" where there is none."""
        for number, message in enumerate(chat.messages, 1):
            if message["role"] != "assistant" and (
                found := control_strings(self.tokenizer, message)
            ):
                return f"message {number} ({message['role']}) holds {found[0]!r}"
        found = control_strings(self.tokenizer, chat.tools)
        return f"the tools hold {found[0]!r}" if found else ""
