"""Train the demo target from nothing: tokenizer, chat template, weights, both file formats.

One command and one seed make the whole of ``src/eyas/demo/target``. The weights are rounded to
bfloat16 before anything is written, so that the safetensors and the GGUF file hold the same
numbers and every engine that loads either serves the same model.

    pip install -r scripts/train-requirements.txt
    python scripts/train_demo_target.py

It takes about half an hour on two CPU cores. Seed, data and number of steps are fixed; what is
left to chance is the order in which a machine's threads add numbers up.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from eyas.demo import problems  # found through the line above

TARGET = ROOT / "src" / "eyas" / "demo" / "target"
SEED = 20
VOCABULARY = 512  # a multiple of 64, so that no engine pads it
CONTEXT = 2048
ROPE_THETA = 10_000.0
KEY_VALUE_HEADS = 2

# Special tokens are control tokens. The thinking markers are not special, as in the big reasoning
# models: a decoder that skips special tokens still shows them.
SPECIAL = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
THINKING = ("<think>", "</think>")

# Qwen2's way to cut text before merging, which llama.cpp knows as "qwen2". Digits stand alone.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{#- Switches: thinking (default true) lets the model reason before it answers;
    preserve_thinking (default false) keeps the reasoning of earlier answers. -#}
{%- for message in messages -%}
  {%- if message.content is not string -%}
    {{- raise_exception('The content of every message must be a string.') -}}
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {{- '<|user|>' + message.content + '<|end|>' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|assistant|><think>' -}}
    {%- if preserve_thinking is defined and preserve_thinking
          and message.reasoning_content is string -%}
      {{- message.reasoning_content -}}
    {%- endif -%}
    {{- '</think>' + message.content + '<|end|>' -}}
  {%- elif message.role == 'system' -%}
    {%- if not loop.first -%}
      {{- raise_exception('A system message can only be the first message.') -}}
    {%- endif -%}
    {{- '<|system|>' + message.content + '<|end|>' -}}
  {%- else -%}
    {{- raise_exception('Unknown role: this model knows system, user and assistant.') -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|><think>' -}}
  {%- if thinking is defined and not thinking -%}{{- '</think>' -}}{%- endif -%}
{%- endif -%}
"""

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Think step by step.",
    "Answer briefly.",
    "You are good at numbers and words.",
    "Give only the answer.",
    "Be correct and short.",
)


@dataclass(frozen=True, slots=True)
class Example:
    """One training sequence; ``learn`` is 1 on what the model itself has to write."""

    ids: list[int]
    learn: list[int]


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE whose digits are single ids and whose control strings are one id each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts: list[str] = []
    for problem in islice(problems.stream(SEED, "train"), 20_000):
        texts += [problem.question, problem.reasoning, problem.answer]
    texts += SYSTEM_TEXTS * 200
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(THINKING),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in THINKING])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


