"""A tokenizer out of its model's own files, without running the model's code.

Invariant: every declared control string encodes to exactly its own id, or loading fails.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import TokenizerError
from eyas.tokens.gguf import tokenizer_from_gguf
from eyas.tokens.model_files import MODEL_FILES, code_files, hash_files, read_json, read_model_files
from eyas.tokens.template_files import JINJA, LEGACY, NAMED, TemplateText, template_of_directory
from eyas.tokens.tiktoken import load_tiktoken
from eyas.tokens.tokenizer import Tokenizer, quiet_transformers

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from eyas.tokens.template_function import TemplateFunction

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""The files that decide what a text's ids are; their bytes belong to the fingerprint."""

TEMPLATE_FILES = (JINJA, LEGACY, f"{NAMED}/*")


def load_tokenizer(
    source: str,
    *,
    chat_template: str | TemplateText | TemplateFunction | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer from a directory, a GGUF file or a hub id.

    Args:
        source: a directory with ``tokenizer.json`` (or Kimi's ``tiktoken.model``), a
            ``.gguf`` file, or a hub id such as ``Qwen/Qwen3-8B`` (``NAME@REVISION`` too).
        chat_template: a template, or a function, that replaces the model's own.
        revision: which commit, branch or tag of a hub id.
        trust_remote_code: run the model's own code for its prompts, if it has some; then a hub
            id needs a commit as its revision.

    Raises:
        TokenizerError: if there is no such tokenizer, or it needs the model's own code.
    """
    path = Path(source)
    if path.exists() and revision is not None:
        raise TokenizerError(f"--revision {revision} is for hub names; {source} lies here")
    name, at, said = source.partition("@")
    if at and not path.exists():
        source, revision = name, revision or said
    if trust_remote_code:
        from eyas.tokens.remote_code import require_pinned

        require_pinned(source, revision)
    directory = None
    if path.is_file() and path.suffix == ".gguf":
        tokenizer = tokenizer_from_gguf(path)
    else:
        directory = path if path.is_dir() else _download(source, revision, trust_remote_code)
        tokenizer = _from_directory(directory, source, trust_remote_code)
    if isinstance(chat_template, str):
        chat_template = TemplateText(chat_template)
    if isinstance(chat_template, TemplateText):
        tokenizer.chat_template, tokenizer.tool_template = chat_template
    elif chat_template is not None:
        tokenizer.template_function = chat_template
    elif trust_remote_code and directory is not None:
        from eyas.tokens.remote_code import own_template

        tokenizer.template_function = own_template(tokenizer, directory)
    tokenizer.check_control_strings()
    return tokenizer


def _from_directory(directory: Path, source: str, trusted: bool) -> Tokenizer:
    quiet_transformers()
    if (directory / "tokenizer.json").is_file():
        backend, special, template = _load_fast(directory)
    elif (directory / "tiktoken.model").is_file():
        backend, special = load_tiktoken(directory)
        template = None
    else:
        backend, special, template = _load_any(directory, source, trusted)
    written = template_of_directory(directory, template)
    return Tokenizer(
        backend=backend,
        source=source,
        special_tokens_map=special,
        chat_template=written.source if written else None,
        tool_template=written.tools if written else None,
        code=tuple(str(path.relative_to(directory)) for path in code_files(directory)),
        files_hash=hash_files(directory, TOKENIZER_FILES),
        model=read_model_files(directory),
        cleans_up_spaces=bool(
            read_json(directory / "tokenizer_config.json").get("clean_up_tokenization_spaces")
        ),
    )


def _load_fast(directory: Path) -> tuple[Backend, dict[str, str], Any]:
    from transformers import PreTrainedTokenizerFast

    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(str(directory))
    except Exception as error:  # its loaders raise anything from KeyError to RuntimeError
        raise TokenizerError(
            f"tokenizer {directory}: tokenizer.json or tokenizer_config.json cannot be read: "
            f"{error}. Fetch the files again, or name another directory with --tokenizer."
        ) from error
    return loaded.backend_tokenizer, dict(loaded.special_tokens_map), loaded.chat_template


def _load_any(directory: Path, source: str, trusted: bool) -> tuple[Backend, dict[str, str], Any]:
    """Older files (vocab.json, sentencepiece), converted by transformers; the model's own code
    only where it is trusted."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trusted)
        backend = loaded.backend_tokenizer
    except Exception as error:
        found = ", ".join(sorted(p.name for p in directory.iterdir())[:12]) or "nothing"
        without = "" if trusted else " without the model's own code (--trust-remote-code)"
        raise TokenizerError(
            f"tokenizer {source}: no tokenizer.json or tiktoken.model there, and transformers "
            f"cannot make a fast tokenizer of what there is ({found})"
            f"{without}: "
            f"{str(error).strip().splitlines()[0][:200] if str(error).strip() else error!r}. Give "
            "a directory that holds the model's tokenizer.json."
        ) from error
    return backend, dict(loaded.special_tokens_map), loaded.chat_template


def _download(source: str, revision: str | None, trusted: bool) -> Path:
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") != 1
    if looks_like_path or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise TokenizerError(
            f"tokenizer {source!r}: no such directory. Give the directory that holds the "
            "model's tokenizer.json (or tiktoken.model), or a hub id such as Qwen/Qwen3-8B."
        )
    quiet_transformers()
    from huggingface_hub import snapshot_download

    wanted = [*TOKENIZER_FILES, *MODEL_FILES, *TEMPLATE_FILES, *(["*.py"] if trusted else [])]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    except Exception as error:  # offline, unknown, gated: the hub's errors share no base
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise TokenizerError(
            f"tokenizer {source!r}{f' at {revision!r}' if revision else ''}: neither a directory "
            "here nor loadable from the hub "
            f"({type(error).__name__}: {first_line[:200]}). Give a directory with the model's "
            "tokenizer files, or check the name and the network."
        ) from error
