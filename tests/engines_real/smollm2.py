"""Turn the GGUF file of SmolLM2-135M-Instruct into a checkpoint that SGLang and vLLM serve.

Invariant: what is written holds the GGUF file's weights, tokenizer and template, and the copy of
the file itself as ``model.gguf``, so that every engine serves one model. It runs in an engine's
environment (`servers.run_script`).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2 as safetensors.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    unfinished = given.directory.with_name(given.directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    source = {"pretrained_model_name_or_path": given.gguf.parent, "gguf_file": given.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # What is read from GGUF cuts as GPT-2 does; SmolLM2 takes digits apart first, as llama.cpp
    # knows ("smollm" in its llama-vocab.cpp).
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.copy(given.gguf, unfinished / "model.gguf")
    shutil.rmtree(given.directory, ignore_errors=True)
    unfinished.rename(given.directory)


if __name__ == "__main__":
    main()
