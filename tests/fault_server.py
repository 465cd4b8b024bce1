"""An SGLang-like server whose right answer to every prompt is known, and which can lie.

The answer is a pure function of the prompt ids (`right_ids`), so that a test knows it without
asking. A `Policy` decides for each request what happens instead; `LIES` are changes of an
honest answer that no client may take for a good row.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from eyas.demo.server import TARGET
from eyas.tokens import ChatTemplate, Tokenizer, load_tokenizer

Answer = dict[str, Any]
END, OPENER, CLOSER = 506, 510, 511
"""Control ids of the demo target."""


class Target:
    """The pretended model: what it answers to a prompt of the demo tokenizer."""

    end = END
    noise = 0.0
    """How much scores of the same ids differ from one time to the next."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer or load_tokenizer(str(TARGET))
        control = set(self.tokenizer.control.values())
        self.plain = [
            i
            for i in range(self.tokenizer.size)
            if i not in control and self.tokenizer.decode([i]).strip().isalnum()
        ]

    def right_ids(self, prompt: list[int]) -> list[int]:
        """The one right answer: reasoning, closer, answer, stop id; no reasoning where the prompt
        closed it."""
        seed = hashlib.sha256(json.dumps(prompt).encode()).digest()
        chosen = random.Random(seed)
        reasoning = chosen.choices(self.plain, k=chosen.randint(5, 30))
        answer = chosen.choices(self.plain, k=chosen.randint(1, 12))
        return [*answer, END] if prompt[-1] == CLOSER else [*reasoning, CLOSER, *answer, END]

    def answer(self, body: Answer, *, text: bool = True) -> Answer:
        """What an honest SGLang 0.5.23 says."""
        if "logprob_start_len" in body:
            return self.scores(body)
        prompt = body["input_ids"]
        ids = self.right_ids(prompt)
        budget = body["sampling_params"]["max_new_tokens"]
        finish: Answer = {"type": "stop", "matched": self.end}
        if len(ids) > budget:
            ids, finish = ids[:budget], {"type": "length", "length": budget}
        shown = ids[:-1] if finish["type"] == "stop" else ids
        answer: Answer = {
            "output_ids": ids,
            "meta_info": {
                "id": body.get("rid", ""),
                "finish_reason": finish,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "weight_version": "default",
            },
        }
        if text:
            answer["text"] = self.tokenizer.decode(shown)
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = prompt
        if body.get("return_logprob"):
            scored = self.logprobs(prompt + ids, len(prompt))
            answer["meta_info"]["output_token_logprobs"] = [
                [lp, i, None] for i, (lp, _) in zip(ids, scored, strict=True)
            ]
        return answer

    def logprobs(self, ids: list[int], start: int) -> list[tuple[float, int]]:
        """For each id from `start` on its log-probability after all ids before it, and the
        likeliest id there: the right one as long as all before it were right."""
        right = self.right_ids(ids[:start])
        scored, on_track = [], True
        for at in range(start, len(ids)):
            chosen = random.Random(f"{ids[max(0, at - 3) : at]}")
            place = at - start
            likeliest = right[place] if on_track and place < len(right) else chosen.randrange(500)
            unlikely = 0.0 if ids[at] == likeliest else 9.0
            scored.append((-0.05 - 0.4 * chosen.random() - unlikely, likeliest))
            on_track = on_track and unlikely == 0.0
        return scored

    def scores(self, body: Answer) -> Answer:
        """What an honest SGLang says of a prompt that is to be scored, clock and all."""
        ids, start = body["input_ids"], body["logprob_start_len"]
        scored = self.logprobs(ids, start + 1)
        entries: list[Any] = [[None, ids[start], None]]
        tops: list[Any] = [None]
        for i, (lp, likeliest) in zip(ids[start + 1 :], scored, strict=True):
            lp += self.noise * random.uniform(-1, 1)
            # As SGLang does: the vocabulary's last id is called 0.
            entries.append([lp, i if i < self.tokenizer.size - 1 else 0, None])
            best = [[-0.01, likeliest, None]] if i != likeliest else []
            tops.append([*best, [lp, i, None]])
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": body.get("rid", ""),
                "finish_reason": {"type": "length", "length": 0},
                "prompt_tokens": len(ids),
                "completion_tokens": 0,
                "input_token_logprobs": entries,
                "input_top_logprobs": tops if body.get("top_logprobs_num") else None,
            },
        }

    def chat(self, body: Answer) -> Answer:
        """What the chat route says, with a reasoning parser in force."""
        ids = self.tokenizer.encode(self.render(body))
        answer = self.right_ids(ids)
        at = answer.index(CLOSER) if CLOSER in answer else 0
        message = {
            "role": "assistant",
            "content": self.tokenizer.decode(answer[at + 1 : -1]).strip(),
            "reasoning_content": self.tokenizer.decode(answer[:at]).strip(),
        }
        return {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(ids), "completion_tokens": len(answer)},
        }

    def render(self, body: Answer) -> str:
        """The server's own rendering of messages."""
        template = ChatTemplate.of(self.tokenizer, kwargs=body.get("chat_template_kwargs"))
        return template.render(body["messages"])


