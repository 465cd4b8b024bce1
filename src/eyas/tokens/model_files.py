"""What lies beside a tokenizer: the model's configuration, and the hash of files.

Invariant: a file that is not there says nothing; one that is no JSON is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import TokenizerError

MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(slots=True, frozen=True)
class ModelFiles:
    """What config.json and generation_config.json say, as far as capturing needs it."""

    vocab_size: int | None
    """Rows of the embedding; often padded beyond the tokenizer."""
    context_length: int | None
    eos_ids: tuple[int, ...]
    """Stop ids of config.json and generation_config.json, united as SGLang and vLLM do."""
    sampling: dict[str, float]
    """generation_config.json's temperature, top_p, top_k, min_p, repetition_penalty."""


def hash_files(directory: Path, names: Sequence[str]) -> str:
    """SHA-256 over the names and bytes of those files that exist."""
    h = hashlib.sha256()
    for name in names:
        path = directory / name
        if path.is_file():
            data = path.read_bytes()
            h.update(f"{name}\0{len(data)}\0".encode())
            h.update(data)
    return h.hexdigest()


def code_files(directory: Path) -> list[Path]:
    """Python files of a directory and of the folders in it, in order."""
    return sorted([*directory.glob("*.py"), *directory.glob("*/*.py")])


def read_model_files(directory: Path) -> ModelFiles:
    """Read config.json and generation_config.json; both may be absent."""
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json")
    text = config.get("text_config")
    inner: dict[str, Any] = text if isinstance(text, dict) else {}
    eos: dict[int, None] = {}
    for value in (config.get("eos_token_id", inner.get("eos_token_id")),
                  generation.get("eos_token_id")):  # fmt: skip
        for index in value if isinstance(value, list) else [value]:
            if isinstance(index, int):
                eos[index] = None
    sampling = {
        name: generation[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if isinstance(generation.get(name), int | float)
    }
    return ModelFiles(
        vocab_size=_int(config.get("vocab_size", inner.get("vocab_size"))),
        context_length=_int(
            config.get("max_position_embeddings", inner.get("max_position_embeddings"))
        ),
        eos_ids=tuple(eos),
        sampling=sampling,
    )


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
