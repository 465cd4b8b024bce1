"""The wire: an answer is given whole or not at all, and connections are kept only where they may be."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from eyas.engines import wire
from eyas.engines.wire import Answer, CutAnswer, NoAnswer, NotConnected, Wire

BODY = b'{"output_ids":[1,2,3]}'
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 22\r\n\r\n" + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"a;x=y\r\n" + BODY[:10] + b"\r\nc\r\n" + BODY[10:] + b"\r\n0\r\nTrailer: t\r\n\r\n"
)
CLOSED = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + BODY
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN
SHAPES = {"length": PLAIN, "chunks": CHUNKED, "end": CLOSED, "continue": CONTINUED}


class Peer:
    """Answers the n-th request with the n-th piece of bytes; an empty one ends the connection."""

    def __init__(self, *answers: bytes, piece: int = 0, end: bool = False) -> None:
        self.answers = list(answers)
        self.piece = piece
        self.end = end
        self.requests: list[bytes] = []
        self.connections = 0
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if self.answers else b""
                for at in range(0, len(answer), self.piece or len(answer) or 1):
                    writer.write(answer[at : at + (self.piece or len(answer))])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.end or not answer:
                    break
        except asyncio.IncompleteReadError:
            self.gone.set()
        writer.close()


def with_peer(peer: Callable[[], Peer], ask: Callable[[Wire, Peer], Awaitable[object]]) -> object:
    async def run() -> object:
        other = peer()
        server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Wire(f"http://127.0.0.1:{port}/base", {"X-Key": "k"})
        try:
            return await ask(client, other)
        finally:
            client.close()
            server.close()

    return asyncio.run(run())


async def post(client: Wire, _: Peer) -> Answer:
    return await client.request("POST", "/generate", b"{}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piece", [0, 1, 7])
def test_every_shape_of_answer(shape: str, piece: int) -> None:
    end = shape == "end"
    answer = with_peer(lambda: Peer(SHAPES[shape], piece=piece, end=end), post)
    assert isinstance(answer, Answer)
    assert (answer.status, answer.body) == (200, BODY)


@pytest.mark.parametrize("shape", ["length", "chunks", "continue"])
def test_an_answer_that_is_cut_anywhere_is_no_answer(shape: str) -> None:
    whole = SHAPES[shape]
    headed = whole.rindex(b"\r\n\r\n", 0, whole.index(b'{"') if shape != "chunks" else 60) + 4
    for cut in range(1, len(whole)):
        kind = NoAnswer if cut < headed else CutAnswer
        with pytest.raises(kind):
            with_peer(lambda cut=cut: Peer(whole[:cut], end=True), post)


def test_what_is_sent() -> None:
    async def ask(client: Wire, peer: Peer) -> list[bytes]:
        await client.request("POST", "/generate", b'{"a":1}')
        await client.request("GET", "/health", None)
        return peer.requests

    first, second = with_peer(lambda: Peer(PLAIN, PLAIN), ask)  # type: ignore[misc]
    assert first.startswith(b"POST /base/generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert first.endswith(b'X-Key: k\r\nContent-Length: 7\r\n\r\n{"a":1}')
    assert second.startswith(b"GET /base/health HTTP/1.1\r\n")
    assert b"content-length" not in second.lower()


def test_a_connection_is_used_again() -> None:
    async def ask(client: Wire, peer: Peer) -> tuple[int, int]:
        for _ in range(3):
            await post(client, peer)
        first = peer.connections
        await asyncio.gather(*(post(client, peer) for _ in range(4)))
        return first, peer.connections

    assert with_peer(lambda: Peer(*[PLAIN] * 7), ask) == (1, 4)


@pytest.mark.parametrize(
    "last", [PLAIN.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), CLOSED, PLAIN + PLAIN]
)
def test_a_connection_is_not_used_again(last: bytes) -> None:
    async def ask(client: Wire, peer: Peer) -> int:
        assert (await post(client, peer)).body == BODY
        assert (await post(client, peer)).body == BODY
        return peer.connections

    assert with_peer(lambda: Peer(last, PLAIN, end=last is CLOSED), ask) == 2


def test_an_idle_connection_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "KEPT_S", -1.0)

    async def ask(client: Wire, peer: Peer) -> int:
        await post(client, peer)
        await post(client, peer)
        return peer.connections

    assert with_peer(lambda: Peer(PLAIN, PLAIN), ask) == 2


@pytest.mark.parametrize("stale_s", [0.5, -1.0], ids=["at once", "later"])
def test_a_request_is_sent_again_where_a_kept_connection_has_ended(
    stale_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer closed it just before; a generation that broke off later is another matter."""
    monkeypatch.setattr(wire, "_STALE_S", stale_s)

    async def get(client: Wire, peer: Peer) -> Answer:
        await post(client, peer)
        return await client.request("GET", "/health", None)

    async def post_twice(client: Wire, peer: Peer) -> Answer:
        await post(client, peer)
        return await post(client, peer)

    def peer() -> Peer:
        return Peer(PLAIN, b"", PLAIN)

    assert isinstance(with_peer(peer, get), Answer)
    if stale_s > 0:
        assert isinstance(with_peer(peer, post_twice), Answer)
        with pytest.raises(NoAnswer):  # not a third time
            with_peer(lambda: Peer(PLAIN, b"", b""), post_twice)
    else:
        with pytest.raises(NoAnswer):
            with_peer(peer, post_twice)


