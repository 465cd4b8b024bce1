"""A text with its ids, and where in the text each of them stands.

Invariant: the places are those of the ids that are sent, whoever made them: the tokenizer of the
text, or a function that gives ids.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from eyas.tokens.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """A text with its ids."""

    text: str
    ids: list[int]
    places: list[tuple[int, int]]
    """Where in the text what each id stands for begins and ends; an id of a part of a character
    has the whole of it."""

    def behind(self, at: int) -> list[int]:
        """The ids that begin at a position or behind it."""
        first = next((n for n, (start, _) in enumerate(self.places) if start >= at), len(self.ids))
        return self.ids[first:]


def encode(tokenizer: Tokenizer, text: str) -> Encoded:
    """A text's ids; control strings in it become control ids, as in serving."""
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    return Encoded(text, encoding.ids, encoding.offsets)


def placed(tokenizer: Tokenizer, ids: list[int]) -> Encoded:
    """Ids that are there already, with the text that they stand for."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text: list[str] = []
    places: list[tuple[int, int]] = []
    end = 0
    for piece in tokenizer.pieces(ids):
        start = end
        text.append(decoder.decode(piece))
        end += len(text[-1])
        unfinished = bool(decoder.getstate()[0])
        places.append((start, end + unfinished))
    text.append(decoder.decode(b"", final=True))
    return Encoded("".join(text), ids, places)
