"""Control strings in what people write: found, and encoded as plain text where that is asked for.

Invariants of `escape`: no control id comes from a message or a tool; the ids stand for the very
text that the template makes; what the template itself writes keeps its ids; and a conversation
without control strings has the ids that it has anyway. What cannot be had so is refused.

How it is done. The template is rendered once as ever, and once with every control string of the
messages between two marks, which tells the strings that the template wrote from those that it
was given. The template's own are then replaced by characters that a second tokenizer has as added
tokens in their place, and which is the model's own otherwise: it knows no control string, so what
is left in the text is tokenized as ordinary text, in its context and with every merge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.tokens.encoded import Encoded, encode, placed
from eyas.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

POLICIES = ("allow", "escape", "refuse")

_NAMES, _BEFORE, _AFTER, _LAST = 0x100000, 0x106000, 0x10C000, 0x10FFFD
"""Private characters of Unicode's last plane, which texts hardly ever hold: names for control
strings, and marks before and after one. Each mark says of which string it is, so that one that
the template parted from its string is not taken for that of a neighbour."""


_Render = Callable[[list[Message], list[dict[str, Any]] | None], str | list[int]]


class CannotEscape(Exception):
    """Control text that cannot be written as plain text; the message says why."""


def texts_in(value: Any) -> Iterator[str]:
    """Every text inside a message or tool, names of arguments included, roles left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name != "role":
                yield name
                yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


def control_strings(tokenizer: Tokenizer, value: Any) -> list[str]:
    """The control strings in messages or tools, in order; empty for nearly all."""
    pattern = tokenizer.control_pattern
    if pattern is None:
        return []
    if not _may_hold(tokenizer, value):
        return []
    return pattern.findall("\0".join(texts_in(value)))


def _may_hold(tokenizer: Tokenizer, value: Any) -> bool:
    """A quick look at all texts together, as JSON; most rows hold no control string."""
    if _odd(tokenizer):
        return True
    try:
        whole = orjson.dumps(value).decode()
    except TypeError:  # half a surrogate pair, or a number of more than 64 bits
        return True
    return tokenizer.has_control_text(whole)


