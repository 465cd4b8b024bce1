"""Make a variant of the demo target that writes its own ``<think>``, with newlines around it.

The demo target's template writes the opener, and the model was never taught to: after
``<|assistant|>`` it does not write ``<think>`` by itself. This continues its training for a
minute or two, on the same problems in the form that Qwen3 has, where the generation prompt ends
with the role, and the model writes ``<think>\\n…\\n</think>\\n\\n…<|end|>``.

Invariant: ids, vocabulary and architecture stay the demo target's; weights, template and nothing
else differ. It runs in an engine's environment (torch, transformers, gguf), never in the suite's,
with the project's scripts on the path (`servers.run_script`).
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3ForCausalLM

import train_demo_target as demo  # first: it puts the package on the path
from eyas.demo import problems

STEPS = 100
BATCH_TOKENS = 4096
PEAK = 1.5e-3

TEMPLATE = """\
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|assistant|>' + message.content.split('</think>')[-1].lstrip('\\n') + '<|end|>' -}}
  {%- else -%}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


class Encoder(demo.Encoder):
    """Conversations as ``TEMPLATE`` renders them and as the variant is to write them."""

    def conversation(self, rng: random.Random, source: Iterator[problems.Problem]) -> demo.Example:
        ids: list[int] = []
        learn: list[int] = []

        def add(*pieces: str, learned: bool = False) -> None:
            for piece in pieces:
                control = self._control.get(piece)
                new = [control] if control is not None else self._encode(piece)
                ids.extend(new)
                learn.extend([int(learned)] * len(new))

        if rng.random() < 0.2:
            add("<|system|>", rng.choice(demo.SYSTEM_TEXTS), "<|end|>")
        for _ in range(rng.choices((0, 1, 2), (70, 20, 10))[0]):
            problem = next(source)
            add("<|user|>", problem.question, "<|end|>", "<|assistant|>", problem.answer, "<|end|>")
        problem = next(source)
        add("<|user|>", problem.question, "<|end|>", "<|assistant|>")
        if rng.random() < 0.1:
            add("<think>", "\n\n", "</think>", "\n\n")
            add(problem.answer, "<|end|>", learned=True)
        else:
            add("<think>", "\n", problem.reasoning, "\n", "</think>", "\n\n", problem.answer,
                "<|end|>", learned=True)  # fmt: skip
        return demo.Example(ids, learn)


def train(model: Qwen3ForCausalLM, encoder: Encoder) -> None:
    """A short warm-up, then straight down to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.0)
    for step, (ids, learn) in enumerate(islice(demo.batches(encoder, BATCH_TOKENS), STEPS)):
        optimizer.param_groups[0]["lr"] = PEAK * min((step + 1) / 10, (STEPS - step) / STEPS)
        loss = demo.batch_loss(model, ids, learn)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the variant that writes its opener.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(demo.SEED)
    tokenizer = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float32)
    train(model, Encoder(tokenizer))
    # The writers of the demo target write into the module's own directory; here it is another.
    unfinished = given.directory.with_name(given.directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    demo.TARGET, demo.CHAT_TEMPLATE = unfinished, TEMPLATE
    demo.write_checkpoint(model, tokenizer)
    demo.write_gguf(model, tokenizer)
    shutil.rmtree(given.directory, ignore_errors=True)
    unfinished.rename(given.directory)


if __name__ == "__main__":
    main()
