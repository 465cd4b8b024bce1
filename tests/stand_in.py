"""A tokenizer for templates whose own is not at hand: the demo target's, with their markers."""

from __future__ import annotations

import dataclasses
import json
import re

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile
from eyas.tokens.history import turn_end
from eyas.tokens.scenes import Scenes

CONTROL = re.compile(
    r"\[e~\[|\]~b\]|\]~!b\[|<[|｜][^<>|｜\s'\"]{1,40}[|｜]?>|</?[\w:-]+[|]?>|\[/?[A-Z_]{2,30}\]"
)
"""Shapes of control strings, as far as a template's text shows them."""


def without_markers(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, but with no thinking markers in its vocabulary."""
    backend = json.loads(tokenizer.backend.to_str())
    backend["added_tokens"] = [t for t in backend["added_tokens"] if "think" not in t["content"]]
    for text in ("<think>", "</think>"):
        backend["model"]["vocab"].pop(text, None)
    return dataclasses.replace(tokenizer, backend=Backend.from_str(json.dumps(backend)))


def stand_in(
    plain: Tokenizer, source: str, *, stop: str | None = None
) -> tuple[Tokenizer, ChatTemplate, Profile]:
    """`plain` (from `without_markers`) with a template's control strings; a stop id is `stop`, or
    what its history ends an answer with, unless the template writes the tokenizer's eos."""
    special = {"bos_token": "<|BOS|>", "eos_token": "<|EOS|>"}
    backend = Backend.from_str(plain.backend.to_str())
    strings = dict.fromkeys([*special.values(), *CONTROL.findall(source)])
    backend.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in strings])
    tokenizer = dataclasses.replace(
        plain, backend=backend, special_tokens_map=special, chat_template=source
    )
    template = ChatTemplate.of(tokenizer)
    if stop is not None:
        stop_ids = [tokenizer.control[stop]]
        return tokenizer, template, build_profile(tokenizer, template, stop_token_ids=stop_ids)
    profile = build_profile(tokenizer, template)
    end = turn_end(tokenizer, Scenes(template, profile))
    if end is not None and len(end.ids) == 1:
        profile = build_profile(tokenizer, template, stop_token_ids=end.ids)
    return tokenizer, template, profile