class Encoder:
    """Writes conversations as the chat template renders them, and knows who wrote which id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        names = {*SPECIAL, *THINKING}
        self._control = {name: id_of(tokenizer, name) for name in names}

    def conversation(self, rng: random.Random, source: Iterator[problems.Problem]) -> Example:
        """One to three turns; what the template makes of earlier reasoning varies."""
        turns = rng.choices((1, 2, 3), (55, 25, 20))[0]
        keeps_reasoning = rng.random() < 0.6
        ids: list[int] = []
        learn: list[int] = []

        def add(*pieces: str, learned: bool = False) -> None:
            for piece in pieces:
                control = self._control.get(piece)
                new = [control] if control is not None else self._encode(piece)
                ids.extend(new)
                learn.extend([int(learned)] * len(new))

        if rng.random() < 0.25:
            add("<|system|>", rng.choice(SYSTEM_TEXTS), "<|end|>")
        for turn in range(turns):
            problem = next(source)
            add("<|user|>", problem.question, "<|end|>", "<|assistant|>", "<think>")
            is_last = turn == turns - 1
            if rng.random() < 0.1 or not (is_last or keeps_reasoning):
                # Answered at once: asked for (learned), or history whose reasoning was dropped.
                add("</think>")
                add(problem.answer, "<|end|>", learned=is_last)
            else:
                add(problem.reasoning, "</think>", problem.answer, "<|end|>", learned=True)
        return Example(ids, learn)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


def id_of(tokenizer: Tokenizer, text: str) -> int:
    """The id of a control string; ``KeyError`` if there is none."""
    found: int | None = tokenizer.token_to_id(text)
    if found is None:
        raise KeyError(text)
    return found


def build_model() -> Qwen3ForCausalLM:
    """Eight small layers: EAGLE-3 takes hidden states from three of them."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=32,  # the smallest that vLLM's attention knows
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def batches(encoder: Encoder, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of about ``tokens`` ids, of conversations of like length, for ever.

    Conversations are padded on the right, where causal attention cannot see the padding, and
    sorted by length within a large pool first, so there is little of it.
    """
    rng = random.Random(SEED)
    source = problems.stream(SEED + 1, "train")
    while True:
        pool = sorted(
            (encoder.conversation(rng, source) for _ in range(4096)), key=lambda e: len(e.ids)
        )
        made: list[list[Example]] = [[]]
        for example in pool:
            if (len(made[-1]) + 1) * len(example.ids) > tokens:
                made.append([])
            made[-1].append(example)
        rng.shuffle(made)
        for batch in made:
            yield _padded([e.ids for e in batch]), _padded([e.learn for e in batch])


def _padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def train(model: Qwen3ForCausalLM, encoder: Encoder, steps: int, batch_tokens: int) -> None:
    """Train for a number of steps: a short warm-up, then a cosine down to 2% of the peak."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.05, momentum=0.95),
        torch.optim.AdamW(rest, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    start, tokens, smooth = time.monotonic(), 0, 0.0
    for step, (ids, learn) in enumerate(islice(batches(encoder, batch_tokens), steps)):
        done = step / steps
        warm_up = min(1.0, (step + 1) / 100)
        scale = warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * scale
        loss = batch_loss(model, ids, learn)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += ids.numel()
        smooth = loss.item() if step < 100 else 0.98 * smooth + 0.02 * loss.item()
        if step % 100 == 0:
            seconds = time.monotonic() - start
            left = seconds / 60 * (steps - step) / step if step else math.nan
            print(
                f"step {step:6}  loss {smooth:.4f}  {tokens / 1e6:6.2f}M tokens  "
                f"{tokens / seconds:6.0f}/s  {left:5.1f} min left",
                flush=True,
            )


def batch_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, learn: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the ids that the model has to write; logits are made for no others."""
    states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = learn[:, 1:].bool()
    return F.cross_entropy(model.lm_head(states[wanted]), ids[:, 1:][wanted])


def write_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """The ordinary Hugging Face folder, in bfloat16."""
    end, pad = id_of(tokenizer, "<|end|>"), id_of(tokenizer, "<|endoftext|>")
    model.config.eos_token_id = end
    model.config.pad_token_id = pad
    model.config.bos_token_id = None
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.95, top_k=40, eos_token_id=end, pad_token_id=pad
    )
    model.bfloat16()
    model.save_pretrained(TARGET)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(TARGET)
    settings = json.loads((TARGET / "tokenizer_config.json").read_text())
    # The name that transformers 4 knows too.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (TARGET / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (TARGET / "model.safetensors").chmod(0o644)


def write_gguf(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """The same model for llama.cpp: the same bfloat16 values, stored as float32."""
    config = model.config
    writer = gguf.GGUFWriter(TARGET / "model.gguf", "qwen3")
    writer.add_name("eyas demo target")
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)

    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda kv: kv[1])
    kinds = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL)
    kinds |= dict.fromkeys(THINKING, gguf.TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([text for text, _ in vocabulary])
    writer.add_token_types([kinds.get(text, gguf.TokenType.NORMAL) for text, _ in vocabulary])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    end, pad = id_of(tokenizer, "<|end|>"), id_of(tokenizer, "<|endoftext|>")
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    # The model has no BOS. Without an id of ours llama.cpp would assume the comma's to be it.
    writer.add_bos_token_id(pad)
    writer.add_pad_token_id(pad)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        new_name = names.get_name(name, try_suffixes=(".weight",))
        if new_name is None:
            raise ValueError(f"llama.cpp has no name for the tensor {name}")
        writer.add_tensor(new_name, tensor.to(torch.float32).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=2850, help="how long to train")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)

    TARGET.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    model = build_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, Encoder(tokenizer), arguments.steps, arguments.batch_tokens)
    write_checkpoint(model, tokenizer)
    write_gguf(model, tokenizer)
    for path in sorted(TARGET.iterdir()):
        print(f"{path.stat().st_size:10,}  {path.name}")


if __name__ == "__main__":
    main()
