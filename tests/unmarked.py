"""The demo target's tokenizer as one that knows no thinking markers."""

from __future__ import annotations

import dataclasses
import json

from tokenizers import Tokenizer as Backend

from eyas.tokens import Tokenizer


def without_markers(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, but with no thinking markers in its vocabulary."""
    backend = json.loads(tokenizer.backend.to_str())
    backend["added_tokens"] = [t for t in backend["added_tokens"] if "think" not in t["content"]]
    for text in ("<think>", "</think>"):
        backend["model"]["vocab"].pop(text, None)
    return dataclasses.replace(tokenizer, backend=Backend.from_str(json.dumps(backend)))