@lru_cache(maxsize=2)
def _odd(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Control strings that JSON would write in another way."""
    escaped = re.compile(r'["\\\x00-\x1f]')
    return tuple(text for text in tokenizer.control if text.strip() and escaped.search(text))


def given_text(messages: Sequence[Message]) -> list[Message]:
    """The messages that were given: all but the target's own answers."""
    return [message for message in messages if message.get("role") != "assistant"]


def escape(
    tokenizer: Tokenizer,
    render: _Render,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
) -> Encoded:
    """Prompt ids in which no control id comes from the messages or tools.

    Args:
        tokenizer: the model's own.
        render: the chat template.
        messages: all of the conversation, the target's own answers included.
        tools: definitions of tools.

    Raises:
        CannotEscape: where the template reads the control strings itself, or the tokenizer makes
            their ids of ordinary text.
        TemplateRefusal: as `render` does.
    """
    chat = list(messages)
    text = render(chat, tools)
    if not control_strings(tokenizer, [*chat, tools]):
        return encode(tokenizer, text) if isinstance(text, str) else placed(tokenizer, text)
    if not isinstance(text, str):
        raise CannotEscape("the template function makes ids, and decides itself what they are of")
    pattern = tokenizer.control_pattern
    assert pattern is not None
    held = "".join([text, *texts_in([*chat, tools])])
    if any(_NAMES <= ord(char) <= _LAST for char in set(held)):
        raise CannotEscape("it holds characters of Unicode's last private plane, too")
    number_of = {string: number for number, string in enumerate(_renamed(tokenizer)[1])}
    if len(number_of) > _LAST - _AFTER:
        raise CannotEscape(f"the vocabulary has {len(number_of):,} control strings")
    spans = _spans_given(pattern, number_of, render, chat, tools, text)
    return _encode(tokenizer, pattern, text, spans)


def _spans_given(
    pattern: re.Pattern[str],
    number_of: dict[str, int],
    render: _Render,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    text: str,
) -> list[tuple[int, int]]:
    """Where control strings of the messages stand in the rendered text."""
    for mark in _marks(pattern, number_of):
        try:
            rendered = render(_map(mark, messages), None if tools is None else _map(mark, tools))
        except TemplateRefusal:
            continue
        if not isinstance(rendered, str):
            continue
        spans, plain = _read_marks(pattern, number_of, rendered)
        if plain == text:
            return spans
    raise CannotEscape(
        "the chat template itself reads the control strings in the text, or changes them, so they "
        "cannot be told from its own"
    )


def _marks(pattern: re.Pattern[str], number_of: dict[str, int]) -> Iterator[Callable[[str], str]]:
    """Ways to mark control strings: on both sides, but not at the ends of a text (templates look
    how one begins and ends), and on one side."""

    def marked(text: str, *, ends: bool, before: bool, after: bool) -> str:
        def mark(found: re.Match[str]) -> str:
            string, number = found.group(), number_of[found.group()]
            at_start, at_end = found.start() == 0, found.end() == len(text)
            first = before and (ends or not at_start)
            last = after and (ends or not at_end or at_start)
            return (
                (chr(_BEFORE + number) if first else "")
                + string
                + (chr(_AFTER + number) if last else "")
            )

        return pattern.sub(mark, text)

    yield lambda text: marked(text, ends=True, before=True, after=True)
    yield lambda text: marked(text, ends=False, before=True, after=True)
    yield lambda text: marked(text, ends=True, before=True, after=False)
    yield lambda text: marked(text, ends=True, before=False, after=True)


def _map(change: Callable[[str], str], value: Any) -> Any:
    """A copy of messages or tools with every text changed, roles left out."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            change(name): inner if name == "role" else _map(change, inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_map(change, inner) for inner in value]
    return value


def _read_marks(
    pattern: re.Pattern[str], number_of: dict[str, int], rendered: str
) -> tuple[list[tuple[int, int]], str]:
    """The spans of marked control strings in the text without marks, and that text."""
    before, after = f"[{chr(_BEFORE)}-{chr(_AFTER - 1)}]", f"[{chr(_AFTER)}-{chr(_LAST)}]"
    spans: list[tuple[int, int]] = []
    plain: list[str] = []
    size = at = 0
    for found in re.finditer(
        f"({before})?({pattern.pattern})({after})?|{before}|{after}", rendered
    ):
        plain.append(rendered[at : found.start()])
        size += found.start() - at
        at = found.end()
        first, string, last = found.groups()
        if string is None:  # a mark whose string was cut away
            continue
        number = number_of[string]
        if first == chr(_BEFORE + number) or last == chr(_AFTER + number):
            spans.append((size, size + len(string)))
        plain.append(string)
        size += len(string)
    plain.append(rendered[at:])
    return spans, "".join(plain)


def _encode(
    tokenizer: Tokenizer, pattern: re.Pattern[str], text: str, given: list[tuple[int, int]]
) -> Encoded:
    """Ids of a text whose given control strings are ordinary text."""
    backend, name_of, id_of = _renamed(tokenizer)
    pieces: list[str] = []
    at = 0
    for first, end in [*given, (len(text), len(text))]:
        pieces.append(pattern.sub(lambda found: name_of[found.group()], text[at:first]))
        pieces.append(text[first:end])
        at = end
    encoding = backend.encode("".join(pieces), add_special_tokens=False)
    found = encoding.ids
    control = {tokenizer.control[string] for string in name_of}
    for index in found:
        if index not in id_of and index in control:
            raise CannotEscape(
                f"the tokenizer makes {tokenizer.name(index)} of ordinary text as well"
            )
    ids = [id_of.get(index, index) for index in found]
    if not tokenizer.changes_spaces and tokenizer.decode(ids) != text:
        raise CannotEscape("the ids would stand for another text")
    places = _places_in(text, pattern, given)
    return Encoded(text, ids, [(places[first], places[end]) for first, end in encoding.offsets])


def _places_in(text: str, pattern: re.Pattern[str], given: list[tuple[int, int]]) -> list[int]:
    """For each position in the text with the template's own strings renamed, the one in `text`."""
    places: list[int] = []
    at = 0
    for first, end in [*given, (len(text), len(text))]:
        for own in pattern.finditer(text, at, first):
            places += [*range(at, own.start()), own.start()]
            at = own.end()
        places += range(at, end)
        at = end
    return [*places, len(text)]


@lru_cache(maxsize=2)
def _renamed(tokenizer: Tokenizer) -> tuple[Backend, dict[str, str], dict[int, int]]:
    """The tokenizer with other texts for its control strings; it shares the model's vocabulary.

    Returns it, the new text of each control string, and the model's own id for each added id.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    own = tokenizer.backend
    backend = Backend(own.model)
    if own.normalizer is not None:
        backend.normalizer = own.normalizer
    if own.pre_tokenizer is not None:
        backend.pre_tokenizer = own.pre_tokenizer
    name_of: dict[str, str] = {}
    added: dict[str, int] = {}
    for index, token in sorted(own.get_added_tokens_decoder().items()):
        name = token.content
        if name.strip():
            name_of[token.content] = name = chr(_NAMES + len(name_of))
        flags = {flag: getattr(token, flag) for flag in _FLAGS}
        backend.add_tokens([AddedToken(name, special=token.special, **flags)])
        added[name] = index
    id_of = {}
    for name, index in added.items():
        new = backend.token_to_id(name)
        assert new is not None, "it was just added"
        id_of[new] = index
    return backend, name_of, id_of


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
