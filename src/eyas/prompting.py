"""From messages to prompt ids, and from an answer's ids back to a message.

Invariant: whoever renders a prompt or takes an answer apart does it here (the capture's first
turns and its later ones, a continued run, verification), so that what was sent can be proven.
No server is known here, and nothing of what a run holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.ids import first_difference
from eyas.modes import Mode, Modes
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.tokens.answers import (
    AnswerIds,
    Outline,
    drifted,
    generated_ids,
    outline,
    outline_behind,
    put_words,
    shown_ids,
)
from eyas.tokens.control_text import CannotEscape, control_strings, escape, given_text
from eyas.tokens.encoded import Encoded, encode, placed
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
    "history_not_kept": "the template does not keep the earlier prompt (--history tokens)",
}
"""Why no prompt can be made of messages."""


HISTORIES = ("served", "full", "tokens")
"""What a target is shown of its own earlier turns: what a chat client sends back and the template
keeps; the reasoning as well; or the very ids, with only the new messages added between them."""


TYPESCRIPT = "tools_ts_str"
"""What Kimi-K2.5's template reads: its tokenizer's code gives it the tools as TypeScript."""


class ToolsUnwritten(TemplateRefusal):
    """Nothing at hand writes the tools as the template wants them."""


def declarations(
    tokenizer: Tokenizer, template: ChatTemplate, tools: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """What a template is given besides the tools, where it wants them written by the model's own
    code.

    Raises:
        ToolsUnwritten: if nothing at hand writes them so.
    """
    if not tools or TYPESCRIPT not in template.reads or template.by_function:
        return {}
    if (declared := typescript(tokenizer, tools)) is None:
        why = PROMPT_REASONS["tools_unwritten"]
        raise ToolsUnwritten(f"{why} (as TypeScript); {EXTRA} knows how")
    return {TYPESCRIPT: declared}


class Refusal(NamedTuple):
    """Why a prompt cannot be made."""

    reason: str
    detail: str


class Earlier(NamedTuple):
    """The turn before."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


class Prompt(NamedTuple):
    """A prompt that can be sent."""

    ids: Sequence[int]
    drifted: bool = False
    """Whether the last answer stands in it with other ids than were generated."""


@dataclass(frozen=True, slots=True)
class Later:
    """What the template makes of a conversation that goes on."""

    ids: list[int]
    """Of the whole prompt, as it renders."""
    shown: AnswerIds | None
    """Of the last answer in it; None where it cannot be found."""
    tail: list[int] | None
    """From the last answer's end on, where everything before it is as it was; else None."""
    fault: str
    """Why there is no `tail`."""
    begins_message: bool
    """Whether the first id of `tail` belongs to the next message (GLM's ``<|user|>``)."""

    def between(self, last_id: int) -> list[int]:
        """What follows an answer that was generated up to `last_id`."""
        assert self.tail is not None
        keeps_first = self.begins_message and self.tail[0] != last_id
        return self.tail if keeps_first else self.tail[1:]


@dataclass(frozen=True, slots=True)
class Chat:
    """What one prompt is made of."""

    messages: list[Message]
    """Everything before the answer that is asked for, earlier answers included."""
    tools: list[dict[str, Any]] | None = None
    """The definitions of tools that the template is given."""
    mode: Mode | None = None
    """The switches that it is given; the run's first mode where None."""
    earlier: Earlier | None = None
    """The turn that the last answer is from, where there is one."""


