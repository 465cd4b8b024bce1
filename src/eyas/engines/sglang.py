"""SGLang's native ``POST /generate`` with ``input_ids``: not streamed, one prompt a request.

Invariant: every sampling parameter is sent, none is left to the server's defaults (which
differ from the chat route's, and cap the output at 128 tokens).

Sources: sglang 0.5.23 ``srt/managers/io_struct.py`` (request), ``tokenizer_manager.py``
(answer), ``detokenizer_manager.py`` of 0.4.10 to 0.5.4 (the version table below).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import count
from typing import Any

import orjson

from eyas.engines import openai
from eyas.engines.base import Generation, Load, Request, Sampling, Scores, ServerInfo
from eyas.engines.known_faults import parse_version, refuse_fatal
from eyas.engines.openai import HttpEngine, as_int, as_logprob, as_logprobs, as_text
from eyas.errors import MalformedAnswer, UnsuitableServerError
from eyas.ids import Ids

_KEPT = (
    "version", "model_path", "served_model_name", "tokenizer_path", "weight_version",
    "context_length", "reasoning_parser", "tool_call_parser", "speculative_algorithm",
    "quantization", "kv_cache_dtype", "dtype", "preferred_sampling_params", "sampling_defaults",
    "enable_deterministic_inference", "allow_auto_truncate", "max_running_requests",
    "skip_tokenizer_init", "tp_size", "dp_size", "random_seed", "model_type",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc", "chat_template",
    "tokenizer_mode", "enable_lora", "lora_paths", "watermark_enforce_all",
)  # fmt: skip
"""Fields of /server_info and /model_info that are kept. The rest is dropped: it has keys."""
_LISTS = (list, Ids)


class SGLang(HttpEngine):
    """An SGLang server (or its router) at one address."""

    name = "sglang"
    scaled_logprobs = True
    """SGLang divides by the temperature first, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set."""

    def __init__(
        self, url: str, *, sampling: Sampling | None = None, api_key: str | None = None
    ) -> None:
        super().__init__(url, sampling=sampling, api_key=api_key)
        self._version: tuple[int, ...] | None = None
        self._rid, self._count = uuid.uuid4().hex[:16], count()
        self._keeps_rids = False
        """Whether an answer was called by its request's id: then each one must be."""

    def parameters(self, sampling: Sampling) -> dict[str, Any]:
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
            version=as_text((server or {}).get("version")),
            model=as_text(said.get("served_model_name")) or as_text(said.get("model_path")),
            weight_version=as_text((model or {}).get("weight_version")),
            context_length=_context_length(models, server),
            slots=as_int((server or {}).get("max_running_requests")),
            details={name: said[name] for name in _KEPT if said.get(name) is not None},
        )
        self._version, self._model = parse_version(info.version), info.model
        refuse_fatal(self.name, info.version)
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
        rid = f"{self._rid}{next(self._count):016x}"  # aborting matches by prefix: one length
        body: dict[str, Any] = {
            "input_ids": request.prompt_ids,
            "sampling_params": params,
            "rid": rid,
            "return_prompt_token_ids": True,
            "stream": False,
        }
        if request.logprobs:
            body["return_logprob"] = True
        answer = await self._http.post("/generate", body, packed=request.packed)
        generation = read_answer(answer)
        said = answer["meta_info"].get("id")
        # SGLang itself calls the items of a batch RID_0, RID_1, …
        own = isinstance(said, str) and said.startswith(rid)
        self._keeps_rids = self._keeps_rids or own
        generation.renamed = said not in (None, "", rid)
        others = isinstance(said, str) and said.startswith(self._rid) and not own
        if others or (generation.renamed and not own and self._keeps_rids):
            generation.refusal = f"the answer is that of another request ({said!r}, not {rid})"
        return generation

    async def score(self, ids: Sequence[int], *, start: int, top: int = 0) -> Scores | None:
        answer = await openai.post_or_none(
            self._http,
            "/generate",
            {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": start - 1,  # the first entry it gives has no probability
                "top_logprobs_num": top,
                "stream": False,
            },
            timeout_s=openai.GENERATING_S,
        )
        return None if answer is None else read_scores(answer, list(ids[start:]))

    async def load(self) -> Load | None:
        """``/v1/loads`` (from 0.5.9 on), else ``/get_load``: one entry a data-parallel rank."""
        entries: Any = (await self._http.get("/v1/loads") or {}).get("loads")
        if entries is None:
            answer = await self._http.get_status("/get_load")
            if answer is None or answer[0] != 200:
                return None
            try:
                entries = orjson.loads(answer[1])
            except orjson.JSONDecodeError:
                return None
        return read_load(entries)


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
    if matched is None and kind == "stop":  # as the gRPC mode of SGLang's router names it
        matched = meta.get("matched_stop")
    logprob_ids = logprobs = None
    entries = meta.get("output_token_logprobs")
    if isinstance(entries, list):
        try:
            logprob_ids = [entry[1] for entry in entries]
            logprobs = as_logprobs(entry[0] for entry in entries)
        except (TypeError, IndexError, KeyError) as error:
            raise MalformedAnswer(f"output_token_logprobs cannot be read: {error}") from error
    ids, echo = answer.get("output_ids"), answer.get("prompt_token_ids")
    text, version = answer.get("text"), meta.get("weight_version")
    spans = meta.get("weight_versions")
    refusal = None
    if isinstance(spans, list) and len(spans) > 1:
        refusal = f"the weights changed during the generation: {spans}"
    said_abort = isinstance(finish, dict) and kind not in ("stop", "length")
    return Generation(
        output_ids=ids if isinstance(ids, _LISTS) else [],
        finish_reason=f"{kind}: {finish.get('message')}" if said_abort and isinstance(finish, dict)
        and finish.get("message") else as_text(kind),
        matched=matched,
        length=as_int(finish.get("length")) if isinstance(finish, dict) else None,
        prompt_tokens=as_int(meta.get("prompt_tokens")),
        completion_tokens=as_int(meta.get("completion_tokens")),
        prompt_echo=echo if isinstance(echo, _LISTS) else None,
        text=text if isinstance(text, str) else None,
        logprob_ids=logprob_ids,
        logprobs=logprobs,
        weight_version=as_text(version),
        cached_tokens=as_int(meta.get("cached_tokens")),
        refusal=refusal,
    )  # fmt: skip


