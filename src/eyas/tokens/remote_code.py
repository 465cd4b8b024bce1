"""A model's own tokenizer code, run where the user trusts it and it is pinned.

Invariant: nothing here is called unless ``--trust-remote-code`` was said, and what is run is
pinned: by a commit for a hub name, by the hash of its files for a directory.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

from eyas.conversation import Message
from eyas.errors import TokenizerError
from eyas.tokens.model_files import code_files
from eyas.tokens.template_function import TemplateFunction
from eyas.tokens.tokenizer import Tokenizer, quiet_transformers

_COMMIT = re.compile(r"[0-9a-f]{40}")
_QUESTION: list[Message] = [{"role": "user", "content": "What is 2+2? Zürich 東京"}]


def require_pinned(source: str, revision: str | None) -> None:
    """Raise TokenizerError unless a tokenizer's code is pinned.

    Args:
        source: a directory, or a hub name.
        revision: the revision that was asked for.
    """
    if Path(source).is_dir() or _COMMIT.fullmatch(revision or ""):
        return
    raise TokenizerError(
        f"--trust-remote-code for {source} needs --revision with the 40 digits of a commit: "
        f"{f'{revision!r} may be' if revision else 'without one the code is'} another one tomorrow"
    )


def own_template(tokenizer: Tokenizer, directory: Path) -> TemplateFunction | None:
    """The tokenizer's own ``apply_chat_template``; None where its code has none of its own.

    Args:
        tokenizer: as eyas has it; the model's own code must make the same ids.
        directory: the model's files.

    Raises:
        TokenizerError: if the code cannot be loaded, or makes other ids of a text.
    """
    quiet_transformers()
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=True)
    except Exception as error:  # the model's own code may raise anything
        raise TokenizerError(
            f"tokenizer {directory}: its own code cannot be loaded ({type(error).__name__}: "
            f"{str(error)[:300]})"
        ) from error
    _require_same_ids(tokenizer, loaded, directory)
    if type(loaded).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        return None
    name = f"{type(loaded).__name__}.apply_chat_template"
    code = code_files(directory)
    written = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in code)
    template = loaded.chat_template if isinstance(loaded.chat_template, str) else ""

    def call(
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        switches: dict[str, Any],
        add_generation_prompt: bool,
    ) -> Any:
        return loaded.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **switches,
        )

    return TemplateFunction(
        name=name,
        call=call,
        source=f"{template}\n{written}",
        hash=_hash(directory, code, template),
        prompts_only=False,
        shows_date="strftime_now" in template,
    )


def _require_same_ids(tokenizer: Tokenizer, loaded: Any, directory: Path) -> None:
    """The model's own code is the reference for what a text's ids are."""
    text = "".join(list(tokenizer.control)[:2]) + str(_QUESTION[0]["content"])
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # Kimi's code warns of every argument of encode
    try:
        theirs = list(loaded.encode(text, add_special_tokens=False))
    except Exception as error:
        raise TokenizerError(
            f"tokenizer {directory}: its own code cannot encode a text "
            f"({type(error).__name__}: {str(error)[:300]})"
        ) from error
    finally:
        logging.disable(before)
    ours = tokenizer.encode(text)
    if theirs != ours:
        raise TokenizerError(
            f"tokenizer {directory}: of {text!r} its own code makes {theirs[:12]} and its files "
            f"make {ours[:12]}; code and files do not belong together"
        )


def _hash(directory: Path, code: list[Path], template: str) -> str:
    h = hashlib.sha256()
    for path in code:
        data = path.read_bytes()
        h.update(f"{path.relative_to(directory)}\0{len(data)}\0".encode())
        h.update(data)
    h.update(template.encode())
    return h.hexdigest()
