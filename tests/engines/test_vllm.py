"""vLLM's answers read as they are, and which engine is recognised by what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from eyas.engines import VLLM, Request, Sampling, connect
from eyas.engines.vllm import read_answer, read_scores
from eyas.errors import MalformedAnswer, UnsuitableServerError

Pages = dict[str, Any]
"""Path -> what it answers: an object, or a function of the request's body."""


@asynccontextmanager
async def serving(pages: Pages) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server with just these pages, and the bodies that were posted to it."""
    posted: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        page = pages.get(request.path)
        if page is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if request.method == "POST" else {}
        if body:
            posted.append(body)
        return web.json_response(page(body) if callable(page) else page)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield f"http://127.0.0.1:{port}", posted
    finally:
        await runner.cleanup()


def with_server(pages: Pages, use: Callable[[str, list[dict[str, Any]]], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with serving(pages) as (url, posted):
            return await use(url, posted)

    return asyncio.run(run())


def answer(**choice: Any) -> dict[str, Any]:
    return {
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [5, 6],
                "prompt_token_ids": [1, 2, 3],
                **choice,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }


MODELS = {"data": [{"id": "m", "root": "/models/m", "owned_by": "vllm", "max_model_len": 2048}]}
PAGES: Pages = {
    "/v1/models": MODELS,
    "/version": {"version": "0.32.0"},
    "/v1/completions": lambda _: answer(),
}


def test_an_ordinary_answer() -> None:
    g = read_answer(answer())
    assert (g.output_ids, g.finish_reason, g.matched, g.names_stop) == ([5, 6], "stop", None, False)
    assert (g.prompt_tokens, g.completion_tokens, g.prompt_echo) == (3, 2, [1, 2, 3])
    assert (g.text, g.logprob_ids, g.refusal) == ("ab", None, None)


@pytest.mark.parametrize("ids", [None, "5 6", {}])
def test_an_answer_without_ids_holds_none(ids: object) -> None:
    """A version that does not know return_token_ids ignores it without a word."""
    assert read_answer(answer(token_ids=ids)).output_ids == []


def test_log_probabilities_name_their_ids() -> None:
    logprobs = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.5, -1]}
    g = read_answer(answer(logprobs=logprobs))
    assert (g.logprob_ids, g.logprobs) == ([5, 6], [-0.5, -1.0])
    as_text = read_answer(answer(logprobs={"tokens": ["a", "b"], "token_logprobs": [-0.5, -1]}))
    assert (as_text.logprob_ids, as_text.logprobs) == (None, None)
    g = read_answer(answer(logprobs={"tokens": ["token_id:5"], "token_logprobs": [None]}))
    assert (g.logprob_ids, g.logprobs) == ([5], None)  # -inf is null in JSON
    with pytest.raises(MalformedAnswer, match="logprobs"):
        read_answer(answer(logprobs={"tokens": [5], "token_logprobs": [0]}))


@pytest.mark.parametrize("choices", [None, [], [{}, {}], ["x"]])
def test_not_one_choice_is_no_answer(choices: object) -> None:
    with pytest.raises(MalformedAnswer, match="one choice"):
        read_answer({"choices": choices})


def test_scores() -> None:
    places = [
        None,
        {"6": {"logprob": -2.0, "rank": 7}, "9": {"logprob": -0.5, "rank": 1}},
        {"7": {"logprob": -0.1, "rank": 1}},
    ]
    scores = read_scores({"choices": [{"prompt_logprobs": places}]}, [5, 6, 7], 1, top=1)
    assert scores is not None
    assert (scores.ids, scores.logprobs) == ([6, 7], [-2.0, -0.1])
    assert scores.tops == [[(9, -0.5)], [(7, -0.1)]]
    for odd in (None, [], places[:2], [None, {}, {}], [None, {"6": 1}, {"7": 1}]):
        assert read_scores({"choices": [{"prompt_logprobs": odd}]}, [5, 6, 7], 1, top=1) is None


def test_every_parameter_is_sent() -> None:
    async def ask(url: str, posted: list[dict[str, Any]]) -> dict[str, Any]:
        engine = VLLM(url, sampling=Sampling(temperature=0.5, top_k=-1, stop_token_ids=(9,)))
        info = await engine.identify()
        assert (info.version, info.model, info.context_length) == ("0.32.0", "m", 2048)
        await engine.generate(Request([1, 2, 3], 50, seed=4, logprobs=True))
        await engine.close()
        return posted[-1]

    sent = with_server(PAGES, ask)
    assert (sent["model"], sent["prompt"], sent["max_tokens"], sent["seed"]) == (
        "m",
        [1, 2, 3],
        50,
        4,
    )
    assert (sent["temperature"], sent["top_k"], sent["stop_token_ids"]) == (0.5, 0, [9])
    assert {"top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "return_token_ids", "return_tokens_as_token_ids"} <= set(sent)  # fmt: skip
    assert sent["stream"] is False


def recognised(pages: Pages) -> str:
    async def ask(url: str, _: list[dict[str, Any]]) -> str:
        engine = await connect(url)
        await engine.close()
        return engine.name

    name: str = with_server(pages, ask)
    return name


@pytest.mark.parametrize(
    ("pages", "name"),
    [
        (PAGES, "vllm"),
        ({"/v1/completions": lambda _: answer()}, "vllm"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}}, "sglang"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]}}, "llama_cpp"),
        ({"/props": {"default_generation_settings": {}}}, "llama_cpp"),
        ({"/completion": {"tokens": []}}, "llama_cpp"),
        ({"/get_model_info": {"model_path": "m"}}, "sglang"),
        ({"/v1/models": {"data": [{"owned_by": ["odd"]}]}, "/generate": {}}, "sglang"),
    ],
)
def test_engines_are_recognised(pages: Pages, name: str) -> None:
    assert recognised(pages) == name


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ({"/api/version": {"version": "0.12"}, "/api/tags": {"models": []},
          "/v1/models": {"data": [{"id": "m", "owned_by": "library"}]}}, "is Ollama"),
        ({"/info": {"router": "text-generation-router"}, "/generate": {}},
         "text-generation-inference"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "lmdeploy"}]}, "/generate": {}},
         "LMDeploy"),
        ({"/v1/models": {"data": [{"id": "gpt", "owned_by": "system"}]},
          "/v1/completions": lambda _: answer(token_ids=None)}, "owned by 'system'"),
        ({"/v1/models": {"data": []}}, "neither as SGLang"),
    ],
)  # fmt: skip
def test_servers_that_give_no_ids_are_named_with_what_to_use(pages: Pages, said: str) -> None:
    with pytest.raises(UnsuitableServerError, match=said) as raised:
        recognised(pages)
    assert "llama.cpp" in str(raised.value) or "llama-server" in str(raised.value)


@pytest.mark.parametrize("tokenizes", [True, False])
def test_whether_an_empty_text_says_anything(tokenizes: bool) -> None:
    """Without a tokenizer (--skip-tokenizer-init) vLLM's texts are all empty."""
    texts = ["", "ab", ""]
    pages: Pages = {**PAGES, "/v1/completions": lambda _: answer(text=texts.pop(0))}
    if tokenizes:
        pages["/tokenize"] = {"count": 1, "max_model_len": 2048, "tokens": [5]}

    async def ask(url: str, _: list[dict[str, Any]]) -> list[bool]:
        engine = VLLM(url)
        await engine.identify()
        given = [await engine.generate(Request([1, 2, 3], 4, 0)) for _ in range(3)]
        await engine.close()
        return [generation.writes_text for generation in given]

    assert with_server(pages, ask) == [tokenizes, True, True]