@dataclass(frozen=True, slots=True)
class Prompting:
    """How one run makes prompts of conversations and messages of answers."""

    tokenizer: Tokenizer
    modes: Modes
    profile: Profile
    history: str = "served"
    """One of `HISTORIES`."""
    control_text: str = "allow"
    """What becomes of control strings in the text: ``allow``, ``escape`` or ``refuse``."""

    def prompts(self, chats: Iterable[Chat]) -> list[Prompt | Refusal]:
        """The prompt of each chat, or why it has none; first turns are tokenized together."""
        made = [
            self._render(chat) if chat.earlier is None else self._go_on(chat, chat.earlier)
            for chat in chats
        ]
        ids = iter(self.tokenizer.encode_batch([text for text in made if isinstance(text, str)]))
        return [Prompt(next(ids)) if isinstance(one, str) else _sent(one) for one in made]

    def prompt(self, chat: Chat) -> Prompt | Refusal:
        """The prompt of one chat, or why it has none."""
        return self.prompts([chat])[0]

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

    def later(self, chat: Chat) -> Later | Refusal:
        """What the template makes of a chat with an answer, whatever that answer's ids were."""
        whole = self._encode(chat)
        if isinstance(whole, Refusal):
            return whole
        mode = chat.mode or self.modes.each[0]
        last = max(at for at, m in enumerate(chat.messages) if m["role"] == "assistant")
        marked, words = put_words(chat.messages, last)
        shape, tail, fault = None, None, ""
        ends = mode.ends | self.profile.stop_ids
        try:
            try:
                text = self._text(replace(chat, messages=marked))
                shape = outline(text, words, self.tokenizer, ends)
            except TemplateRefusal as error:  # it takes the real answer, and not another one
                fault = str(error)
            if shape is None and chat.messages[last].get("tool_calls"):
                marked = chat.messages
                shape = self._outline_behind(chat, last, whole.text, ends)
            if self.history == "tokens":
                tail, fault = self._tail(chat, last, shape, marked)
        except TemplateRefusal as error:
            fault = str(error)
        shown = None if shape is None else shown_ids(shape, whole)
        return Later(whole.ids, shown, tail, fault, mode.end_begins_message)

    def drifted(self, generated: AnswerIds, shown: AnswerIds | None) -> bool:
        """Whether an answer stands in a later prompt with other ids than were generated."""
        return drifted(generated, shown, keeps_reasoning=self.history != "served")

    def _go_on(self, chat: Chat, earlier: Earlier) -> Prompt | Refusal:
        later = self.later(chat)
        if isinstance(later, Refusal):
            return later
        prompt_ids, output_ids = earlier
        generated = generated_ids(self.tokenizer, self.profile, prompt_ids, output_ids)
        ids = later.ids
        if self.history == "tokens":
            if later.tail is None:
                return Refusal("history_not_kept", later.fault)
            ids = [*prompt_ids, *output_ids, *later.between(output_ids[-1])]
        return Prompt(ids, self.drifted(generated, later.shown))

    def _outline_behind(
        self, chat: Chat, last: int, text: str, ends: frozenset[int]
    ) -> Outline | None:
        """The outline of calls that stand alone, by the prompt that they answered."""
        before = self._text(replace(chat, messages=chat.messages[:last]))
        reasons = bool(str(chat.messages[last].get("reasoning_content") or "").strip())
        return outline_behind(before, text, self.tokenizer, self.profile, ends, reasons=reasons)

    def _tail(
        self, chat: Chat, last: int, shape: Outline | None, marked: list[Message]
    ) -> tuple[list[int] | None, str]:
        """The ids from an answer's end on, or why they cannot follow its own ids."""
        if shape is None or shape.end is None:
            return None, "the template shows no end of the earlier answer"
        before = self._text(replace(chat, messages=chat.messages[:last]))
        if not shape.before.startswith(before):
            at = first_difference(before, shape.before)
            return None, (
                "the template writes the earlier prompt in another way now: "
                f"{before[max(0, at - 20) : at + 20]!r} has become "
                f"{shape.before[max(0, at - 20) : at + 20]!r}"
            )
        if str(chat.messages[last].get("reasoning_content") or "").strip() and not shape.middle:
            return None, "the template does not show the reasoning of the earlier answer"
        if self._escapes(chat) or self._template(chat).by_function:
            encoded = self._encode(replace(chat, messages=marked))
            if isinstance(encoded, Refusal):
                return None, encoded.detail
            ids = encoded.behind(len(encoded.text) - len(shape.after))
        else:
            ids = self.tokenizer.encode(shape.after)
        if ids[0] != shape.end:
            name = self.tokenizer.name(shape.end)
            return None, f"{name} begins with another id where it ends the earlier answer"
        return ids, ""

    def _encode(self, chat: Chat) -> Encoded | Refusal:
        """The prompt's text and ids, and where in the text they stand."""
        made = self._render(chat)
        if isinstance(made, str):
            return encode(self.tokenizer, made)
        return placed(self.tokenizer, made) if isinstance(made, list) else made

    def _render(self, chat: Chat) -> str | list[int] | Encoded | Refusal:
        """The prompt as text; as ids where a function makes such, or where its control text is
        escaped."""
        if (chat.mode or self.modes.each[0]).template is None:
            return Refusal("no_chat_template", PROMPT_REASONS["no_chat_template"])
        try:
            if self.control_text == "refuse" and (held := self._held(chat)):
                return Refusal("control_text", f"{held} (--control-text refuse)")
            if not self._escapes(chat):
                return self._made(chat)
            return escape(
                self.tokenizer,
                lambda messages, tools: self._made(replace(chat, messages=messages, tools=tools)),
                chat.messages,
                chat.tools,
            )
        except CannotEscape as error:
            held = self._held(chat) or "an earlier answer holds control strings"
            return Refusal("control_text", f"{held}, which cannot be escaped: {error}")
        except TemplateRefusal as error:
            return self._refused(chat, error)

    def _refused(self, chat: Chat, error: TemplateRefusal) -> Refusal:
        if isinstance(error, ToolsUnwritten):
            return Refusal("tools_unwritten", str(error))
        why = explain(self._template(chat), chat.messages, chat.tools, error)
        return Refusal("template_refused", why)

    def _template(self, chat: Chat) -> ChatTemplate:
        template = (chat.mode or self.modes.each[0]).template
        assert template is not None
        return template

    def _made(self, chat: Chat) -> str | list[int]:
        """What the template, or the function in its place, makes of a chat."""
        template = self._template(chat)
        more = declarations(self.tokenizer, template, chat.tools)
        return template.prompt(chat.messages, chat.tools, **more)

    def _text(self, chat: Chat) -> str:
        made = self._made(chat)
        return made if isinstance(made, str) else self.tokenizer.decode(made)

    def _escapes(self, chat: Chat) -> bool:
        """Whether there is control text that is written as plain text."""
        return self.control_text == "escape" and bool(
            control_strings(self.tokenizer, [*chat.messages, chat.tools])
        )

    def _held(self, chat: Chat) -> str:
        """Where the first control string stands, in words; "" where there is none."""
        for number, message in enumerate(chat.messages, 1):
            if message["role"] != "assistant" and (
                found := control_strings(self.tokenizer, message)
            ):
                return f"message {number} ({message['role']}) holds {found[0]!r}"
        found = control_strings(self.tokenizer, chat.tools)
        return f"the tools hold {found[0]!r}" if found else ""


def _sent(made: list[int] | Encoded | Prompt | Refusal) -> Prompt | Refusal:
    if isinstance(made, Prompt | Refusal):
        return made
    return Prompt(made.ids if isinstance(made, Encoded) else made)
