"""Serving engines behind one interface that knows ids only."""

from __future__ import annotations

import asyncio
from typing import Any

from eyas.engines import openai
from eyas.engines.base import (
    ChatAnswer,
    Engine,
    Generation,
    Request,
    Sampling,
    Scores,
    ServerInfo,
    resampled,
)
from eyas.engines.http import HttpClient, clean_url, is_busy
from eyas.engines.llama_cpp import LlamaCpp
from eyas.engines.sglang import SGLang
from eyas.engines.vllm import VLLM
from eyas.errors import (
    EngineError,
    MalformedAnswer,
    RequestRefused,
    TransportError,
    UnsuitableServerError,
)

ENGINES: dict[str, type[SGLang] | type[VLLM] | type[LlamaCpp]] = {
    "sglang": SGLang,
    "vllm": VLLM,
    "llama_cpp": LlamaCpp,
}
_OWNERS = {"sglang": "sglang", "vllm": "vllm", "llamacpp": "llama_cpp"}
"""Who owns a model in /v1/models, by engine. (A proxy in front may say something else.)"""

__all__ = [
    "ENGINES",
    "VLLM",
    "ChatAnswer",
    "Engine",
    "Generation",
    "LlamaCpp",
    "Request",
    "SGLang",
    "Sampling",
    "Scores",
    "ServerInfo",
    "clean_url",
    "connect",
    "doubt_engine",
    "resampled",
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


async def doubt_engine(url: str, engine: str, api_key: str | None = None) -> str | None:
    """A sentence where an engine was named and the server's own pages tell of another one.

    It is only said, since a proxy in front of a server may have pages of its own.
    """
    if engine == "auto":
        return None
    http = HttpClient(url, api_key=api_key)
    try:
        told = await _told(http, (await openai.listed_model(http)).get("owned_by"))
    except EngineError:
        return None
    finally:
        await http.close()
    if told is None or told == engine:
        return None
    return (
        f"--engine {engine} was given, but what answers at {http.url} looks like {told}; without "
        "--engine it is recognised by itself"
    )


async def _told(http: HttpClient, owner: Any) -> str | None:
    """The engine that has pages like these, or None."""
    if isinstance(owner, str) and owner in _OWNERS:
        return _OWNERS[owner]
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        if await http.get(path) is not None:
            return "sglang"
    props = await http.get("/props")
    return "llama_cpp" if "default_generation_settings" in (props or {}) else None


async def _recognise(url: str, api_key: str | None) -> str:
    """Tell engines apart by pages that only they have, then by the route that captures."""
    http = HttpClient(url, api_key=api_key)
    try:
        owner = (await openai.listed_model(http)).get("owned_by")
        if told := await _told(http, owner):
            return told
        if advice := await _unsuitable(http, owner):
            raise UnsuitableServerError(f"{http.url} {advice}")
        # A bare server or a router may have the capturing route alone: one token tells.
        probe = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        if await _has_route(http, "/generate", probe):
            return "sglang"
        if await _has_route(http, "/completion", {"prompt": [1], "n_predict": 1}):
            return "llama_cpp"
        if await _gives_ids(http):
            return "vllm"
        if owner is not None:
            raise UnsuitableServerError(
                f"{http.url} is an OpenAI-like server (its models are owned by {owner!r}) that "
                f"gives no token ids back, so nothing exact can be captured from it. {_ADVICE}"
            )
    except RequestRefused as error:
        raise UnsuitableServerError(f"{http.url}: {error}") from error
    finally:
        await http.close()
    raise UnsuitableServerError(
        f"{http.url} answers, but neither as SGLang (/generate) nor as vLLM (/v1/completions with "
        f"token_ids) nor as llama.cpp's server (/completion). Engines that take and give text only "
        f"cannot be captured from exactly. {_ADVICE}"
    )


_ADVICE = "Serve the model with SGLang, vLLM or llama.cpp's server."


async def _unsuitable(http: HttpClient, owner: Any) -> str | None:
    """What to say of a server that is known to give no ids or not all of them, or None."""
    if await http.get("/api/version") is not None and await http.get("/api/tags") is not None:
        return (
            "is Ollama, which takes and gives text and tokenizes it again, so no ids can be "
            "captured from it. Serve the same GGUF file with llama.cpp's server (llama-server -m "
            "FILE), or the model with SGLang or vLLM."
        )
    if (await http.get("/info") or {}).get("router") == "text-generation-router":
        return f"is text-generation-inference, which takes text only. {_ADVICE}"
    if owner == "lmdeploy":
        return f"is LMDeploy, which leaves the stop id out of its ids. {_ADVICE}"
    return None


async def _gives_ids(http: HttpClient) -> bool:
    """Whether /v1/completions takes a prompt of ids and gives ids back."""
    model = (await openai.listed_model(http)).get("id")
    body = {"prompt": [1], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    if model is not None:
        body["model"] = model
    try:
        async with asyncio.timeout(_ROUTE_S):
            answer = await openai.post_or_none(http, "/v1/completions", body)
    except (EngineError, TimeoutError):
        return False
    try:
        return isinstance((answer or {})["choices"][0]["token_ids"], list)
    except (KeyError, IndexError, TypeError):
        return False


async def _has_route(http: HttpClient, path: str, body: dict[str, Any]) -> bool:
    for pause in (0.1, 0.3, 0.9, None):
        try:
            async with asyncio.timeout(_ROUTE_S):
                status = await http.post_status(path, body)
        except (TransportError, MalformedAnswer, TimeoutError):
            return True  # it took the request, however badly; the checks see to the rest
        # A busy status proves nothing of the route until it stays.
        if pause is None or status in _ABSENT or not is_busy(status):
            return status not in _ABSENT
        await asyncio.sleep(pause)
    return False
