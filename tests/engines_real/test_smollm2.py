"""A real chat model with 49,152 ids on every engine, in bfloat16 (llama.cpp: its four-bit file)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

import pytest

from capturing import write_prompts
from engines_real.asking import ask, prompt_ids, tokenizer_of
from engines_real.servers import Served, SetUp
from eyas import CaptureConfig, Run, capture
from eyas.demo.prompts import CHAT_PROMPTS
from eyas.engines import Generation, Request, Sampling, Scores

ENGINES = [SetUp(engine, "smollm2", dtype="bfloat16") for engine in ("llama_cpp", "sglang", "vllm")]
BUDGET = 32
TEXTS = (
    "What is 2+2?",
    "12345 3.14 1e-5 ½ ²³ ٣٤٥",
    "don't I'LL naïve  日本語 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
    " a\n\n\tb\r\n  ",
)

every = pytest.mark.parametrize("served", ENGINES, indirect=True, ids=str)
scoring = pytest.mark.parametrize("served", ENGINES[1:], indirect=True, ids=str)


@every
def test_it_tokenizes_as_we_do(served: Served) -> None:
    tokenizer = tokenizer_of(served)
    for text in TEXTS:
        assert ask(served, lambda engine, text=text: engine.tokenize(text)) == tokenizer.encode(
            text
        )


@every
def test_a_capture_of_cut_and_whole_answers(served: Served, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(served)
    questions = ["Say only: yes.", *CHAT_PROMPTS[:3]]
    rows = [{"id": f"q{at}", "prompt": question} for at, question in enumerate(questions)]
    summary = capture(
        CaptureConfig(
            prompts=[str(write_prompts(tmp_path / "prompts.jsonl", rows))],
            out=str(tmp_path / "run"),
            url=served.url,
            tokenizer=str(served.model),
            max_new_tokens=BUDGET,
            temperature=0.0,
            logprobs=True,
        )
    )
    assert (summary.done, summary.rejected) == (len(questions), 0)
    for row in Run(tmp_path / "run").traces():
        assert row.prompt_ids == prompt_ids(tokenizer, questions[int(row.conversation_id[1:])])
        assert len(row.logprobs or ()) == len(row.output_ids)
        if row.complete:
            assert tokenizer.decode(row.output_ids[-1:]) == "<|im_end|>"
        else:
            assert (len(row.output_ids), row.marks) == (BUDGET, ["truncated"])


@scoring
def test_decoding_and_prefill_differ_by_little(served: Served) -> None:
    tokenizer = tokenizer_of(served)
    prompts = [prompt_ids(tokenizer, question) for question in CHAT_PROMPTS[:4]]

    async def both(engine):  # type: ignore[no-untyped-def]
        asked = (Request(p, BUDGET, at, logprobs=True) for at, p in enumerate(prompts))
        made = await asyncio.gather(*(engine.generate(request) for request in asked))
        again = [
            await engine.score([*p, *g.output_ids], start=len(p))
            for p, g in zip(prompts, made, strict=True)
        ]
        return made, again

    made: list[Generation]
    again: list[Scores | None]
    made, again = ask(served, both, Sampling(temperature=1.0))
    apart: list[float] = []
    for g, scores in zip(made, again, strict=True):
        assert scores is not None
        assert scores.ids == g.output_ids
        pairs = zip(scores.logprobs, g.logprobs or (), strict=True)
        apart += [abs(second - first) for second, first in pairs]
    # Measured: up to 0.31, half of them below 0.03.
    assert max(apart) < 1.0
    assert median(apart) < 0.1
