"""A row token by token, for people.

Invariant: what a model or a file wrote cannot move the cursor, change colours of its own or
hide: control characters are shown as escapes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from eyas.tokens import Profile, Tokenizer
    from eyas.trace import Rejected, Trace

_UNSAFE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

STYLES = {
    "prompt": "36",
    "reasoning": "33",
    "closer": "1;35",
    "answer": "32",
    "stop": "1;31",
}
"""ANSI colours of the parts: cyan, yellow, magenta, green, red."""


class Part(NamedTuple):
    """One stretch of a row."""

    name: str
    ids: list[int]


def printable(text: str) -> str:
    """Text whose control characters are shown as escapes; line breaks stay."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def parts_of(
    prompt: list[int], output: list[int], profile: Profile, tokenizer: Tokenizer
) -> list[Part]:
    """The prompt, reasoning, closer, answer and stop token, as far as there are."""
    n, ids = len(prompt), prompt + output
    start, end, content, _ = profile.spans(tokenizer, prompt, output)
    last = len(ids) - 1 if output and output[-1] in profile.stop_ids else len(ids)
    found = [Part("prompt", prompt)]
    if start is not None:
        reasoning_end = last if end is None else end
        found.append(Part("reasoning", ids[n:reasoning_end]))
        if end is not None:
            found.append(Part("closer", ids[end:content]))
    else:
        content = n
    found.append(Part("answer", ids[content:last]))
    found.append(Part("stop", ids[last:]))
    return [part for part in found if part.ids]


def use_color(stream: TextIO) -> bool:
    """Colour on a terminal, unless NO_COLOR says no; FORCE_COLOR says yes anywhere."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def print_row(
    row: Trace | Rejected,
    profile: Profile,
    tokenizer: Tokenizer,
    *,
    ids: bool = False,
    stream: TextIO = sys.stdout,
) -> None:
    """Print a row part by part, tokens parted by ``·`` (with their ids if asked)."""
    print_parts(
        list(row.prompt_ids or ()), list(row.output_ids or ()), profile, tokenizer, ids=ids,
        stream=stream,
    )  # fmt: skip


def print_parts(
    prompt: list[int],
    output: list[int],
    profile: Profile,
    tokenizer: Tokenizer,
    *,
    ids: bool = False,
    stream: TextIO = sys.stdout,
) -> None:
    """Print ids part by part; see `print_row`."""
    color = use_color(stream)
    for part in parts_of(prompt, output, profile, tokenizer):
        label = f"{part.name} ({len(part.ids)})"
        code = STYLES[part.name]
        print(f"\x1b[{code};7m {label} \x1b[0m" if color else f"-- {label}", file=stream)
        for line in _lines(part.ids, tokenizer, ids_shown=ids):
            print(f"\x1b[{code}m{line}\x1b[0m" if color else line, file=stream)


def print_tokens(
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    *,
    ids: bool = False,
    stream: TextIO = sys.stdout,
) -> None:
    """Print ids as tokens parted by ``·``, control tokens apart by their colour."""
    control = frozenset(tokenizer.control.values()) if use_color(stream) else frozenset()
    for line in _lines(tokens, tokenizer, ids_shown=ids, control=control):
        print(line, file=stream)


def print_text(text: str, control: re.Pattern[str] | None, stream: TextIO = sys.stdout) -> None:
    """Print a text with its line ends shown, control strings apart by their colour."""
    color = use_color(stream) and control is not None
    for line in printable(text).splitlines(keepends=True):
        shown = line.replace("\n", "⏎")
        if color and control is not None:
            shown = control.sub(lambda found: _in_color(found.group()), shown)
        print(shown, file=stream)


def _in_color(text: str) -> str:
    return f"\x1b[{STYLES['closer']}m{text}\x1b[0m"


def _lines(
    ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    ids_shown: bool,
    control: frozenset[int] = frozenset(),
) -> Iterator[str]:
    """Lines of tokens; a token that ends in a line break ends its line."""
    line: list[str] = []
    for index, text in zip(ids, token_texts(ids, tokenizer), strict=True):
        shown = text.replace("\n", "⏎")
        shown = f"{shown}[{index}]" if ids_shown else shown
        line.append(_in_color(shown) if index in control else shown)
        if text.endswith("\n") or len(line) >= (_IDS_A_LINE if ids_shown else _TOKENS_A_LINE):
            yield "·".join(line)
            line = []
    if line:
        yield "·".join(line)


_TOKENS_A_LINE, _IDS_A_LINE = 40, 12


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """What each id stands for, safe to print; bytes of split characters as ``\\xNN``."""
    texts = []
    for piece in tokenizer.pieces(ids):
        try:
            texts.append(printable(piece.decode("utf-8")))
        except UnicodeDecodeError:
            texts.append("".join(f"\\x{byte:02x}" for byte in piece))
    return texts
