"""The OpenAI-like routes that several engines share; none of them is captured from.

Invariant: these give text and figures for comparison only; a route that is not there is None.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Any

from eyas.engines.base import ChatAnswer, Sampling
from eyas.engines.http import HttpClient
from eyas.errors import BusyError, MalformedAnswer, RequestRefused, TransportError


class HttpEngine:
    """What engines over HTTP share: the connection, the sampling, and the pages for comparing."""

    def __init__(
        self, url: str, *, sampling: Sampling | None = None, api_key: str | None = None
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self.url = self._http.url
        self._model: str | None = None
        """What the server calls the model; known once it was identified."""
        self.sampling = sampling or Sampling()

    @property
    def sampling(self) -> Sampling:
        """The parameters that are sent with every request."""
        return self._sampling

    @sampling.setter
    def sampling(self, value: Sampling) -> None:
        self._params = self.parameters(value)
        self._sampling = value

    def parameters(self, sampling: Sampling) -> dict[str, Any]:
        """Sampling parameters in the engine's own words."""
        raise NotImplementedError

    async def tokenize(self, text: str) -> list[int] | None:
        """``/tokenize`` as SGLang and vLLM have it."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return _ids(await post_or_none(self._http, "/tokenize", body))

    async def render(
        self, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any]
    ) -> list[int] | str | None:
        """``/tokenize`` with messages: the server's own chat template."""
        body: dict[str, Any] = {"model": self._model, "messages": list(messages)}
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        return _ids(await post_or_none(self._http, "/tokenize", body))

    async def chat(
        self, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any], *, max_tokens: int
    ) -> ChatAnswer | None:
        """``/v1/chat/completions`` at temperature 0."""
        body: dict[str, Any] = {
            "model": self._model or "default",
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "top_p": 1,
            "stream": False,
        }
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        answer = await post_or_none(
            self._http, "/v1/chat/completions", body, timeout_s=GENERATING_S
        )
        try:
            choice = (answer or {})["choices"][0]
            message = choice["message"]
            content, reasoning = message.get("content"), message.get("reasoning_content")
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
        reasoning = message.get("reasoning") if reasoning is None else reasoning
        usage = (answer or {}).get("usage")
        usage = usage if isinstance(usage, dict) else {}
        return ChatAnswer(
            content=content if isinstance(content, str) else "",
            reasoning=reasoning if isinstance(reasoning, str) else None,
            finish_reason=as_text(choice.get("finish_reason")),
            prompt_tokens=as_int(usage.get("prompt_tokens")),
            completion_tokens=as_int(usage.get("completion_tokens")),
        )

    async def healthy(self, timeout_s: float) -> bool | None:
        """``/health``."""
        return await self._http.healthy(timeout_s)

    async def reachable(self) -> bool:
        """Whether something accepts connections."""
        return await self._http.reachable()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


async def listed_model(http: HttpClient) -> dict[str, Any]:
    """The first entry of ``/v1/models``, or an empty object."""
    listed = (await http.get("/v1/models") or {}).get("data")
    if isinstance(listed, list) and listed and isinstance(listed[0], dict):
        return listed[0]
    return {}


PAGE_S = 60.0
"""A page that needs no generation and answers nothing for so long is not there."""
GENERATING_S = 600.0
"""One that generates, or scores a long prompt, may take longer."""
_PAUSES_S = (0.25, 0.5, 1.0, 2.0)


async def post_or_none(
    http: HttpClient, path: str, body: dict[str, Any], *, timeout_s: float = PAGE_S
) -> dict[str, Any] | None:
    """POST to a page that may be missing or refuse this: then None. A busy server is waited for.

    Raises:
        EngineError: it stays busy, or nothing comes in time.
    """
    for pause in (*_PAUSES_S, None):
        try:
            async with asyncio.timeout(timeout_s):
                return await http.post(path, body)
        except TimeoutError:
            raise TransportError(f"{path} did not answer within {timeout_s:.0f} s") from None
        except (RequestRefused, MalformedAnswer):
            return None
        except BusyError as error:
            if pause is None:
                if error.status in (500, 501):  # to fields that older servers do not know
                    return None
                raise
            await asyncio.sleep(pause)
    return None


def as_int(value: Any) -> int | None:
    """A count, or None for whatever else JSON can hold (``true`` is no count)."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_logprob(value: Any) -> float:
    """A log-probability.

    Raises:
        ValueError: it is no finite number (JSON writers make strings or null of NaN).
    """
    if isinstance(value, bool | str) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no log-probability")
    return float(value)


def as_logprobs(values: Iterable[Any]) -> list[float] | None:
    """Log-probabilities; None where one of them is none (-inf is null in JSON)."""
    try:
        return [as_logprob(value) for value in values]
    except (TypeError, ValueError):
        return None


def as_text(value: Any) -> str | None:
    """A plain value as text, or None."""
    return None if value is None or isinstance(value, dict | list) else str(value)


def _ids(answer: dict[str, Any] | None) -> list[int] | None:
    tokens = (answer or {}).get("tokens")
    if not isinstance(tokens, list) or any(type(i) is not int for i in tokens):
        return None
    return tokens
