"""llama.cpp's server: ``POST /completion`` with ids and ``return_tokens``, not streamed.

Invariant: every sampler that is to act is named and set; the server's defaults (top_k 40,
top_p 0.95, min_p 0.05) never act.

Sources: llama.cpp ``tools/server/server-context.cpp`` and ``server-schema.cpp`` (as vendored
in llama-cpp-python 0.3.36). Streaming loses ids inside unfinished characters: never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.engines import openai
from eyas.engines.base import Generation, Load, Request, Sampling, Scores, ServerInfo
from eyas.engines.openai import HttpEngine, as_int, as_logprobs, as_text
from eyas.errors import ConfigError, MalformedAnswer

_FINISH = {"eos": "stop", "limit": "length"}


class LlamaCpp(HttpEngine):
    """A llama.cpp server at one address."""

    name = "llama_cpp"
    scaled_logprobs = False

    _context: int | None = None
    """The context of a slot, once the server was identified."""

    def parameters(self, sampling: Sampling) -> dict[str, Any]:
        if sampling.stop_token_ids:
            raise ConfigError(
                "llama.cpp's server has no stop token ids of the request's own; leave out "
                f"--stop-token-id {' '.join(map(str, sampling.stop_token_ids))}"
            )
        return {
            # temperature first, as transformers, SGLang and vLLM do; llama.cpp's own order
            # puts it last.
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "temperature": sampling.temperature,
            "top_k": max(sampling.top_k, 0),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": self._penalised(sampling),
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": False,
            "cache_prompt": False,  # a reused cache may change the last bits of the logits
            "return_tokens": True,
            "stream": False,
        }

    def _penalised(self, sampling: Sampling) -> int:
        """How many ids the penalties look back on: the whole context, as elsewhere."""
        return (self._context or 32768) if sampling.penalised else 0

    async def identify(self) -> ServerInfo:
        props = await self._http.get("/props") or {}
        settings = props.get("default_generation_settings")
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
        self._context = context if isinstance(context, int) else None
        self.sampling = self._sampling
        alias = props.get("model_alias") or props.get("model_path")
        listed = (await openai.listed_model(self._http)).get("meta")
        details = {k: props[k] for k in ("model_path", "model_ftype", "build_info") if props.get(k)}
        if isinstance(listed, dict) and as_int(listed.get("n_vocab")):
            details["vocab_size"] = listed["n_vocab"]
        return ServerInfo(
            engine=self.name,
            url=self.url,
            version=str(props["build_info"]) if props.get("build_info") else None,
            model=as_text(alias),
            context_length=self._context,
            slots=as_int(props.get("total_slots")),
            details=details,
        )

    async def generate(self, request: Request) -> Generation:
        body: dict[str, Any] = {
            **self._params,
            "prompt": request.prompt_ids,
            "n_predict": request.max_new_tokens,
            "seed": request.seed,
        }
        if request.logprobs:
            body["n_probs"] = 1
        answer = await self._http.post("/completion", body)
        generation = read_answer(answer)
        # It repeats the request's settings; no two rows have the same seed, nor pieces of one.
        settings = answer.get("generation_settings")
        seed = settings.get("seed") if isinstance(settings, dict) else None
        if seed is not None and seed != request.seed:
            generation.refusal = (
                f"the answer is that of another request (seed {seed!r}, not {request.seed})"
            )
        return generation

    async def score(self, ids: Sequence[int], *, start: int, top: int = 0) -> Scores | None:
        """None: the server gives no log-probabilities of prompt ids."""
        del ids, start, top
        return None

    async def tokenize(self, text: str) -> list[int] | None:
        body = {"content": text, "add_special": False, "parse_special": True}
        tokens = (await openai.post_or_none(self._http, "/tokenize", body) or {}).get("tokens")
        whole = isinstance(tokens, list) and all(type(i) is int for i in tokens)
        return tokens if whole else None

    async def render(
        self, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any]
    ) -> list[int] | str | None:
        body: dict[str, Any] = {"messages": list(messages)}
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        answer = await openai.post_or_none(self._http, "/apply-template", body)
        prompt = (answer or {}).get("prompt")
        return prompt if isinstance(prompt, str) else None

    async def load(self) -> Load | None:
        """None: how many slots there are is told beforehand."""
        return None


def read_answer(answer: dict[str, Any]) -> Generation:
    """Read the object that /completion answers.

    Raises:
        MalformedAnswer: neither ``tokens`` nor ``stop_type`` is there.
    """
    if "stop_type" not in answer and "tokens" not in answer:
        raise MalformedAnswer(f"the answer has neither tokens nor stop_type: {sorted(answer)[:8]}")
    tokens, stop = answer.get("tokens"), answer.get("stop_type")
    logprob_ids = logprobs = None
    entries = answer.get("completion_probabilities")
    if isinstance(entries, list):
        try:
            logprob_ids = [entry["id"] for entry in entries]
            logprobs = as_logprobs(entry["logprob"] for entry in entries)
        except (TypeError, ValueError, KeyError) as error:
            raise MalformedAnswer(f"completion_probabilities cannot be read: {error}") from error
    if logprob_ids is not None and len(logprob_ids) < len(tokens or ()):
        # It keeps none for ids inside an unfinished character (server-context.cpp, add_token).
        rest = iter(tokens or ())
        if all(i in rest for i in logprob_ids):
            logprob_ids = logprobs = None
    cut = "the server cut the prompt to fit its context" if answer.get("truncated") else None
    text = answer.get("content")
    return Generation(
        output_ids=tokens if isinstance(tokens, list) else [],
        finish_reason=_FINISH.get(str(stop), str(stop)),
        names_stop=False,
        prompt_tokens=as_int(answer.get("tokens_evaluated")),
        completion_tokens=as_int(answer.get("tokens_predicted")),
        text=text if isinstance(text, str) else None,
        logprob_ids=logprob_ids,
        logprobs=logprobs,
        refusal=cut,
    )
