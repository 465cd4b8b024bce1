"""vLLM: ``POST /v1/completions`` with a prompt of ids and ``return_token_ids``, not streamed.

Invariant: every sampling parameter is sent, since vLLM fills what is absent from the model's
generation config (and caps the output at 16 tokens); an answer without ``token_ids`` is no
answer, since vLLM ignores fields that it does not know.

Sources: vllm 0.32.0 ``entrypoints/openai/completion/protocol.py`` and ``serving.py``,
``v1/core/sched/utils.py`` (``stop_reason`` is null for the model's first eos id, and an id for
any other), ``config/model.py`` (``logprobs_mode`` is ``raw_logprobs``: before the temperature).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from eyas.engines import openai
from eyas.engines.base import Generation, Load, Request, Sampling, Scores, ServerInfo
from eyas.engines.openai import HttpEngine, as_int, as_logprob, as_logprobs, as_text
from eyas.errors import EngineError, MalformedAnswer

_ID_PREFIX = "token_id:"


class VLLM(HttpEngine):
    """A vLLM server at one address."""

    name = "vllm"
    scaled_logprobs = False
    _writes_text = False
    """Whether it has a tokenizer: with --skip-tokenizer-init each text is empty."""

    def parameters(self, sampling: Sampling) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": False,
            "n": 1,
            "return_token_ids": True,
            # These touch `text` alone; with them it is the plain decoding of the ids.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "stream": False,
        }

    async def identify(self) -> ServerInfo:
        """Read /version and /v1/models; /server_info is there in vLLM's development mode only."""
        version = await self._http.get("/version") or {}
        listed = await openai.listed_model(self._http)
        self._model = as_text(listed.get("id"))
        with suppress(EngineError):
            self._writes_text = bool(await self.tokenize("a"))
        return ServerInfo(
            engine=self.name,
            url=self.url,
            version=as_text(version.get("version")),
            model=self._model,
            context_length=as_int(listed.get("max_model_len")),
            details={"model_path": listed["root"]} if listed.get("root") else {},
        )

    async def generate(self, request: Request) -> Generation:
        body: dict[str, Any] = {
            **self._params,
            "prompt": request.prompt_ids,
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
        }
        if self._model is not None:
            body["model"] = self._model
        if request.logprobs:
            body["logprobs"], body["return_tokens_as_token_ids"] = 1, True
        generation = read_answer(await self._http.post("/v1/completions", body))
        self._writes_text = self._writes_text or bool(generation.text)
        generation.writes_text = self._writes_text
        return generation

    async def score(self, ids: Sequence[int], *, start: int, top: int = 0) -> Scores | None:
        for asked in sorted({top, min(top, 5), 0}, reverse=True):  # --max-logprobs may be small
            body = {
                "model": self._model,
                "prompt": list(ids),
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": asked,
                "return_token_ids": True,
                "stream": False,
            }
            answer = await openai.post_or_none(
                self._http, "/v1/completions", body, timeout_s=openai.GENERATING_S
            )
            if answer is not None:
                return read_scores(answer, list(ids), start, asked)
        return None

    async def load(self) -> Load | None:
        """From ``/metrics``: ``vllm:num_requests_running`` and ``_waiting``, over all engines."""
        answer = await self._http.get_status("/metrics")
        return None if answer is None or answer[0] != 200 else read_load(answer[1])


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise MalformedAnswer(f"the answer does not hold one choice (keys {sorted(answer)[:8]})")
    return choices[0]


def read_answer(answer: dict[str, Any]) -> Generation:
    """Read the object that /v1/completions answers. What is absent stays None.

    Raises:
        MalformedAnswer: not exactly one choice, or log-probabilities that cannot be read.
    """
    choice = _choice(answer)
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    cached = usage.get("prompt_tokens_details")
    ids, echo, text = choice.get("token_ids"), choice.get("prompt_token_ids"), choice.get("text")
    logprob_ids = logprobs = None
    given = choice.get("logprobs")
    if isinstance(given, dict):
        try:
            if all(name.startswith(_ID_PREFIX) for name in given["tokens"]):
                logprob_ids = [int(name[len(_ID_PREFIX) :]) for name in given["tokens"]]
                logprobs = as_logprobs(given["token_logprobs"])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise MalformedAnswer(f"logprobs cannot be read: {error}") from error
    return Generation(
        output_ids=ids if isinstance(ids, list) else [],
        finish_reason=as_text(choice.get("finish_reason")),
        matched=choice.get("stop_reason"),
        names_stop=False,
        prompt_tokens=as_int(usage.get("prompt_tokens")),
        completion_tokens=as_int(usage.get("completion_tokens")),
        prompt_echo=echo if isinstance(echo, list) else None,
        text=text if isinstance(text, str) else None,
        logprob_ids=logprob_ids,
        logprobs=logprobs,
        cached_tokens=as_int(cached.get("cached_tokens")) if isinstance(cached, dict) else None,
    )


def read_load(metrics: str) -> Load | None:
    """Sum the two gauges over their labels; None where one is not there."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            if line.startswith((f"{name}{{", f"{name} ")):
                try:
                    found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
                except ValueError:
                    return None
    if len(found) != 2:
        return None
    return Load(*(int(found[name]) for name in sorted(found)))


def read_scores(answer: dict[str, Any], ids: list[int], start: int, top: int) -> Scores | None:
    """Read ``prompt_logprobs``: at each position an object of id -> {logprob, rank}.

    The position's own id is always in it, besides the most likely ones.
    """
    places = _choice(answer).get("prompt_logprobs")
    if not isinstance(places, list) or len(places) != len(ids):
        return None
    scored: list[tuple[int, float]] = []
    tops: list[list[tuple[int, float]]] = []
    try:
        for own, place in zip(ids[start:], places[start:], strict=True):
            likely = sorted(
                (entry.get("rank", 0), int(i), as_logprob(entry["logprob"]))
                for i, entry in place.items()
            )
            scored.append((own, next(lp for _, i, lp in likely if i == own)))
            tops.append([(i, lp) for rank, i, lp in likely if rank <= top])
    except (TypeError, ValueError, KeyError, AttributeError, StopIteration):
        return None
    return Scores([i for i, _ in scored], [lp for _, lp in scored], tops)
