"""A tokenizer from the metadata of a GGUF file, for targets that exist only as GGUF.

Invariant: only pre-tokenizers whose splitting is known are accepted; any other is refused.

Source of the rules: llama.cpp's ``llama-vocab.cpp`` (``tokenizer.ggml.pre``).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from eyas.errors import TokenizerError
from eyas.tokens.model_files import ModelFiles
from eyas.tokens.tokenizer import Tokenizer

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4
"""llama.cpp's token types for special tokens and for added ones that are not special."""


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """Build a byte-level BPE tokenizer from a GGUF file's ``tokenizer.ggml.*`` fields.

    Raises:
        TokenizerError: if the ``gguf`` package is missing, or the file's kind is not known.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise TokenizerError(
            f"reading the tokenizer of {path} needs the package gguf: pip install 'eyas[demo]'"
        ) from error
    try:
        fields = GGUFReader(str(path)).fields
    except (OSError, ValueError, IndexError) as error:
        raise TokenizerError(f"{path} cannot be read as GGUF: {error}") from error

    def value(name: str) -> Any:
        return fields[name].contents() if name in fields else None

    model, pre = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in {"smollm", "qwen2"}:
        raise TokenizerError(
            f"{path}: its tokenizer is of the kind {model}/{pre}; only byte-level BPE with the "
            "pre-tokenizers smollm and qwen2 can be read from GGUF. Give the directory of the "
            "original model instead."
        )
    tokens: list[str] = value("tokenizer.ggml.tokens")
    types: list[int] = value("tokenizer.ggml.token_type")
    arch = value("general.architecture")
    eos = value("tokenizer.ggml.eos_token_id")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        name: tokens[index]
        for name, short in names.items()
        if isinstance(index := value(f"tokenizer.ggml.{short}_token_id"), int)
    }
    context = value(f"{arch}.context_length")
    return Tokenizer(
        backend=_backend(tokens, types, value("tokenizer.ggml.merges"), pre),
        source=str(path),
        special_tokens_map=special,
        chat_template=value("tokenizer.chat_template"),
        files_hash=hashlib.sha256(path.read_bytes()).hexdigest(),
        model=ModelFiles(
            vocab_size=len(tokens),
            context_length=context if isinstance(context, int) else None,
            eos_ids=(eos,) if isinstance(eos, int) else (),
            sampling={},
        ),
    )


def _backend(tokens: list[str], types: list[int], merges: list[str], pre: str) -> Any:
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {text: index for index, text in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Backend(models.BPE(vocabulary, pairs))
    split = (
        pre_tokenizers.Digits(individual_digits=True)
        if pre == "smollm"
        else pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
    )
    use_regex = pre == "smollm"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(text, special=kind == _CONTROL, normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend
