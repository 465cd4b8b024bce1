"""SGLang's native ``POST /generate`` with ``input_ids``: not streamed, one prompt a request.

Invariant: every sampling parameter is sent, none is left to the server's defaults (which
differ from the chat route's, and cap the output at 128 tokens).

Sources: sglang 0.5.23 ``srt/managers/io_struct.py`` (request), ``tokenizer_manager.py``
(answer), ``detokenizer_manager.py`` of 0.4.10 to 0.5.4 (the version table below).
"""

from __future__ import annotations

import re
import uuid
from itertools import count
from typing import Any

from eyas.engines.base import Generation, Request, Sampling, ServerInfo
from eyas.engines.http import HttpClient
from eyas.errors import MalformedAnswer, UnsuitableServerError

_KEPT = (
    "version", "model_path", "served_model_name", "tokenizer_path", "weight_version",
    "context_length", "reasoning_parser", "tool_call_parser", "speculative_algorithm",
    "quantization", "kv_cache_dtype", "dtype", "preferred_sampling_params", "sampling_defaults",
    "enable_deterministic_inference", "allow_auto_truncate", "max_running_requests",
    "skip_tokenizer_init", "tp_size", "dp_size", "random_seed", "model_type",
)  # fmt: skip
"""Fields of /server_info and /model_info that are kept. The rest is dropped: it has keys."""


