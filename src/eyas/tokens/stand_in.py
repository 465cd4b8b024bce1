"""A tokenizer for a template whose own is not at hand: bytes, and what looks like control strings.

Invariant: what a template's text shows can be found with it (which class it is of, whether it
rewrites history); ids, and whether a control string is one, are not facts of the real tokenizer.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import Any

from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.history import turn_end
from eyas.tokens.model_files import ModelFiles
from eyas.tokens.profile import Profile, build_profile
from eyas.tokens.role_headers import rendered
from eyas.tokens.scenes import Scenes, answer, user
from eyas.tokens.template_files import TemplateText
from eyas.tokens.tokenizer import Tokenizer, byte_alphabet

CONTROL = re.compile(
    r"\[e~\[|\]~b\]|\]~!b\[|<[|｜][^<>|｜\s'\"]{1,40}[|｜]?>|</?[\w:-]+[|]?>|\[/?[A-Z_]{2,30}\]"
    r"|\[\|[a-z_]{2,30}\|\]"
)
"""Shapes of control strings, as far as a template's text shows them."""

SPECIAL = {f"{name}_token": f"<|{name}_token|>" for name in ("bos", "eos", "unk", "pad")}
"""Shown where a template writes a token by its name."""


def stand_in(
    written: str | TemplateText,
    *,
    stop: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    date: dt.date | None = None,
) -> tuple[Tokenizer, ChatTemplate, Profile]:
    """A tokenizer for a template's text, the template with its special tokens, and their profile.

    Args:
        written: the template.
        stop: the control string that ends answers; where None, the one that history ends them with.
        kwargs: the template's switches.
        date: what it shows as the day.

    Raises:
        TokenizerError: if the template is not valid Jinja.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    source, tool_source = TemplateText(written) if isinstance(written, str) else written
    template = ChatTemplate(
        source, tool_source=tool_source, special_tokens_map=SPECIAL, kwargs=kwargs, date=date
    )
    alphabet = byte_alphabet()
    backend = Backend(models.BPE({alphabet[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    chat = rendered(template, [user(), answer(reasoning=None), user()]) or ""
    shown = "".join((source, tool_source or "", chat))
    strings = dict.fromkeys([*SPECIAL.values(), *CONTROL.findall(shown)])
    backend.add_tokens([AddedToken(text, normalized=False, special=True) for text in strings])
    tokenizer = Tokenizer(
        backend=backend,
        source="",
        special_tokens_map=SPECIAL,
        chat_template=source,
        files_hash="",
        model=ModelFiles(None, None, (), {}),
    )
    if stop is not None:
        stop_ids = [tokenizer.control[stop]]
        return tokenizer, template, build_profile(tokenizer, template, stop_token_ids=stop_ids)
    profile = build_profile(tokenizer, template)
    end = turn_end(tokenizer, Scenes(template, profile))
    if end is not None and len(end.ids) == 1:
        profile = build_profile(tokenizer, template, stop_token_ids=end.ids)
    return tokenizer, template, profile
