"""Calls that a chat template is asked to write, so that it shows how it writes them.

Invariant: a sample is text that the template rendered; its words are such that no template
writes them itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.tools.calls import Call, message_calls, result_message

QUESTION, ANSWER, REASONING, RESULT = "qzquestion", "qzanswer", "qzreasoning", "qzresult"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "qzlook",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {"type": "string", "description": "What to look at."},
                    "n": {"type": "integer", "description": "How often."},
                    "deep": {
                        "type": "array",
                        "description": "Layers.",
                        "items": {"type": "integer"},
                    },
                },
                "required": ["at"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "qzcount_all",
            "description": "Counts.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]

PLAIN = (Call("qzlook", {"at": "qzargument"}),)
PLAIN_TWO = (*PLAIN, Call("qzlook", {"at": "qzother"}))
_SINGLE = (
    (Call("qzlook", {"at": 'x "quoted"\n ö {y}', "n": 3, "deep": [1, 2]}),),
    (Call("qzcount_all", {}),),
    PLAIN,
)
_SEVERAL = (
    (*_SINGLE[0], *_SINGLE[1]),
    PLAIN_TWO,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Calls, and what a template writes as the answer that makes them."""

    calls: tuple[Call, ...]
    """With the ids that the template was given."""
    content: str
    prompt: str
    """The prompt up to the answer."""
    output: str
    """The answer, with whatever ends it."""
    follows: str
    """What the template writes behind it for the results; "" where it refuses them."""


class Samples:
    """Calls as one template writes them, with arguments and ids of one kind."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        profile: Profile,
        *,
        as_text: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._profile = profile
        self.as_text = as_text
        self.refusal: str | None = None
        """The template's words where it refused one call."""
        self._named_ids = False
        """Whether a call's id carries the tool's name, since the template shows no other."""
        plain = self.one(PLAIN, "")
        self._named_ids = plain is not None and self._shows_only_id(plain)

    def one(self, calls: Sequence[Call], content: str) -> Sample | None:
        """One answer with some calls; None where the template refuses it."""
        named = tuple(call._replace(id=self.make_id(n, call.name)) for n, call in enumerate(calls))
        question, answer = self.conversation(named, content)
        results = [
            result_message(call, f"{RESULT}{n}") for n, call in enumerate(answer["tool_calls"])
        ]
        try:
            prompt = self._render([question], add_generation_prompt=True)
            whole = self._finished([question, answer], results)
        except TemplateRefusal as refusal:
            self.refusal = str(refusal)
            return None
        try:
            then = self._render([question, answer, *results], add_generation_prompt=True)
        except TemplateRefusal:
            then = ""
        follows = then[len(whole) :] if then.startswith(whole) else then.rpartition(QUESTION)[2]
        return Sample(named, content, prompt, self._output(prompt, whole), follows)

    def conversation(self, calls: Sequence[Call], content: str = "") -> list[Message]:
        """A question, and the answer that makes the calls."""
        ids = [call.id or self.make_id(n, call.name) for n, call in enumerate(calls)]
        question, answer = self._answered(content)
        if calls:
            answer["tool_calls"] = message_calls(calls, ids, as_text=self.as_text)
        return [question, answer]

    def make_id(self, number: int, name: str) -> str:
        """Nine letters, as Mistral's templates demand; or as Kimi's calls have them."""
        return f"functions.{name}:{number}" if self._named_ids else f"call0000{number}"

    def _answered(self, content: str) -> list[Message]:
        answer: Message = {"role": "assistant", "content": content}
        if self._profile.closer is not None and self._profile.reasoning != "closed":
            answer["reasoning_content"] = REASONING
        return [{"role": "user", "content": QUESTION}, answer]

    def all(self) -> Iterator[Sample]:
        """Single calls with and without content, then several calls in one answer."""
        for calls in (*_SINGLE, *_SEVERAL):
            for content in ("", ANSWER):
                sample = self.one(calls, content)
                if sample is not None:
                    yield sample

    def plain_answer(self) -> str | None:
        """What the template writes as an answer without calls, behind the prompt."""
        question, answer = self._answered(ANSWER)
        try:
            prompt = self._render([question], add_generation_prompt=True)
            whole = self._finished([question, answer], [question])
        except TemplateRefusal:
            return None
        return self._output(prompt, whole)

    def _finished(self, messages: list[Message], more: list[Message]) -> str:
        """A conversation that ends with an answer; with `more` behind it where the template (a
        function, say) makes prompts only."""
        try:
            return self._render(messages, add_generation_prompt=False)
        except TemplateRefusal as refusal:
            try:
                return self._render([*messages, *more], add_generation_prompt=True)
            except TemplateRefusal:
                raise refusal from None

    def _render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=TOOLS
        )

    def _output(self, prompt: str, whole: str) -> str:
        """What the template writes behind the prompt.

        Where it writes an answer otherwise once it is there (without the prompt's opener, say),
        everything from the first difference on, with a reasoning closed before it if the prompt
        opened one.
        """
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        pairs = zip(prompt, whole, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(whole)))
        control = self._tokenizer.control_pattern
        found = [m for text in (prompt, whole) if control for m in control.finditer(text)]
        # <think> and <tool_call> begin alike
        at = min([at, *(m.start() for m in found if m.start() < at < m.end())])
        rest, closer = whole[at:], self._profile.closer
        open_at = self._profile.open_position(self._tokenizer, self._tokenizer.encode(prompt))
        if open_at is not None and closer is not None and closer.text not in rest:
            rest = f"{REASONING}{closer.text}{rest}"
        return rest

    @staticmethod
    def _shows_only_id(sample: Sample) -> bool:
        (call,) = sample.calls
        return call.name not in sample.output and (call.id or " ") in sample.output