@pytest.mark.parametrize("cut", [1, 20, len(PLAIN) - 1])
def test_the_beginning_of_a_second_answer_is_nobodys(cut: int) -> None:
    """It came with the first; its rest must not become the answer to the next request."""
    other = PLAIN.replace(b"1,2,3", b"9,9,9")

    async def ask(client: Wire, peer: Peer) -> tuple[bytes, int]:
        assert (await post(client, peer)).body == BODY
        return (await post(client, peer)).body, peer.connections

    def peer() -> Peer:
        return Peer(PLAIN + other[:cut], PLAIN)

    assert with_peer(peer, ask) == (BODY, 2)


def test_a_cancelled_request_is_told_to_the_server() -> None:
    async def ask(client: Wire, peer: Peer) -> bool:
        head = PLAIN[:30]
        peer.answers = [head]
        task = asyncio.create_task(client.request("POST", "/generate", b"{}"))
        while not peer.requests:
            await asyncio.sleep(0)
        task.cancel()
        await peer.gone.wait()
        return task.cancelled()

    assert with_peer(Peer, ask)


def test_a_peer_that_is_gone_without_a_word_is_noticed() -> None:
    """An answer may take an hour; the system asks meanwhile whether the peer is there."""

    async def ask(client: Wire, peer: Peer) -> list[int]:
        await post(client, peer)
        transport = client._idle[0]._transport
        assert transport is not None
        sock = transport.get_extra_info("socket")
        options = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        ]
        return [sock.getsockopt(*option) for option in options]

    on, after_s = with_peer(lambda: Peer(PLAIN), ask)  # type: ignore[misc]
    assert on
    assert after_s == 30


def test_closing_cuts_off_what_is_in_flight() -> None:
    async def ask(client: Wire, peer: Peer) -> None:
        peer.answers = [PLAIN[:30]]
        task = asyncio.create_task(client.request("POST", "/generate", b"{}"))
        while not peer.requests:
            await asyncio.sleep(0)
        client.close()
        await task

    with pytest.raises(NoAnswer):
        with_peer(Peer, ask)


def test_a_peer_that_does_not_speak_http() -> None:
    with pytest.raises((NoAnswer, CutAnswer), match="not HTTP"):
        with_peer(lambda: Peer(b"SSH-2.0-OpenSSH_9.6\r\n"), post)


@pytest.mark.parametrize(
    ("encoding", "coded"),
    [
        (b"gzip", gzip.compress(BODY)),
        (b"deflate", zlib.compress(BODY)),
        (b"identity", BODY),
    ],
    ids=["gzip", "deflate", "identity"],
)
def test_a_body_that_is_compressed_unasked(encoding: bytes, coded: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n"
    answer = with_peer(lambda: Peer(head % (encoding, len(coded)) + coded), post)
    assert isinstance(answer, Answer)
    assert answer.body == BODY


@pytest.mark.parametrize(("encoding", "said"), [(b"gzip", "decompressed"), (b"br", "as br")])
def test_a_body_that_cannot_be_decoded(encoding: bytes, said: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: 4\r\n\r\nabcd" % encoding
    with pytest.raises(CutAnswer, match=said):
        with_peer(lambda: Peer(head), post)


def test_nobody_there() -> None:
    with pytest.raises(NotConnected, match="refused"):
        asyncio.run(Wire("http://127.0.0.1:1", {}).request("GET", "/", None))
    with pytest.raises(NotConnected):
        asyncio.run(Wire("http://no-such-host.invalid", {}).request("GET", "/", None))


def test_a_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shutil.which("openssl") and subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out",
         "cert.pem", "-days", "1", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        cwd=tmp_path, capture_output=True,
    )  # fmt: skip
    if not made or made.returncode:
        pytest.skip("needs the openssl program to make a certificate")
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def ask() -> Answer:
        peer = Peer(PLAIN)
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, ssl=own)
        client = Wire(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
        try:
            return await post(client, peer)
        finally:
            client.close()
            server.close()

    with pytest.raises(NotConnected, match=r"(?i)certificate"):
        asyncio.run(ask())
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    assert asyncio.run(ask()).body == BODY
