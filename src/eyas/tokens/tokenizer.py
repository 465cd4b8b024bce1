"""The target's tokenizer: texts to ids, and ids to the bytes that they stand for.

Invariants: `encode` adds nothing that is not in the text (no second BOS); `pieces` joined over
any ids are the bytes that those ids stand for, specials included.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from eyas import core
from eyas.errors import TokenizerError
from eyas.ids import Ids
from eyas.tokens.model_files import ModelFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from eyas.tokens.template_function import TemplateFunction


@dataclass(eq=False)
class Tokenizer:
    """One model's vocabulary, with the little of its configuration that goes with it."""

    backend: Backend
    source: str
    """The directory, file or hub id that it was loaded from."""
    special_tokens_map: dict[str, str]
    """``bos_token`` and so on, as the chat template sees them."""
    chat_template: str | None
    files_hash: str
    """SHA-256 over the names and bytes of the tokenizer's files."""
    model: ModelFiles
    tool_template: str | None = None
    """A second template, for conversations with tools (``tool_use`` among named ones)."""
    template_function: TemplateFunction | None = None
    """What makes prompts in place of a chat template."""
    code: tuple[str, ...] = ()
    """Python files beside the tokenizer; none of them runs unless the user trusts it."""
    cleans_up_spaces: bool = False
    """``clean_up_tokenization_spaces``: engines may join "x !=" to "x!=" in their text."""
    control: dict[str, int] = field(init=False)
    """Every added token (special or not): its text and its one id."""
    size: int = field(init=False)
    """Largest id + 1."""

    def __post_init__(self) -> None:
        # Tokenizers that were saved after training often cut and pad without a word.
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder()
        self.control = {token.content: index for index, token in sorted(added.items())}
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1

    @property
    def makes_prompts(self) -> bool:
        """Whether there is a chat template, or a function in its place."""
        return self.chat_template is not None or self.template_function is not None

    @property
    def no_template(self) -> str:
        """That there is no chat template, and what can be done, as a sentence."""
        code = f" It may encode in Python only ({', '.join(self.code[:4])})." if self.code else ""
        return (
            f"tokenizer {self.source} has no chat template: neither chat_template.jinja nor "
            f"chat_template in tokenizer_config.json.{code} Give one with --chat-template FILE, a "
            "function (messages, tools, template_kwargs) with --chat-template module:function, or "
            "ready-made prompt_ids; --trust-remote-code runs the model's own code."
        )

    @property
    def is_byte_level(self) -> bool:
        """Whether its texts are written in GPT-2's byte alphabet, and decoding is known to be."""
        return self._bytes is not None

    @property
    def changes_spaces(self) -> bool:
        """Whether decoding, here or in an engine, may change spaces."""
        return self.cleans_up_spaces or self._bytes is None

    @property
    def vocab_size(self) -> int:
        """The bound for ids: the model's embedding if config.json tells it, else the tokenizer's.

        The embedding is often padded beyond the tokenizer; where it is smaller, an id beyond
        it would take the server down.
        """
        return self.model.vocab_size or self.size

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own eos. Not to be trusted as *the* stop id: Kimi-K2.5's is 163585,
        while its turns end with 163586."""
        text = self.special_tokens_map.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text. Control strings in it become control ids, as in serving."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once, on as many threads as the machine has."""
        if not texts:  # the backend would wake its threads
            return []
        batch = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def decode(self, ids: Sequence[int]) -> str:
        """Text with specials kept; bytes that are no UTF-8 become U+FFFD."""
        table = self._bytes
        if table is None:
            return self.backend.decode(list(ids), skip_special_tokens=False)
        return self.join(ids).decode("utf-8", "replace")

    def join(self, ids: Sequence[int]) -> bytes:
        """The bytes that ids stand for, specials included. Unknown ids stand for nothing."""
        table = self._bytes
        if table is None:
            return self.backend.decode(list(ids), skip_special_tokens=False).encode()
        if ids and min(ids) >= 0:  # a list's last entries have negative positions too
            with suppress(IndexError):
                return b"".join(map(table.__getitem__, ids))
        return b"".join(table[i] if 0 <= i < len(table) else b"" for i in ids)

    def is_blank(self, ids: Sequence[int]) -> bool:
        """Whether `join` gives nothing but white space."""
        blank = self._blank
        if blank is None:  # a few at a time, since nearly always the first ones tell
            return all(not self.join(ids[at : at + 8]).strip() for at in range(0, len(ids), 8))
        for i in ids:  # noqa: SIM110  # a generator costs as much as several ids
            if i not in blank and 0 <= i < self.size:
                return False
        return True

    def spells(self, ids: Ids, text: str) -> bool:
        """Whether `join` gives a text in UTF-8."""
        if self._bytes is None:
            return self.join(ids) == text.encode("utf-8", "surrogatepass")
        return core.spells(ids.data, *self._pieces, text)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """One byte string an id; joined they are what the ids stand for.

        Where the decoder is not byte-level the pieces are cut from decodes of a moving window,
        so that spaces that depend on the neighbour stay right; an id inside an unfinished
        character stands for nothing, the one that ends it for the whole.
        """
        table = self._bytes
        if table is not None:
            return [table[i] if 0 <= i < len(table) else b"" for i in ids]
        pieces: list[bytes] = []
        first = read = 0
        for end in range(1, len(ids) + 1):
            before, now = self.join(ids[first:read]), self.join(ids[first:end])
            unfinished = now.endswith("\ufffd".encode()) and end < len(ids)
            if unfinished or not now.startswith(before):
                pieces.append(b"")
                continue
            pieces.append(now[len(before) :])
            first, read = read, end
        return pieces

    def name(self, token_id: int) -> str:
        """An id's text for messages, such as ``'</think>' (163607)``."""
        if not 0 <= token_id < self.size:
            return f"no token ({token_id})"
        text = self.decode([token_id])
        return f"{text!r} ({token_id})"

    @cached_property
    def control_pattern(self) -> re.Pattern[str] | None:
        """Finds a control string in text, or None where there are no control strings.

        White space that some vocabularies add (runs of line feeds in Gemma's) is ordinary text.
        """
        longest_first = sorted(filter(str.strip, self.control), key=len, reverse=True)
        if not longest_first:
            return None
        return re.compile("|".join(map(re.escape, longest_first)))

    @cached_property
    def _control_prefixes(self) -> tuple[str, ...]:
        return tuple({text[:2] for text in self.control if text.strip()})

    def has_control_text(self, text: str) -> bool:
        """Whether a text holds a control string (the cheap test first: most texts do not)."""
        if not any(prefix in text for prefix in self._control_prefixes):
            return False
        pattern = self.control_pattern
        return pattern is not None and pattern.search(text) is not None

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """Each id's bytes for byte-level vocabularies (GPT-2's byte alphabet), else None.

        Joining a table's entries is several times faster than the backend's `decode`, which
        every row would pay for. The table is used only if it agrees with `decode` on a text
        with several scripts and on every control string.
        """
        if not self.backend.decoder or "ByteLevel" not in str(type(self.backend.decoder)):
            return None
        alphabet = {char: byte for byte, char in byte_alphabet().items()}
        table = [b""] * self.size
        added = set(self.control.values())
        for text, index in self.backend.get_vocab(with_added_tokens=False).items():
            if index in added:  # its text is literal, not written in the byte alphabet
                continue
            try:
                table[index] = bytes(alphabet[char] for char in text)
            except KeyError:
                return None
        for text, index in self.control.items():
            table[index] = text.encode()
        sample = self.encode("Zürich 東京 🦅\n\tif x >= 10:\r\n  return 'naïve'") + list(
            self.control.values()
        )
        joined = b"".join(table[i] for i in sample).decode("utf-8", "replace")
        if joined != self.backend.decode(sample, skip_special_tokens=False):
            return None
        return table

    @cached_property
    def _blank(self) -> Collection[int] | None:
        """The ids that stand for white space; None where that depends on their neighbours."""
        table = self._bytes
        if table is None:
            return None
        return frozenset(i for i, piece in enumerate(table) if not piece.strip())

    @cached_property
    def _pieces(self) -> tuple[bytes, bytes]:
        """The same bytes joined, and where those of each id end, as int32."""
        table = self._bytes or []
        return b"".join(table), array("i", accumulate(map(len, table))).tobytes()

    def check_control_strings(self) -> None:
        """Raise TokenizerError unless every control string is one id when encoded."""
        texts = list(self.control)
        for text, ids in zip(texts, self.encode_batch(texts), strict=True):
            if ids != [self.control[text]]:
                raise TokenizerError(
                    f"tokenizer {self.source}: the control string {text!r} should be the one id "
                    f"{self.control[text]}, but it encodes to {ids}. Prompts would be wrong; "
                    "check that tokenizer.json and tokenizer_config.json belong together."
                )


def quiet_transformers() -> None:
    """transformers says at import that torch is missing, which nobody here needs to know."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def byte_alphabet() -> dict[int, str]:
    """GPT-2's map from bytes to printable characters, as byte-level BPE files use it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    for extra, byte in enumerate(b for b in range(256) if b not in alphabet):
        alphabet[byte] = chr(256 + extra)
    return alphabet
