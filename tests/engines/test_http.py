"""One HTTP client: each way to fail is one named error, and no message holds a key."""

from __future__ import annotations

import asyncio
import email.utils
import json
import socket
import time
from typing import Any

import pytest

from eyas.engines import wire
from eyas.engines.http import HttpClient
from eyas.errors import (
    BusyError,
    EngineError,
    MalformedAnswer,
    RequestRefused,
    ServerUnreachable,
    TransportError,
)
from fault_server import Fault, FaultServer

BODY = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}


def posted(fault: Fault, *, key: str | None = None) -> dict[str, Any]:
    """What a POST gives that is answered like this."""

    async def ask(url: str) -> dict[str, Any]:
        http = HttpClient(url, api_key=key)
        try:
            return await http.post("/generate", BODY)
        finally:
            await http.close()

    with FaultServer(policy=lambda _, __: fault) as server:
        return asyncio.run(ask(server.url))


def body(value: object) -> bytes:
    return json.dumps(value).encode()


MESSAGES = {
    "SGLang": {"error": {"message": "too long"}},
    "a string": {"error": "too long"},
    "OpenAI": {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400},
    "vLLM": {"error": {"message": "too long", "type": "BadRequestError", "code": 400}},
    "FastAPI": {"detail": "too long"},
    "FastAPI's list": {"detail": [{"loc": ["body", "input_ids"], "msg": "too long"}]},
    "a list": [{"message": "too long"}],
}


@pytest.mark.parametrize("shape", MESSAGES)
@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_says_one_sentence(shape: str, status: int) -> None:
    with pytest.raises(RequestRefused) as refused:
        posted(Fault(status=status, body=body(MESSAGES[shape])))
    assert str(refused.value) == f"HTTP {status}: too long"
    assert refused.value.status == status


@pytest.mark.parametrize("raw", [b"", b"plain words", b"<html>x</html>", b"[]", b"3", b'{"a": 1}'])
@pytest.mark.parametrize("status", [400, 500])
def test_other_bodies_are_shown_as_they_are(raw: bytes, status: int) -> None:
    with pytest.raises(EngineError) as failed:
        posted(Fault(status=status, body=raw))
    assert str(failed.value) == f"HTTP {status}: {raw.decode() or '(no body)'}"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_what_may_succeed_later(status: int) -> None:
    with pytest.raises(BusyError) as busy:
        posted(Fault(status=status, body=b"{}"))
    assert (busy.value.status, busy.value.retry_after) == (status, None)


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("7", 7, 7), ("0.5", 0.5, 0.5), ("-3", 0, 0), ("soon", None, None), ("in 5", None, None),
     (600.0, 300, 601), (-600.0, 0, 0)],
    ids=["whole", "part", "negative", "word", "words", "later", "earlier"],
)  # fmt: skip
def test_the_pause_that_the_server_asks_for(
    header: str | float, low: float | None, high: float | None
) -> None:
    """A number is a date so many seconds from now."""
    if isinstance(header, float):
        header = email.utils.formatdate(time.time() + header, usegmt=True)
    with pytest.raises(BusyError) as busy:
        posted(Fault(status=503, body=b"", headers={"Retry-After": header}))
    asked = busy.value.retry_after
    assert asked is None if low is None or high is None else low <= (asked or 0.0) <= high


def test_a_date_is_one_of_the_servers_clock() -> None:
    """Its clock is three days ahead of ours."""
    now = time.time() + 3 * 86400
    headers = {"Date": email.utils.formatdate(now, usegmt=True),
               "Retry-After": email.utils.formatdate(now + 20, usegmt=True)}  # fmt: skip
    with pytest.raises(BusyError) as busy:
        posted(Fault(status=503, body=b"", headers=headers))
    assert busy.value.retry_after == 20


@pytest.mark.parametrize("status", [201, 204, 206, 304])
def test_a_success_of_another_kind_is_no_refusal(status: int) -> None:
    with pytest.raises(MalformedAnswer, match=f"HTTP {status}"):
        posted(Fault(status=status, body=b""))


def test_an_address_that_swallows_connections_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "CONNECT_S", 0.05)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        held = [socket.socket() for _ in range(3)]
        for one in held:  # the queue of those that nobody accepts is full
            one.setblocking(False)
            one.connect_ex(address)

        async def ask() -> None:
            http = HttpClient(f"127.0.0.1:{address[1]}")
            try:
                await http.post("/generate", BODY)
            finally:
                await http.close()

        with pytest.raises(ServerUnreachable, match="no connection within"):
            asyncio.run(ask())
        for one in held:
            one.close()


@pytest.mark.parametrize("header", ["inf", "nan", "1e300"])
def test_a_pause_without_end_is_none(header: str) -> None:
    with pytest.raises(BusyError) as busy:
        posted(Fault(status=503, body=b"", headers={"Retry-After": header}))
    assert busy.value.retry_after is None or 0 <= busy.value.retry_after < 1e6


@pytest.mark.parametrize("raw", [b"", b'{"output_ids": [1', b"[1, 2]", b'"ids"', b"null", b"NaN"])
def test_what_is_no_whole_object_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedAnswer) as bad:
        posted(Fault(body=raw))
    assert bad.value.reason == "malformed_answer"


def test_an_error_under_status_200() -> None:
    for shape in ("SGLang", "a string", "OpenAI"):
        with pytest.raises(MalformedAnswer, match="too long") as bad:
            posted(Fault(body=body(MESSAGES[shape])))
        assert bad.value.reason == "error_body"


def test_a_list_of_one_answer_is_that_answer() -> None:
    assert posted(Fault(body=b'[{"output_ids": [1]}]')) == {"output_ids": [1]}
    assert posted(Fault(body=b'{"error": null, "x": 1}')) == {"error": None, "x": 1}


def test_broken_connections_are_told_apart() -> None:
    with pytest.raises(TransportError, match="before an answer came"):
        posted(Fault(drop=True))
    with pytest.raises(MalformedAnswer) as bad:
        posted(Fault(cut_body=True))
    assert bad.value.reason == "cut_answer"


def test_nobody_there() -> None:
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def ask() -> None:
            http = HttpClient(f"127.0.0.1:{port}")
            assert not await http.reachable()
            try:
                await http.post("/generate", BODY)
            finally:
                await http.close()

        with pytest.raises(ServerUnreachable, match=f"nothing answers at http://127.0.0.1:{port}"):
            asyncio.run(ask())


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_a_key_that_the_server_repeats_is_struck_out(status: int) -> None:
    raw = body({"error": {"message": "bad key s3cret"}})
    with pytest.raises(EngineError) as failed:
        posted(Fault(status=status, body=raw), key="s3cret")
    assert "***" in str(failed.value)
    assert "s3cret" not in str(failed.value) + getattr(failed.value, "seen", "")


def test_a_page_that_is_not_there_is_none() -> None:
    async def ask(url: str) -> list[dict[str, Any] | None]:
        http = HttpClient(url)
        try:
            return [await http.get("/model_info"), await http.get("/absent")]
        finally:
            await http.close()

    with FaultServer(info={"model_path": "m"}) as server:
        assert asyncio.run(ask(server.url)) == [{"model_path": "m"}, None]