@dataclass
class Pages:
    """What the pages besides /generate do; honest unless exchanged."""

    tokenize: Callable[[Target, str], list[int]] = lambda t, text: t.tokenizer.encode(text)
    render: Callable[[Target, Answer], str] = lambda t, body: t.render(body)
    chat: Callable[[Target, Answer], Answer] = lambda t, body: t.chat(body)


@dataclass
class Fault:
    """Something other than an honest answer."""

    status: int = 200
    body: bytes | None = None
    answer: Answer | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    until: threading.Event | None = None
    """Answer only when this is set."""
    drop: bool = False
    """Close the connection without a word."""
    cut_body: bool = False
    """Promise a longer body than is sent."""
    raw: bytes | None = None
    """Exactly these bytes, and then the end of the connection."""
    away_s: float = 0.0
    """Drop this connection, and accept no other one for a while."""
    crash_s: float = 0.0
    """Drop all connections, and accept none for a while."""


def asks_one_token(body: Answer) -> bool:
    """Whether a request is no row's, but asks whether anybody is answered (or which engine)."""
    return "input_ids" in body and body["sampling_params"].get("max_new_tokens") == 1


Policy = Callable[[Answer, Answer], Fault | None]
"""(request body, honest answer) -> what to do instead, or None."""


def _set(path: str, value: Any) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        place = answer
        *parents, last = path.split(".")
        for name in parents:
            place = place[name]
        place[last] = value(answer) if callable(value) else value

    return change


def _both(*changes: Callable[[Answer], None]) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        for one in changes:
            one(answer)

    return change


def _counted(ids: Callable[[Answer], list[Any]]) -> Callable[[Answer], None]:
    """Other ids, with a count that fits them and no text that would tell."""

    def change(answer: Answer) -> None:
        answer["output_ids"] = ids(answer)
        answer["meta_info"]["completion_tokens"] = len(answer["output_ids"])
        answer.pop("text", None)

    return change


def _exchanged(answer: Answer) -> list[int]:
    ids = list(answer["output_ids"])
    ids[1] = ids[1] % 200 + 70
    return ids if ids != answer["output_ids"] else [*ids[:1], 71, *ids[2:]]


LIES: dict[str, tuple[Callable[[Answer], None], str]] = {
    "prompt_tail_prepended": (
        _set("output_ids", lambda a: [*a["prompt_token_ids"][-5:], *a["output_ids"]]),
        "completion_tokens",
    ),
    "closer_missing": (
        _counted(lambda a: [i for i in a["output_ids"] if i != CLOSER]),
        "missing_closer",
    ),
    "ids_missing": (_set("output_ids", lambda a: a["output_ids"][:2] + a["output_ids"][4:]),
                    "completion_tokens"),
    "ids_absent": (lambda a: a.pop("output_ids"), "no_output_ids"),
    "ids_null": (_set("output_ids", None), "no_output_ids"),
    "ids_empty": (_counted(lambda _: []), "no_output_ids"),
    "id_beyond_vocabulary": (
        _counted(lambda a: [512, *a["output_ids"][1:]]), "vocabulary"),
    "id_huge": (_counted(lambda a: [10**12, *a["output_ids"][1:]]), "vocabulary"),
    "id_negative": (_counted(lambda a: [-1, *a["output_ids"][1:]]), "vocabulary"),
    "id_float": (_counted(lambda a: [66.0, *a["output_ids"][1:]]), "not_ids"),
    "id_text": (_counted(lambda a: ["66", *a["output_ids"][1:]]), "not_ids"),
    "id_bool": (_counted(lambda a: [True, *a["output_ids"][1:]]), "not_ids"),
    "id_list": (_counted(lambda a: [[66], *a["output_ids"][1:]]), "not_ids"),
    "prompt_count": (_set("meta_info.prompt_tokens", lambda a: a["meta_info"]["prompt_tokens"] + 1),
                     "prompt_tokens"),
    "prompt_count_absent": (lambda a: a["meta_info"].pop("prompt_tokens"), "prompt_tokens"),
    "count_absent": (lambda a: a["meta_info"].pop("completion_tokens"), "completion_tokens"),
    "echo_differs": (_set("prompt_token_ids", lambda a: [0, *a["prompt_token_ids"][1:]]),
                     "prompt_echo"),
    "matched_text": (_set("meta_info.finish_reason.matched", "NaN happened"), "stop_text"),
    "matched_absent": (lambda a: a["meta_info"]["finish_reason"].pop("matched"), "stop_unmatched"),
    "matched_other": (_set("meta_info.finish_reason.matched", 505), "stop_id"),
    "stop_dropped": (_counted(lambda a: a["output_ids"][:-1]), "stop_id"),
    "stop_inside": (_counted(lambda a: [*a["output_ids"][:3], END, *a["output_ids"][3:]]),
                    "stop_inside"),
    "one_id_exchanged": (_set("output_ids", _exchanged), "text"),
    "weights_changed": (_set("meta_info.weight_versions", [{"version": "a"}, {"version": "b"}]),
                        "engine_refusal"),
    "finish_unknown": (_set("meta_info.finish_reason", {"type": "whim"}), "finish_reason"),
    "abort": (_both(_set("meta_info.finish_reason", {"type": "abort", "message": "Aborted"}),
                    _counted(lambda a: a["output_ids"][:3])), "finish_reason"),
}  # fmt: skip
"""Name -> (the change of an honest answer, the check that refuses it)."""


