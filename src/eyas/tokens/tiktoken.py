"""Kimi's ``tiktoken.model``, converted once to a fast tokenizer without the model's code.

Invariant: the converted ids are those of the model's own ``tokenization_kimi.py``; a
vocabulary whose split pattern is not known is refused, never guessed.

Sources: the split pattern, the 256 ids above the ranks and the ``<|reserved_token_N|>`` names
are those of moonshotai's ``tokenization_kimi.py`` (Kimi-K2 to K2.6 and Moonlight share them);
conversion by transformers' `TikTokenConverter` reproduces its ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
RESERVED = 256
"""Ids above the ranks: named ones from tokenizer_config.json, reserved ones between."""

_CONVERSION = "1"
"""Raised when the conversion changes, so that cached results of older code are not used."""


def load_tiktoken(directory: Path) -> tuple[Backend, dict[str, str]]:
    """Convert (or take from the cache) the tiktoken vocabulary of a directory.

    Returns the fast tokenizer and the special tokens map for the chat template.

    Raises:
        TokenizerError: if it is not a Kimi vocabulary, whose split pattern alone is known.
    """
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"tokenizer {directory}: tiktoken.model is there, but tokenizer_config.json cannot "
            f"be read ({error}); it names the control tokens."
        ) from error
    code = str((config.get("auto_map") or {}).get("AutoTokenizer"))
    known = config.get("tokenizer_class") == "TikTokenTokenizer" and (
        "tokenization_kimi" in code or "tokenization_moonshot" in code
    )
    if not known:
        raise TokenizerError(
            f"tokenizer {directory}: its tiktoken.model is split by a pattern that stands only "
            f"in the model's own code ({code}), which eyas does not run. Only Kimi's is known; "
            "convert the tokenizer to a tokenizer.json and give that directory."
        )
    vocabulary = (directory / "tiktoken.model").read_bytes()
    declared = json.dumps(config.get("added_tokens_decoder", {}), sort_keys=True).encode()
    stamp = hashlib.sha256(
        b"\0".join((_CONVERSION.encode(), KIMI_PATTERN.encode(), declared, vocabulary))
    ).hexdigest()
    cached = cache_directory() / f"tiktoken-{stamp[:32]}.json"
    backend = _read_cache(cached)
    if backend is None:
        backend = _convert(directory / "tiktoken.model", config)
        _write_cache(cached, backend)
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if isinstance(text := config.get(name), str)
    }
    return backend, special


def _convert(path: Path, config: dict[str, dict[str, dict[str, object]]]) -> Backend:
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    try:
        backend: Backend = TikTokenConverter(str(path), KIMI_PATTERN).converted()
    except Exception as error:
        raise TokenizerError(f"{path} cannot be read as a tiktoken vocabulary: {error}") from error
    declared = {int(index): spec for index, spec in config["added_tokens_decoder"].items()}
    first = backend.get_vocab_size(with_added_tokens=False)
    tokens = []
    for index in range(first, first + RESERVED):
        spec = declared.get(index, {"content": f"<|reserved_token_{index}|>", "special": True})
        tokens.append(
            AddedToken(str(spec["content"]), special=bool(spec.get("special")), normalized=False)
        )
    backend.add_tokens(tokens)
    for index, spec in declared.items():
        if backend.token_to_id(str(spec["content"])) != index:
            raise TokenizerError(
                f"{path}: {spec['content']!r} should have the id {index}, but the conversion "
                f"gives it {backend.token_to_id(str(spec['content']))}; the vocabulary and "
                "tokenizer_config.json do not belong together."
            )
    return backend


def cache_directory() -> Path:
    """``$EYAS_CACHE``, else ``$XDG_CACHE_HOME/eyas``, else ``~/.cache/eyas``."""
    if chosen := os.environ.get("EYAS_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "eyas"


def _read_cache(path: Path) -> Backend | None:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception:  # absent, or torn by a crash: the conversion is simply made again
        return None


def _write_cache(path: Path, backend: Backend) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tiktoken-")
        os.close(handle)
        backend.save(temporary, pretty=False)
        os.replace(temporary, path)
    except OSError:  # a cache that cannot be written costs seconds at the next start, no more
        return
