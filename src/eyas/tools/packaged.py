"""The readers of the package renderers, which take calls apart on ids for many model families.

Invariant: nothing that they raise leaves this module; an answer that they fail on is a fault of
the reading, said in a sentence. Nothing of them is imported before a conversation has tools.

Source: renderers 0.1, ``renderers.base`` (``create_renderer``, ``ParsedResponse``,
``ToolCallParseStatus``, ``MODEL_RENDERER_MAP``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from eyas.tokens import Tokenizer
from eyas.tools.calls import Call, Reading, json_object

EXTRA = "pip install 'eyas[tools]'"

_FETCHES = {"gpt-oss": "<|call|>"}
"""A renderer that fetches a vocabulary from the network when it is made: only for a tokenizer
with its control string."""


class PackagedReader:
    """One renderer of the package, for one tokenizer."""

    def __init__(self, name: str, renderer: Any) -> None:
        self.name = name
        self.renderer = renderer

    def read(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        tools: list[dict[str, Any]] | None,
    ) -> Reading:
        """The calls in an answer, as `parse_response` finds them."""
        try:
            parsed = self.renderer.parse_response(
                list(output_ids), prompt_ids=list(prompt_ids), tools=tools
            )
            calls = [_call(n, attempt) for n, attempt in enumerate(parsed.tool_calls, 1)]
        except _Unreadable as fault:
            return Reading(fault=str(fault))
        except Exception as error:  # a parser of a model's text may raise anything
            return Reading(fault=f"renderers ({self.name}) failed: {type(error).__name__}: {error}")
        return Reading(tuple(calls), (parsed.content or "").strip())


class _Unreadable(Exception):
    """One attempt of a call cannot be read."""


def _call(number: int, attempt: Any) -> Call:
    status = str(getattr(attempt.status, "value", attempt.status))
    arguments = {} if attempt.arguments in (None, "") else attempt.arguments
    if type(arguments) is str:
        arguments = json_object(arguments)
    if status != "ok" or type(arguments) is not dict or not attempt.name:
        if status == "ok":
            status = "arguments are no object"
        raise _Unreadable(f"call {number} cannot be read ({status}): {str(attempt.raw)[:160]!r}")
    return Call(attempt.name, arguments, attempt.id or None, _spelling(attempt.raw, arguments))


def _spelling(raw: str, arguments: dict[str, Any]) -> str | None:
    """The arguments' JSON as it stands in a call's text, where it does."""
    first, last = raw.find("{"), raw.rfind("}")
    text = raw[first : last + 1] if first >= 0 else ""
    return text if text and json_object(text) == arguments else None


def package_version() -> str | None:
    """The version of renderers; None where it is not installed."""
    try:
        return version("renderers")
    except PackageNotFoundError:
        return None


def packaged_readers(tokenizer: Tokenizer, model: str) -> Iterator[PackagedReader]:
    """Every renderer that can be made for a tokenizer, the one for the model's name first."""
    try:
        from renderers.base import MODEL_RENDERER_MAP, RENDERER_REGISTRY, _populate_registry
        from renderers.configs import config_from_name
    except ImportError:
        return
    _populate_registry()
    stand_in = _Tokenizer(tokenizer, model)
    known = MODEL_RENDERER_MAP.get(model)
    for name in sorted(RENDERER_REGISTRY, key=lambda name: (name != known, name)):
        if name == "default" or _FETCHES.get(name, "") not in ("", *tokenizer.control):
            continue
        try:
            yield PackagedReader(name, RENDERER_REGISTRY[name](stand_in, config_from_name(name)))
        except Exception:  # its control strings are not in this vocabulary
            continue


def typescript(tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> str | None:
    """The declarations of tools as Kimi-K2.5's own code writes them; None without renderers.

    Taken out of what the renderer makes of a conversation with these tools.
    """
    try:
        from renderers import KimiK25Renderer, KimiK25RendererConfig
    except ImportError:
        return None
    try:
        renderer = KimiK25Renderer(_Tokenizer(tokenizer, ""), KimiK25RendererConfig())
        text = tokenizer.decode(
            renderer.render([{"role": "user", "content": ""}], tools=tools).token_ids
        )
    except Exception:  # a schema that it does not know
        return None
    before, found, rest = text.partition("<|im_system|>tool_declare<|im_middle|>")
    declared, ended, _ = rest.partition("<|im_end|>")
    return declared if found and ended and not before else None


class _Tokenizer:
    """A tokenizer as the package wants it (``renderers.base.Tokenizer``)."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, model: str) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = model
        self.eos_token_id = tokenizer.eos_id

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode([ids] if isinstance(ids, int) else list(ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, list | tuple):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        return self._tokenizer.backend.token_to_id(tokens)
