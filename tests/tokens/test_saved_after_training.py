"""Tokenizers as training scripts leave them: with truncation and padding switched on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from eyas.demo.server import TARGET
from eyas.tokens import Tokenizer, load_tokenizer


def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    shutil.copytree(TARGET, folder)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst",
                          "stride": 0}  # fmt: skip
    data["padding"] = {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None,
                       "pad_id": 505, "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


def test_prompts_are_neither_cut_nor_padded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = load_tokenizer(str(saved(tmp_path)))
    texts = ["What is 2+2, and why is it not 5 in any way?", "Hi"]
    assert [other.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert other.encode_batch(texts) == tokenizer.encode_batch(texts)