class SGLang:
    """An SGLang server (or its router) at one address."""

    name = "sglang"

    def __init__(
        self, url: str, *, sampling: Sampling | None = None, api_key: str | None = None
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self.url = self._http.url
        self._version: tuple[int, ...] | None = None
        self._rid, self._count = uuid.uuid4().hex[:16], count()
        self.sampling = sampling or Sampling()

    @property
    def sampling(self) -> Sampling:
        return self._sampling

    @sampling.setter
    def sampling(self, value: Sampling) -> None:
        self._sampling = value
        self._params = _params(value)

    async def identify(self) -> ServerInfo:
        """Read /model_info, /server_info and /v1/models, with their older names.

        Raises:
            UnsuitableServerError: a version that prepends prompt ids or returns none.
        """
        model = await self._http.get("/model_info") or await self._http.get("/get_model_info")
        server = await self._http.get("/server_info") or await self._http.get("/get_server_info")
        models = await self._http.get("/v1/models")
        said = {**(server or {}), **(model or {})}
        info = ServerInfo(
            engine=self.name,
            url=self.url,
            version=_text((server or {}).get("version")),
            model=_text(said.get("served_model_name")) or _text(said.get("model_path")),
            weight_version=_text((model or {}).get("weight_version")),
            context_length=_context_length(models, server),
            slots=_int((server or {}).get("max_running_requests")),
            details={name: said[name] for name in _KEPT if said.get(name) is not None},
        )
        self._version = parse_version(info.version)
        refuse_known_bad(info.version)
        if said.get("allow_auto_truncate"):
            raise UnsuitableServerError(
                f"{self.url} was started with --allow-auto-truncate, which cuts long prompts "
                "without a word; start it without that flag"
            )
        if preferred := said.get("preferred_sampling_params"):
            info.warnings.append(
                f"the server merges preferred_sampling_params {preferred} under each request; "
                "eyas sends every parameter itself, so those it sends win"
            )
        return info

    async def generate(self, request: Request) -> Generation:
        params = {**self._params, "max_new_tokens": request.max_new_tokens}
        if self._version is None or self._version >= (0, 5, 4, 3):
            # Takes effect only under --enable-deterministic-inference; older versions answer
            # 500 to a parameter that they do not know.
            params["sampling_seed"] = request.seed
        body: dict[str, Any] = {
            "input_ids": request.prompt_ids,
            "sampling_params": params,
            # Aborting matches by prefix, so all have one length.
            "rid": f"{self._rid}{next(self._count):016x}",
            "return_prompt_token_ids": True,
            "stream": False,
        }
        if request.logprobs:
            body["return_logprob"] = True
        return read_answer(await self._http.post("/generate", body))

    async def reachable(self) -> bool:
        return await self._http.reachable()

    async def close(self) -> None:
        await self._http.close()


def _params(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": False,
        "n": 1,
        # These touch `text` alone; with them it is the plain decoding of the ids.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    return params


def read_answer(answer: dict[str, Any]) -> Generation:
    """Read the object that /generate answers. What is absent stays None.

    Raises:
        MalformedAnswer: no ``meta_info``, or an error in its place.
    """
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        said = answer.get("message") or answer.get("error") or f"keys {sorted(answer)[:8]}"
        raise MalformedAnswer(f"the answer has no meta_info ({str(said)[:200]})", seen=str(said))
    finish = meta.get("finish_reason")
    kind, matched = (
        (finish.get("type"), finish.get("matched")) if isinstance(finish, dict) else (finish, None)
    )
    logprob_ids = logprobs = None
    entries = meta.get("output_token_logprobs")
    if isinstance(entries, list):
        try:
            logprobs = [float(entry[0]) for entry in entries]
            logprob_ids = [entry[1] for entry in entries]
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise MalformedAnswer(f"output_token_logprobs cannot be read: {error}") from error
    ids, echo = answer.get("output_ids"), answer.get("prompt_token_ids")
    text, version = answer.get("text"), meta.get("weight_version")
    spans = meta.get("weight_versions")
    refusal = None
    if isinstance(spans, list) and len(spans) > 1:
        refusal = f"the weights changed during the generation: {spans}"
    said_abort = isinstance(finish, dict) and kind not in ("stop", "length")
    return Generation(
        output_ids=ids if isinstance(ids, list) else [],
        finish_reason=f"{kind}: {finish.get('message')}" if said_abort and isinstance(finish, dict)
        and finish.get("message") else _text(kind),
        matched=matched,
        prompt_tokens=_int(meta.get("prompt_tokens")),
        completion_tokens=_int(meta.get("completion_tokens")),
        prompt_echo=echo if isinstance(echo, list) else None,
        text=text if isinstance(text, str) else None,
        logprob_ids=logprob_ids,
        logprobs=logprobs,
        weight_version=_text(version),
        cached_tokens=_int(meta.get("cached_tokens")),
        refusal=refusal,
    )  # fmt: skip


def parse_version(version: str | None) -> tuple[int, ...] | None:
    """``0.5.4.post2`` as (0, 5, 4, 2); None where the server tells none or a strange one."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version or "")
    return None if match is None else tuple(int(part or 0) for part in match.groups())


def refuse_known_bad(version: str | None) -> None:
    """Raise UnsuitableServerError for versions whose ``output_ids`` are wrong or absent."""
    number = parse_version(version)
    if number is None:
        return
    advice = "Use SGLang 0.5.18 or newer (0.5.4.post3 at least)."
    if number < (0, 5, 0, 0):
        raise UnsuitableServerError(
            f"SGLang {version} returns no output_ids on /generate (versions before 0.5.0). {advice}"
        )
    if (0, 5, 1, 0) <= number <= (0, 5, 4, 2):
        raise UnsuitableServerError(
            f"SGLang {version} puts the prompt's last ids before the output's "
            f"(0.5.1 to 0.5.4.post2), so no row would be right. {advice}"
        )


def _context_length(models: dict[str, Any] | None, server: dict[str, Any] | None) -> int | None:
    """/v1/models says it reliably; /server_info's context_length is often null."""
    listed = (models or {}).get("data")
    if isinstance(listed, list) and listed and isinstance(listed[0], dict):
        found = _int(listed[0].get("max_model_len"))
        if found:
            return found
    return _int((server or {}).get("context_length"))


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return None if value is None or isinstance(value, dict | list) else str(value)
