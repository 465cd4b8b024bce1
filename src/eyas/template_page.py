"""A chat template on one page: what it is, what to watch for, and what it renders.

Invariant: everything is found by rendering and tokenizing here; no server is asked, and where the
template's own tokenizer is not at hand no id is shown.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.conversation import Message
from eyas.errors import InputError, TemplateRefusal
from eyas.findings import Findings
from eyas.modes import open_modes
from eyas.probe.answer_facts import look_at_class, look_at_end, look_at_history
from eyas.probe.calls import look_at_calls
from eyas.probe.facts import look_at_rendering
from eyas.prompting import Chat, Prompting, Refusal, ToolsUnwritten, declarations
from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile, load_tokenizer
from eyas.tokens.facts import TemplateFacts, template_facts
from eyas.tokens.refusals import explain
from eyas.tokens.stand_in import stand_in
from eyas.tokens.template_files import TemplateText, read_template_file
from eyas.tokens.template_function import TemplateFunction
from eyas.tools.form import tool_form

_VOCABULARIES = ("tokenizer.json", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class Scene:
    """A conversation to be rendered."""

    name: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def answered(self) -> bool:
        """Whether it ends with an answer, so that no generation prompt follows."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a template makes of a scene."""

    scene: Scene
    text: str | None
    ids: list[int] | None
    """None without the template's own tokenizer."""
    refused: str | None

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: plain values."""
        return {
            "name": self.scene.name,
            "messages": self.scene.messages,
            "tools": self.scene.tools,
            "text": self.text,
            "ids": self.ids,
            "refused": self.refused,
        }


@dataclass(slots=True)
class TemplatePage:
    """All that is found of a template without a server."""

    source: str
    """The file, directory or hub name that was given."""
    tokenizer: Tokenizer
    own_tokenizer: bool
    """Whether the tokenizer is the template's own; else one stands in for it."""
    template: ChatTemplate
    profile: Profile
    facts: TemplateFacts

    def look(self, findings: Findings) -> None:
        """Say what the template does, as the probe says it."""
        own = self.own_tokenizer
        look_at_class(findings, self.profile, self.facts, own_tokenizer=own)
        look_at_history(findings, self.facts)
        look_at_rendering(findings, self.tokenizer, self.template, self.facts, own_tokenizer=own)
        look_at_end(findings, self.tokenizer, self.facts)
        if own:
            look_at_calls(findings, tool_form(self.tokenizer, self.template, self.profile))

    def render(self, scene: Scene) -> Rendering:
        """Render a conversation; a refusal is in the template's own words.

        Prompts are made as a capture makes them.
        """
        if self.own_tokenizer and not scene.answered:
            modes, profile = open_modes(
                self.tokenizer, self.template, [(1.0, self.template.kwargs)]
            )
            chat = Chat(scene.messages, scene.tools)
            made = Prompting(self.tokenizer, modes, profile).prompt(chat)
            if isinstance(made, Refusal):
                return Rendering(scene, None, None, made.detail)
            return Rendering(scene, self.tokenizer.decode(made.ids), list(made.ids), None)
        try:
            own = self.own_tokenizer
            more = declarations(self.tokenizer, self.template, scene.tools) if own else {}
            text = self.template.render(
                scene.messages,
                add_generation_prompt=not scene.answered,
                tools=scene.tools,
                **more,
            )
        except ToolsUnwritten as error:
            return Rendering(scene, None, None, str(error))
        except TemplateRefusal as error:
            why = explain(self.template, scene.messages, scene.tools, error)
            return Rendering(scene, None, None, why)
        return Rendering(
            scene, text, self.tokenizer.encode(text) if self.own_tokenizer else None, None
        )

    def standard_scenes(self) -> list[Scene]:
        """Usual conversations, in the shapes that this template takes."""
        takes = self.facts.takes
        arguments: Any = {"city": "Paris"}
        if takes.arguments != "kept" and takes.arguments_as_text == "kept":
            arguments = json.dumps(arguments)
        call = {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
        question = {"role": "user", "content": "What is 2+2?"}
        answer = {"role": "assistant", "reasoning_content": "2+2 is 4.", "content": "4"}
        system = [] if self.facts.roles["system"].startswith("refused") else [_SYSTEM]
        scenes = [
            Scene("a question", [question]),
            Scene("a second question", [*system, question, answer, _AGAIN]),
            Scene(
                "a call and its result",
                [
                    {"role": "user", "content": "What is the weather in Paris?"},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call00001", "name": "weather",
                     "content": "sunny"},
                ],
                _TOOLS,
            ),
            Scene("a finished conversation", [question, answer]),
        ]  # fmt: skip
        return [_in_parts(scene) for scene in scenes] if takes.only_parts else scenes


def _in_parts(scene: Scene) -> Scene:
    """For templates that take content as a list of parts only."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in scene.messages
    ]
    return replace(scene, messages=messages)


_SYSTEM = {"role": "system", "content": "Be brief."}
_AGAIN = {"role": "user", "content": "And 3+3?"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def template_page(
    source: str,
    *,
    tokenizer: str | None = None,
    chat_template: TemplateText | TemplateFunction | None = None,
    kwargs: Mapping[str, Any] | None = None,
    date: dt.date | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> TemplatePage:
    """Look at a template.

    Args:
        source: a template's file (Jinja, ``chat_template.json``, ``tokenizer_config.json``), or a
            tokenizer as `load_tokenizer` takes it.
        tokenizer: the template's own tokenizer, where `source` is a file and not beside one.
        chat_template: a template, or a function, instead of the tokenizer's.
        kwargs: the template's switches.
        date: what templates that print the day show.
        revision: which commit, branch or tag of a hub id.
        trust_remote_code: run the model's own code, see `load_tokenizer`.

    Raises:
        TokenizerError: if there is no template, or it is not valid.
    """
    path = Path(source)
    if path.is_file() and path.suffix != ".gguf":
        chat_template = read_template_file(path)
        beside = any((path.parent / name).is_file() for name in _VOCABULARIES)
        tokenizer = tokenizer or (str(path.parent) if beside else None)
    else:
        tokenizer = tokenizer or source
    if tokenizer is None:
        assert isinstance(chat_template, TemplateText)
        stood_in, template, profile = stand_in(chat_template, kwargs=kwargs, date=date)
        facts = template_facts(stood_in, template, profile)
        return TemplatePage(source, stood_in, False, template, profile, facts)
    loaded = load_tokenizer(
        tokenizer,
        chat_template=chat_template,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    template = ChatTemplate.of(loaded, kwargs=kwargs, date=date)
    profile = build_profile(loaded, template)
    return TemplatePage(
        source, loaded, True, template, profile, template_facts(loaded, template, profile)
    )


def read_scene(path: Path) -> Scene:
    """A conversation of one's own: a list of messages, or an object with messages and tools.

    The first line counts where the file is JSON Lines.

    Raises:
        InputError: naming what is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--messages {path} cannot be read: {error}") from error
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = json.loads(text.strip().partition("\n")[0])
        except ValueError as error:
            raise InputError(f"--messages {path} is not JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    tools = value.get("tools") if isinstance(value, dict) else None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise InputError(f"--messages {path}: tools are text that is not JSON") from error
    if not isinstance(messages, list) or not messages:
        raise InputError(
            f"--messages {path} should hold a list of messages, or an object with messages and "
            f"perhaps tools; it holds {str(value)[:80]}"
        )
    if not all(isinstance(message, dict) for message in messages):
        raise InputError(f"--messages {path}: every message should be an object")
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"--messages {path}: tools should be a list")
    return Scene(path.name, messages, tools)
