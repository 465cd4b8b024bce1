"""HTTP/1.1 over kept connections, with next to nothing between a request and its answer.

A capture's hot path is one POST and one whole answer, hundreds at a time. A general client costs
several times what the sockets and the parser cost; so this speaks the little that is needed
over asyncio's transports, and the parser is httptools (llhttp, the one of Node and uvicorn).

Invariants: an answer is given only when it came whole, by its length, its chunks or, where it
has neither, the connection's orderly end; a connection is used again only after an answer that
allows it; a request that is cancelled closes its connection, which tells the server.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

KEPT_S = 4.0
"""How long an idle connection is used again: below uvicorn's 5 s (SGLang's default), so that
idle connections are closed by us first."""
_STALE_S = 0.5
"""A kept connection that ends so soon after a request was probably closed before it came."""
CONNECT_S = 30.0


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    """By their names in lower case."""
    body: bytes


class NotConnected(Exception):
    """No connection could be made."""


class NoAnswer(Exception):
    """The connection ended before an answer's headers had come."""


class CutAnswer(Exception):
    """The connection ended, or its peer stopped speaking HTTP, within an answer."""


class Wire:
    """Connections to one address."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        """Prepare; nothing is connected yet.

        Args:
            url: scheme, host, port and the path that all others are put behind.
            headers: sent with every request.
        """
        parts = urlsplit(url)
        assert parts.hostname
        self._host = parts.hostname
        secure = parts.scheme == "https"
        self._port = parts.port or (443 if secure else 80)
        self._ssl = ssl.create_default_context() if secure else None
        self._prefix = parts.path.encode()
        every = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **headers}
        self._headers = b"".join(
            b"%b: %b\r\n" % (name.encode("ascii"), value.encode("latin-1"))
            for name, value in every.items()
        )
        self._idle: list[_Connection] = []
        """The one that was used last stands last."""
        self._busy: set[_Connection] = set()

    async def request(self, method: str, path: str, body: bytes | None) -> Answer:
        """Send one request and wait for its whole answer, however long it takes.

        Raises:
            NotConnected, NoAnswer, CutAnswer: with the reason as their text or their cause.
        """
        length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        head = b"%b %b%b HTTP/1.1\r\n%b%b\r\n" % (
            method.encode("ascii"), self._prefix, path.encode(), self._headers, length,
        )  # fmt: skip
        data = head if body is None else head + body
        kept = self._kept()
        if kept is not None:
            sent = time.monotonic()
            try:
                return await self._ask(kept, data)
            except NoAnswer:  # its peer may have closed it just before
                if method != "GET" and time.monotonic() - sent > _STALE_S:
                    raise
        return await self._ask(await self._connect(), data)

    async def _ask(self, connection: _Connection, data: bytes) -> Answer:
        self._busy.add(connection)
        try:
            return await connection.ask(data)
        finally:
            self._busy.discard(connection)
            if connection.usable:
                self._idle.append(connection)
            else:
                connection.abort()

    def close(self) -> None:
        """Close every connection; what is in flight is cut off."""
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def _kept(self) -> _Connection | None:
        """A connection that was used just now; those that were idle for long are closed."""
        oldest = time.monotonic() - KEPT_S
        while self._idle and self._idle[0].used < oldest:
            self._idle.pop(0).abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise NotConnected(f"no connection within {CONNECT_S:.0f} s") from error
        except OSError as error:  # unreachable, unknown, or not to be trusted (SSL)
            raise NotConnected(_reason(error)) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection; it answers one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.used = time.monotonic()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._headed = False
        """Whether the answer's headers came."""

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, data: bytes) -> Answer:
        """Send a request's bytes and wait for its answer."""
        if self._transport is None:
            raise NoAnswer("the connection was closed")
        self._headed = False
        self._headers, self._body = {}, []
        self._waiting = self._loop.create_future()
        self._transport.write(data)
        try:
            return await self._waiting
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiting = None

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is none by class
        _watch_peer(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:  # nobody asked: this peer speaks out of turn
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(CutAnswer(f"it is not HTTP ({error})"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        said = str(error) if error and str(error) else "the connection was closed"
        lengths = ("content-length", "transfer-encoding")
        if error is None and self._headed and not any(name in self._headers for name in lengths):
            self._done()  # as servers of HTTP/1.0 end an answer
        elif self._headed:
            self._fail(CutAnswer(said))
        else:
            self._fail(NoAnswer(said))

    # -- httptools' parser -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._waiting is None or self._waiting.done():
            self.abort()  # a second answer to one request: what follows is nobody's

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue: the answer is still to come
            self._headed = False
            self._headers, self._body = {}, []
            return
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self.used = time.monotonic()
        self._done()

    def _done(self) -> None:
        if self._waiting is None or self._waiting.done():
            self.abort()  # a second answer to one request
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        if "content-encoding" in self._headers:
            try:
                with _decoding():
                    body = _decoded(body, self._headers["content-encoding"])
            except CutAnswer as error:
                self._fail(error)
                return
        answer = Answer(self._parser.get_status_code(), self._headers, body)
        self._waiting.set_result(answer)

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


def _watch_peer(sock: socket.socket) -> None:
    """Have the system ask an idle peer whether it is there.

    An answer may take an hour without a byte: a peer that is gone without a word (power, network)
    is noticed, and what stands between (a NAT, a load balancer) does not forget the connection.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: OSError) -> str:
    """Why there is no connection; uvloop and asyncio word the same fault differently."""
    if isinstance(error, ssl.SSLError):  # its number is OpenSSL's
        return str(error)
    number = error.errno
    if number is None:  # several addresses of one name failed: "Multiple exceptions: …"
        first = re.search(r"\[Errno (\d+)\]", str(error))
        number = int(first[1]) if first else None
    return os.strerror(number).lower() if number and number > 0 else str(error)


@contextmanager
def _decoding() -> Iterator[None]:
    try:
        yield
    except zlib.error as error:
        raise CutAnswer(f"its body cannot be decompressed: {error}") from error


def _decoded(body: bytes, encoding: str) -> bytes:
    """A body that is compressed although nobody asked for it."""
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return body
    if kind in ("gzip", "x-gzip", "deflate"):
        return zlib.decompress(body, zlib.MAX_WBITS | 32)  # with either header
    raise CutAnswer(f"its body is encoded as {encoding}, which nobody asked for")
