"""Small helpers of the tests that ask a real engine."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from engines_real.servers import Served
from eyas.engines import Engine, Generation, Request, Sampling, connect
from eyas.tokens import ChatTemplate, Tokenizer, load_tokenizer

_Answer = TypeVar("_Answer")
GREEDY = Sampling(temperature=0.0)


def ask(
    served: Served, use: Callable[[Engine], Awaitable[_Answer]], sampling: Sampling = GREEDY
) -> _Answer:
    """Connect as a user does (``--engine auto``), identify, ask, and close."""

    async def run() -> _Answer:
        engine = await connect(served.url, sampling=sampling)
        try:
            await engine.identify()
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def generate(
    served: Served,
    prompt_ids: list[int],
    *,
    max_new_tokens: int = 300,
    seed: int = 0,
    logprobs: bool = False,
    sampling: Sampling = GREEDY,
) -> Generation:
    request = Request(prompt_ids, max_new_tokens, seed, logprobs=logprobs)
    return ask(served, lambda engine: engine.generate(request), sampling)


def tokenizer_of(served: Served) -> Tokenizer:
    return load_tokenizer(str(served.model))


def prompt_ids(tokenizer: Tokenizer, *turns: str, **kwargs: Any) -> list[int]:
    """User and assistant by turns, rendered with the generation prompt."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    return tokenizer.encode(ChatTemplate.of(tokenizer, kwargs=kwargs).render(messages))


def post(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's own JSON, past the engine's code. No proxy is asked for our own machine."""
    asked = urllib.request.Request(
        served.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(asked, timeout=300) as answer:
        given: dict[str, Any] = json.load(answer)
        return given
