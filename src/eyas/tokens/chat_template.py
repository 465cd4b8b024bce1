"""The model's chat template, rendered by transformers' own compiled environment.

Invariant: `render` gives the text that ``apply_chat_template(tokenize=False)`` gives for the
same messages and switches, with the clock frozen at the run's date.

The compiled template is kept, since compiling costs far more than rendering; the equality is
tested against ``apply_chat_template`` itself.
"""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from eyas.conversation import Message
from eyas.errors import TemplateRefusal, TokenizerError
from eyas.tokens.tokenizer import Tokenizer, quiet_transformers


class ChatTemplate:
    """A chat template with its switches, for one run."""

    by_function: ClassVar[bool] = False
    """Whether Python makes the prompts, and not Jinja."""

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        special_tokens_map: Mapping[str, str] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        date: dt.date | None = None,
    ) -> None:
        """Compile a template.

        Args:
            source: the template's text (Jinja).
            tool_source: another one, which is taken where there are tools.
            special_tokens_map: ``bos_token`` and so on, which templates read by name.
            kwargs: the template's switches, such as ``{"thinking": True}``.
            date: what ``strftime_now`` shows; today where None.

        Raises:
            TokenizerError: if the template is not valid Jinja.
        """
        quiet_transformers()
        from jinja2 import TemplateError, meta
        from transformers.utils import chat_template_utils

        self.source, self.tool_source = source, tool_source
        self.kwargs = dict(kwargs or {})
        self.date = date or dt.datetime.now().date()
        reads: set[str] = set()
        try:
            # Private names of transformers: the lock file pins its version, and
            # test_real_templates compares every render with apply_chat_template.
            compile_template = chat_template_utils._compile_jinja_template
            self._template = self._tool_template = compile_template(source)
            if tool_source is not None:
                self._tool_template = compile_template(tool_source)
            self._spans = chat_template_utils._render_with_assistant_indices
            for text in (source, tool_source or ""):
                reads |= meta.find_undeclared_variables(self._template.environment.parse(text))
        except TemplateError as error:
            raise TokenizerError(f"the chat template is not valid: {error}") from error
        self.reads: frozenset[str] = frozenset(reads)
        """Names that the template may read, its switches among them."""
        midnight = dt.datetime.combine(self.date, dt.time())
        self._always: dict[str, Any] = {
            **(special_tokens_map or {}),
            "tools": None,
            "documents": None,
            "strftime_now": midnight.strftime,
        }
        self._context = {**self._always, **self.kwargs}

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        kwargs: Mapping[str, Any] | None = None,
        date: dt.date | None = None,
    ) -> ChatTemplate:
        """The template that came with a tokenizer.

        Raises:
            TokenizerError: if none came with it.
        """
        if tokenizer.template_function is not None:
            from eyas.tokens.template_function import FunctionTemplate

            return FunctionTemplate(
                tokenizer.template_function, tokenizer, kwargs=kwargs, date=date
            )
        if tokenizer.chat_template is None:
            raise TokenizerError(tokenizer.no_template)
        return cls(
            tokenizer.chat_template,
            tool_source=tokenizer.tool_template,
            special_tokens_map=tokenizer.special_tokens_map,
            kwargs=kwargs,
            date=date,
        )

    def under(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """The same template with these switches in place of its own."""
        other = copy.copy(self)
        other.kwargs = dict(kwargs)
        other._context = {**self._always, **other.kwargs}
        return other

    @property
    def hash(self) -> str:
        """SHA-256 of the template's bytes: facts about a template are keyed by it."""
        text = self.source if self.tool_source is None else f"{self.source}\0{self.tool_source}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def shows_date(self) -> bool:
        """Whether the template can print today's date."""
        return "strftime_now" in self.source + (self.tool_source or "")

    @property
    def ignored_kwargs(self) -> list[str]:
        """Switches that were given and that the template never reads; Jinja says nothing."""
        return sorted(name for name in self.kwargs if name not in self.reads)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Render messages as text.

        Raises:
            TemplateRefusal: if the template refuses these messages, with its own words.
        """
        chat = _with_reasoning_names(_without_nulls(messages))
        return self.render_as_given(chat, add_generation_prompt=add_generation_prompt, **kwargs)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """The prompt for an answer as text, or as ids where a function makes ids.

        Raises:
            TemplateRefusal: as `render` does.
        """
        return self.render(messages, tools=tools, **kwargs)

    def prompt_ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The ids of `prompt`."""
        made = self.prompt(messages, tools)
        return tokenizer.encode(made) if isinstance(made, str) else made

    def render_as_given(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """`render` as transformers 4 does: nulls are handed on, and no name of the reasoning is
        given another one's value.

        Raises:
            TemplateRefusal: as `render` does.
        """
        context = {**self._context, **kwargs}
        template = self._template if context["tools"] is None else self._tool_template
        try:
            return str(
                template.render(
                    context,
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except Exception as error:  # a template is a program: it may raise anything
            said = str(error) or type(error).__name__
            raise TemplateRefusal(f"the chat template refuses: {said}") from error

    def answer_spans(self, messages: Sequence[Message], **kwargs: Any) -> tuple[str, ...]:
        """The texts that ``{% generation %}`` marks as the answers' own, for training masks.

        Empty where the template marks none, or refuses the messages.
        """
        if not _GENERATION.search(self.source):
            return ()
        try:
            text, found = self._spans(
                self._template,
                messages=list(messages),
                add_generation_prompt=False,
                **{**self._context, **kwargs},
            )
        except Exception:  # what it refuses is told where it is rendered
            return ()
        return tuple(text[first:end] for first, end in found)


_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""What messages call the reasoning, those that win first."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def _with_reasoning_names(messages: list[Message]) -> list[Message]:
    """Messages whose reasoning has the names by which templates read it.

    As transformers gives them to templates from 5.20 on (``_alias_reasoning_fields``); here with
    every version, so that the same messages are the same ids.
    """
    given = []
    for message in messages:
        name = next((name for name in _REASONING_NAMES if name in message), None)
        if name is not None:
            message = {"thinking": message[name], **message, "reasoning_content": message[name]}
        given.append(message)
    return given


def _without_nulls(messages: Sequence[Message]) -> list[Message]:
    """Messages without keys that are null, as transformers 5 gives them to templates.

    OpenAI's answers say ``content: null`` beside tool calls; transformers 4 hands that on, and
    many templates then print the word None.
    """
    return [
        message
        if None not in message.values()
        else {name: value for name, value in message.items() if value is not None}
        for message in messages
    ]
