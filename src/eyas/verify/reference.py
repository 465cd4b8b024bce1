"""What the checks of training data need to know of a target beyond its profile.

Invariant: all of it is found by rendering and encoding with the target's own files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from eyas.errors import TemplateRefusal
from eyas.tokens import ChatTemplate, Profile, Tokenizer


@dataclass
class Reference:
    """A target's files, and what follows from them."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    profile: Profile
    bos: int | None = None
    prompt_has_bos: bool | None = None
    """Whether a rendered prompt begins with the BOS; None where it is not known."""
    defaults_add_bos: bool = False
    """Whether ``tokenizer(text)`` puts a BOS in front."""
    generation_prompt: list[int] = field(default_factory=list)
    """The ids that the generation prompt adds; empty where they could not be found."""

    def __post_init__(self) -> None:
        profile, tokenizer = self.profile, self.tokenizer
        text = tokenizer.special_tokens_map.get("bos_token")
        known = None if text is None else tokenizer.control.get(text)
        self.bos = profile.bos_ids[0] if profile.bos_ids else known
        if self.bos is not None:
            self.defaults_add_bos = tokenizer.backend.encode("x").ids[:1] == [self.bos]
        if self.template is None:
            return
        chat = [{"role": "user", "content": "Hi"}]
        try:
            prompt = tokenizer.encode(self.template.render(chat))
            self.prompt_has_bos = prompt[:1] == [self.bos] if self.bos is not None else None
            history = tokenizer.encode(self.template.render(chat, add_generation_prompt=False))
        except TemplateRefusal:
            return
        if len(history) < len(prompt) and prompt[: len(history)] == history:
            self.generation_prompt = prompt[len(history) :]

    @cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """The strings of the stop ids."""
        texts = (self.tokenizer.decode([i]) for i in sorted(self.profile.stop_ids))
        return tuple(text for text in texts if text.strip())

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of control strings: no other id merges across them."""
        return frozenset(self.tokenizer.control.values())

    @cached_property
    def marker_texts(self) -> tuple[str, ...]:
        """The thinking markers."""
        markers = (self.profile.opener, self.profile.closer)
        return tuple(marker.text for marker in markers if marker is not None)

    @cached_property
    def control_text(self) -> re.Pattern[str] | None:
        """Finds a control string in text, the thinking markers left out."""
        texts = [text for text in self.tokenizer.control if text not in self.marker_texts]
        texts.sort(key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    @property
    def reasons(self) -> bool:
        """Whether the generation prompt itself opens the reasoning."""
        return self.profile.reasoning == "open" and self.profile.opener is not None

    def closed_before(self, ids: list[int], end: int) -> bool:
        """Whether the ids before `end` are an empty thinking block, perhaps with space in it."""
        opener, closer = self.profile.opener, self.profile.closer
        if opener is None or closer is None:
            return False
        tail = self.tokenizer.join(ids[max(0, end - 24) : end]).rstrip()
        if not tail.endswith(closer.text.encode()):
            return False
        return tail[: -len(closer.text.encode())].rstrip().endswith(opener.text.encode())

    def around(self, ids: list[int], at: int) -> str:
        """The ids around a position with their texts, for messages."""
        first = max(0, at - 2)
        return " ".join(self.tokenizer.name(i) for i in ids[first : at + 3])
