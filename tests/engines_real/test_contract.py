"""What eyas relies on, asked of every real engine: ids in, ids out, and honest counts.

The demo target runs in float32 here, so that engines that add numbers up in another order still
choose the same ids at temperature 0.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from capturing import write_prompts
from engines_real import servers
from engines_real.asking import GREEDY, ask, generate, prompt_ids, tokenizer_of
from engines_real.servers import Served, SetUp
from eyas import CaptureConfig, Run, capture
from eyas.demo.problems import generate as problems
from eyas.demo.server import TARGET
from eyas.engines import Request, Sampling
from eyas.errors import RequestRefused
from eyas.tokens import Tokenizer

END, OPENER, CLOSER = 506, 510, 511
SIZE = 512
ENGINES = [SetUp("llama_cpp"), SetUp("sglang"), SetUp("vllm")]
SCORING = ENGINES[1:]
REQUIREMENTS = servers.HERE.parents[1] / "requirements" / "engines"
QUESTIONS = ["What is 2+2?", *(p.question for p in problems(11, 19, "held_out"))]

every = pytest.mark.parametrize("served", ENGINES, indirect=True, ids=str)
scoring = pytest.mark.parametrize("served", SCORING, indirect=True, ids=str)


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    """What the demo target answers at temperature 0, by llama.cpp in float32."""
    with servers.serve("llama_cpp", TARGET) as served:
        yield [
            generate(served, prompt_ids(tokenizer, question)).output_ids for question in QUESTIONS
        ]


@every
def test_it_is_recognised_and_says_who_it_is(served: Served) -> None:
    async def both(engine):  # type: ignore[no-untyped-def]
        return engine.name, await engine.identify()

    name, info = ask(served, both)
    assert (name, info.engine) == (served.engine, served.engine)
    assert str(served.model) in (info.model or "")
    assert info.context_length == servers.CONTEXT
    if served.engine != "llama_cpp":
        assert info.version == pinned_version(served.engine)


def pinned_version(engine: str) -> str:
    lock = (REQUIREMENTS / f"{engine}.lock").read_text(encoding="utf-8")
    found = re.search(rf"^{engine}(?:-cpu)?==(\S+)", lock, flags=re.MULTILINE)
    assert found is not None
    return found[1]


@every
def test_an_answer_holds_its_stop_token_and_counts_it(served: Served, tokenizer: Tokenizer) -> None:
    prompt = prompt_ids(tokenizer, "What is 2+2?")
    g = generate(served, prompt)
    assert g.finish_reason == "stop"
    assert g.output_ids[-1] == END
    assert g.output_ids.count(END) == 1
    assert g.output_ids.count(CLOSER) == 1
    assert (g.prompt_tokens, g.completion_tokens) == (len(prompt), len(g.output_ids))
    assert tokenizer.decode(g.output_ids).endswith("</think>4<|end|>")
    assert g.refusal is None
    if g.names_stop:
        assert g.matched == END
    if g.prompt_echo is not None:
        assert g.prompt_echo == prompt
    assert (g.prompt_echo is None) == (served.engine == "llama_cpp")
    if g.text is not None:
        assert g.text == tokenizer.decode(g.output_ids[:-1])


@every
@pytest.mark.parametrize("budget", [1, 5])
def test_a_cut_answer_holds_exactly_its_budget(
    served: Served, tokenizer: Tokenizer, budget: int
) -> None:
    prompt = prompt_ids(tokenizer, "What is 2+2?")
    whole, g = generate(served, prompt), generate(served, prompt, max_new_tokens=budget)
    assert (g.finish_reason, g.completion_tokens) == ("length", budget)
    assert g.output_ids == whole.output_ids[:budget]
    if g.length is not None:
        assert g.length == budget


@every
def test_a_budget_that_ends_with_the_stop_token_is_a_stop(
    served: Served, tokenizer: Tokenizer
) -> None:
    prompt = prompt_ids(tokenizer, "What is 2+2?")
    whole = generate(served, prompt)
    g = generate(served, prompt, max_new_tokens=len(whole.output_ids))
    assert (g.output_ids, g.finish_reason) == (whole.output_ids, "stop")


@every
def test_all_engines_choose_the_same_ids(
    served: Served, tokenizer: Tokenizer, reference: list[list[int]]
) -> None:
    for question, right in zip(QUESTIONS, reference, strict=True):
        assert generate(served, prompt_ids(tokenizer, question)).output_ids == right, question


@every
def test_the_second_account_of_the_ids_agrees(served: Served, tokenizer: Tokenizer) -> None:
    g = generate(served, prompt_ids(tokenizer, "What is 7*8?"), logprobs=True)
    assert g.logprob_ids == g.output_ids
    assert g.logprobs is not None
    assert len(g.logprobs) == len(g.output_ids)
    assert all(-50 < lp <= 0 for lp in g.logprobs)


@every
def test_seeds_are_taken(served: Served, tokenizer: Tokenizer) -> None:
    hot = Sampling(temperature=1.5)
    prompt = prompt_ids(tokenizer, "What is 2+2?")
    runs = [
        [generate(served, prompt, seed=seed, sampling=hot).output_ids for seed in (1, 2, 2**31 - 1)]
        for _ in range(2)
    ]
    assert len({tuple(ids) for ids in runs[0]}) > 1
    if served.engine != "sglang":  # where seeds need deterministic inference, which is off
        assert runs[0] == runs[1]


@scoring
def test_an_id_of_our_own_stops_it(served: Served, tokenizer: Tokenizer) -> None:
    early = Sampling(temperature=0.0, stop_token_ids=(CLOSER,))
    g = generate(served, prompt_ids(tokenizer, "What is 2+2?"), sampling=early)
    assert (g.finish_reason, g.output_ids[-1], g.matched) == ("stop", CLOSER, CLOSER)
    assert g.completion_tokens == len(g.output_ids)


@every
def test_a_prompt_without_room_is_refused(served: Served) -> None:
    with pytest.raises(RequestRefused):
        generate(served, [END] * (servers.CONTEXT + 1), max_new_tokens=1)
    assert generate(served, [END, 508, 17, END, 509, OPENER], max_new_tokens=1).output_ids


# SGLang is not asked: an id outside the vocabulary takes its server down, so none is ever sent.
@pytest.mark.parametrize("served", [ENGINES[0], ENGINES[2]], indirect=True, ids=str)
@pytest.mark.parametrize("bad", [SIZE, -1, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_refused(served: Served, bad: int) -> None:
    with pytest.raises(RequestRefused):
        generate(served, [508, bad, END], max_new_tokens=1)


@every
def test_many_at_once_are_answered_apart(
    served: Served, tokenizer: Tokenizer, reference: list[list[int]]
) -> None:
    prompts = [prompt_ids(tokenizer, question) for question in QUESTIONS]

    async def together(engine):  # type: ignore[no-untyped-def]
        return await asyncio.gather(*(engine.generate(Request(p, 300, 0)) for p in prompts))

    for prompt, g, right in zip(prompts, ask(served, together), reference, strict=True):
        assert g.prompt_tokens == len(prompt)
        assert g.output_ids == right


@scoring
def test_scores_are_the_log_probabilities_of_generation(
    served: Served, tokenizer: Tokenizer
) -> None:
    prompt = prompt_ids(tokenizer, "What is 17+25?")
    plain = Sampling(temperature=1.0)
    g = generate(served, prompt, logprobs=True, sampling=plain, seed=3)
    assert g.logprobs is not None
    ids, start = [*prompt, *g.output_ids], len(prompt)
    scores = ask(served, lambda engine: engine.score(ids, start=start, top=3), plain)
    assert scores is not None
    assert scores.ids == g.output_ids
    for again, first in zip(scores.logprobs, g.logprobs, strict=True):
        assert again == pytest.approx(first, abs=1e-3)
    assert scores.tops is not None
    for top in scores.tops:
        assert len(top) == 3
        assert top == sorted(top, key=lambda place: -place[1])


@scoring
def test_a_foreign_id_scores_low(served: Served, tokenizer: Tokenizer) -> None:
    prompt = prompt_ids(tokenizer, "What is 17+25?")
    g = generate(served, prompt)
    wrong = list(g.output_ids)
    wrong[len(wrong) // 2] = tokenizer.encode("zebra")[0]
    scores = ask(served, lambda engine: engine.score([*prompt, *wrong], start=len(prompt)))
    assert scores is not None
    assert scores.ids == wrong
    assert min(scores.logprobs) < -8


LONGEST_SCORED = {"vllm": servers.CONTEXT - 1, "sglang": servers.CONTEXT - 7}
"""vLLM always generates one id more. SGLang keeps seven ids of the context to itself."""


@scoring
def test_the_longest_row_that_is_scored(served: Served) -> None:
    longest = LONGEST_SCORED[served.engine]
    ids = [17] * (longest + 1)
    assert ask(served, lambda engine: engine.score(ids, start=5)) is None
    scores = ask(served, lambda engine: engine.score(ids[:longest], start=5))
    assert scores is not None
    assert scores.ids == ids[5:longest]


@pytest.mark.parametrize("served", ENGINES[:1], indirect=True, ids=str)
def test_llama_cpp_scores_nothing(served: Served) -> None:
    assert ask(served, lambda engine: engine.score([1, 2, 3], start=1)) is None


@every
@pytest.mark.parametrize(
    "text", ["What is 2+2?", "naïve 日本語 🙂\n\n  x", "<|user|>a<|end|><think></think>", " \t\r\n"]
)
def test_it_tokenizes_as_we_do(served: Served, tokenizer: Tokenizer, text: str) -> None:
    assert ask(served, lambda engine: engine.tokenize(text)) == tokenizer.encode(text)


@every
@pytest.mark.parametrize("kwargs", [{}, {"thinking": False}], ids=["thinking", "at once"])
def test_it_renders_as_we_do(served: Served, tokenizer: Tokenizer, kwargs: dict[str, bool]) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2+2?"},
    ]
    ours = [*tokenizer.encode("<|system|>Be brief.<|end|>"),
            *prompt_ids(tokenizer, "What is 1+1?", "2", "And 2+2?", **kwargs)]  # fmt: skip
    theirs = ask(served, lambda engine: engine.render(messages, kwargs))
    assert theirs is not None
    assert (tokenizer.encode(theirs) if isinstance(theirs, str) else theirs) == ours


@every
def test_the_chat_api_counts_the_same_ids(served: Served, tokenizer: Tokenizer) -> None:
    prompt = prompt_ids(tokenizer, "What is 2+2?")
    right = generate(served, prompt)
    message = [{"role": "user", "content": "What is 2+2?"}]
    said = ask(served, lambda engine: engine.chat(message, {}, max_tokens=300))
    assert said is not None
    assert said.finish_reason == "stop"
    assert (said.prompt_tokens, said.completion_tokens) == (len(prompt), len(right.output_ids))
    # Without a parser on the server, the reasoning and its closer stand in the answer.
    assert said.reasoning is None
    assert said.content == tokenizer.decode(right.output_ids[:-1])


@every
def test_a_capture_stores_what_was_generated(
    served: Served, tokenizer: Tokenizer, reference: list[list[int]], tmp_path: Path
) -> None:
    prompts = write_prompts(
        tmp_path / "prompts.jsonl",
        [{"id": f"q{at}", "prompt": question} for at, question in enumerate(QUESTIONS)],
    )
    summary = capture(
        CaptureConfig(
            prompts=[str(prompts)],
            out=str(tmp_path / "run"),
            url=served.url,
            tokenizer=str(served.model),
            temperature=GREEDY.temperature,
            max_new_tokens=300,
        )
    )
    assert (summary.done, summary.rejected, summary.exit_code) == (len(QUESTIONS), 0, 0)
    rows = {trace.conversation_id: trace for trace in Run(tmp_path / "run").traces()}
    for at, (question, right) in enumerate(zip(QUESTIONS, reference, strict=True)):
        row = rows[f"q{at}"]
        assert row.prompt_ids == prompt_ids(tokenizer, question)
        assert row.prompt_ids[-1] == OPENER  # the template wrote it
        assert row.output_ids == right
        assert (row.finish_reason, row.stop_id) == ("stop", END)
        assert row.reasoning_start == len(row.prompt_ids)
        assert row.input_ids[row.reasoning_end] == CLOSER
        assert not row.marks


@every
def test_a_second_turn_is_asked_on_the_targets_own_answer(served: Served, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(served)
    rows = [{"id": f"p{at}", "turns": [f"What is {at}+5?", "What is 3*4?"]} for at in range(3)]
    summary = capture(
        CaptureConfig(
            prompts=[str(write_prompts(tmp_path / "prompts.jsonl", rows))],
            out=str(tmp_path / "run"),
            url=served.url,
            tokenizer=str(served.model),
            max_new_tokens=300,
        )
    )
    assert (summary.done, summary.exit_code) == (6, 0)
    traces = {(t.conversation_id, t.turn): t for t in Run(tmp_path / "run").traces()}
    for at in range(3):
        first, second = traces[f"p{at}", 0], traces[f"p{at}", 1]
        answer = tokenizer.decode(first.input_ids[first.reasoning_end + 1 : -1])
        again = prompt_ids(tokenizer, f"What is {at}+5?", answer, "What is 3*4?")
        assert second.prompt_ids == again