def read_load(entries: Any) -> Load | None:
    """Sum the ranks' entries; ``num_reqs`` of ``/get_load`` counts the waiting ones too."""
    ranks = entries if isinstance(entries, list) else [entries]
    running = waiting = 0
    for rank in ranks:
        if not isinstance(rank, dict):
            return None
        waits = as_int(rank.get("num_waiting_reqs"))
        runs = as_int(rank.get("num_running_reqs"))
        if runs is None:
            every = as_int(rank.get("num_reqs"))
            runs = None if every is None or waits is None else max(0, every - waits)
        if runs is None or waits is None:
            return None
        running, waiting = running + runs, waiting + waits
    return Load(running, waiting) if ranks else None


def read_scores(answer: dict[str, Any], ids: list[int]) -> Scores | None:
    """The last entries of ``input_token_logprobs``, one an id; None where there are fewer.

    An entry is ``[logprob, id, text]``; the first of a prompt has null for its logprob. SGLang
    (0.5.23, ``logprob_result_processor.py``) calls the vocabulary's last id 0 there; its
    log-probability is right.
    """
    meta, count = answer.get("meta_info"), len(ids)
    entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(entries, list) or len(entries) < count or count < 1:
        return None
    tops = meta.get("input_top_logprobs") if isinstance(meta, dict) else None
    try:
        said, logprobs = zip(*((e[1], as_logprob(e[0])) for e in entries[-count:]), strict=True)
        likely = (
            [[(int(i), as_logprob(lp)) for lp, i, *_ in place or ()] for place in tops[-count:]]
            if isinstance(tops, list) and len(tops) >= count
            else None
        )
    except (TypeError, ValueError, IndexError, KeyError):
        return None
    renamed = {own for own, other in zip(ids, said, strict=True) if own != other and other == 0}
    last = max(renamed) if len(renamed) == 1 else None
    named = [own if own == last and other == 0 else other
             for own, other in zip(ids, said, strict=True)]  # fmt: skip
    return Scores(named, list(logprobs), likely)


def _context_length(models: dict[str, Any] | None, server: dict[str, Any] | None) -> int | None:
    """/v1/models says it reliably; /server_info's context_length is often null."""
    listed = (models or {}).get("data")
    if isinstance(listed, list) and listed and isinstance(listed[0], dict):
        found = as_int(listed[0].get("max_model_len"))
        if found:
            return found
    return as_int((server or {}).get("context_length"))