def lying(name: str, share: float = 1.0, seed: int = 0) -> Policy:
    """A policy that tells one lie, always or at random."""
    change, chosen = LIES[name][0], random.Random(seed)

    def policy(body: Answer, honest: Answer) -> Fault | None:
        if asks_one_token(body) or chosen.random() >= share:
            return None
        answer = copy.deepcopy(honest)
        change(answer)
        return Fault(answer=answer)

    return policy


class FaultServer:
    """Runs on a thread, on 127.0.0.1 and a free port; a context manager."""

    def __init__(
        self,
        target: Target | None = None,
        *,
        policy: Policy | None = None,
        text: bool = True,
        info: Answer | None = None,
        pages: Pages | None = None,
        delay_s: float = 0.0,
        port: int = 0,
    ) -> None:
        """`info` is what /model_info and /server_info say, `pages` change what the other pages
        do; without both only /generate is there."""
        self.target = target or Target()
        self.policy = policy
        self.text = text
        self.info = info
        self.pages = pages
        self.delay_s = delay_s
        self.port = port
        self.requests: list[Answer] = []
        self.authorization: list[str | None] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        """Requests whose client went away before they were answered."""
        self.url = ""
        self._away = False
        self._aside: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(600)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(600)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/generate", self._generate)
        if self.info is not None:
            for path in ("/model_info", "/server_info"):
                app.router.add_get(path, self._say_info)
        if self.pages is not None:
            app.router.add_post("/tokenize", self._tokenize)
            app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await self._listen()
        self.url = f"http://127.0.0.1:{self.port}"

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        assert self._site._server is not None
        self.port = self._site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def _go_away(self, seconds: float, *, everybody: bool) -> None:
        """Accept no connections for a while, and drop those that there are."""
        if self._away:
            return
        self._away = True
        assert self._runner.server is not None
        connections = list(self._runner.server.connections) if everybody else []
        assert self._site._server is not None
        self._site._server.close()
        for connection in connections:
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(seconds)
        self._runner._unreg_site(self._site)
        await self._listen()
        self._away = False

    async def _say_info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _tokenize(self, request: web.Request) -> web.Response:
        assert self.pages is not None
        body = await request.json()
        if "messages" in body:
            ids = self.target.tokenizer.encode(self.pages.render(self.target, body))
        else:
            ids = self.pages.tokenize(self.target, body["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 2048})

    async def _chat(self, request: web.Request) -> web.Response:
        assert self.pages is not None
        return web.json_response(self.pages.chat(self.target, await request.json()))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not asks_one_token(body):
            self.requests.append(body)
        self.authorization.append(request.headers.get("Authorization"))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._respond(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _respond(self, request: web.Request, body: Answer) -> web.StreamResponse:
        honest = self.target.answer(body, text=self.text)
        fault = self.policy(body, honest) if self.policy else None
        await asyncio.sleep(self.delay_s if fault is None else fault.delay_s or self.delay_s)
        if fault is None:
            return web.json_response(honest)
        while fault.until is not None and not fault.until.is_set():
            await asyncio.sleep(0.01)
        assert request.transport is not None
        if seconds := fault.away_s or fault.crash_s:
            going = asyncio.create_task(self._go_away(seconds, everybody=fault.crash_s > 0))
            self._aside.add(going)
            going.add_done_callback(self._aside.discard)
        if fault.raw is not None:
            request.transport.write(fault.raw)
        if fault.drop or seconds or fault.raw is not None:
            request.transport.close()
            return web.Response()
        if fault.answer is not None:
            return web.json_response(fault.answer, status=fault.status, headers=fault.headers)
        whole = fault.body if fault.body is not None else json.dumps(honest).encode()
        if fault.cut_body:
            response = web.StreamResponse(headers={"Content-Length": str(len(whole) + 100)})
            await response.prepare(request)
            await response.write(whole)
            request.transport.close()
            return response
        return web.Response(status=fault.status, body=whole, headers=fault.headers)
