"""Serving engines behind one interface that knows ids only."""

from __future__ import annotations

import asyncio
from typing import Any

from eyas.engines.base import Engine, Generation, Request, Sampling, ServerInfo
from eyas.engines.http import HttpClient, clean_url
from eyas.engines.llama_cpp import LlamaCpp
from eyas.engines.sglang import SGLang
from eyas.errors import MalformedAnswer, RequestRefused, TransportError, UnsuitableServerError

ENGINES: dict[str, type[SGLang] | type[LlamaCpp]] = {"sglang": SGLang, "llama_cpp": LlamaCpp}

__all__ = [
    "ENGINES",
    "Engine",
    "Generation",
    "LlamaCpp",
    "Request",
    "SGLang",
    "Sampling",
    "ServerInfo",
    "clean_url",
    "connect",
]

_ABSENT = frozenset((404, 405, 501))
_ROUTE_S = 30.0
"""A server that holds one token for longer is busy, but has the route."""


async def connect(
    url: str, *, engine: str = "auto", sampling: Sampling | None = None, api_key: str | None = None
) -> Engine:
    """An engine for an address; with ``auto`` the one that answers there.

    Raises:
        UnsuitableServerError: if no known engine answers.
        ServerUnreachable: if nothing does.
    """
    name = await _recognise(url, api_key) if engine == "auto" else engine
    if name not in ENGINES:
        raise UnsuitableServerError(
            f"--engine {name} is not known; choose auto or one of {', '.join(sorted(ENGINES))}"
        )
    return ENGINES[name](url, sampling=sampling, api_key=api_key)


async def _recognise(url: str, api_key: str | None) -> str:
    """Tell engines apart by pages that only they have, then by the route that captures."""
    http = HttpClient(url, api_key=api_key)
    try:
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            if await http.get(path) is not None:
                return "sglang"
        props = await http.get("/props")
        if props is not None and "default_generation_settings" in props:
            return "llama_cpp"
        # A bare server or a router may have the capturing route alone: one token tells.
        probe = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        if await _has_route(http, "/generate", probe):
            return "sglang"
        if await _has_route(http, "/completion", {"prompt": [1], "n_predict": 1}):
            return "llama_cpp"
    except RequestRefused as error:
        raise UnsuitableServerError(f"{http.url}: {error}") from error
    finally:
        await http.close()
    raise UnsuitableServerError(
        f"{http.url} answers, but neither as SGLang (/generate) nor as llama.cpp's server "
        "(/completion). Engines that take and give text only cannot be captured from exactly."
    )


async def _has_route(http: HttpClient, path: str, body: dict[str, Any]) -> bool:
    try:
        async with asyncio.timeout(_ROUTE_S):
            return await http.post_status(path, body) not in _ABSENT
    except (TransportError, MalformedAnswer, TimeoutError):
        return True  # it took the request, however badly; the checks see to the rest
