"""One HTTP client for all engines: every way to fail becomes one named error.

Invariants: a status of 200 is only a success if the body is a whole JSON object without an
``error``; the API key goes into the header and nowhere else, and is struck out of every
message; there is no time limit on an answer, since a long generation is not a fault.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import time
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson

from eyas.engines.wire import Answer, CutAnswer, NoAnswer, NotConnected, Wire
from eyas.errors import (
    BusyError,
    ConfigError,
    EngineError,
    MalformedAnswer,
    RequestRefused,
    ServerUnreachable,
    TransportError,
)
from eyas.ids import as_json, read_object

_BUSY = frozenset((408, 425, 429))
_GET_PAUSES_S = (0.1, 0.3, 0.9)
"""Between tries of a page whose server is busy."""
_IDS = ("output_ids", "prompt_token_ids")
"""The lists of ids in an answer."""
_SHOWN = 300
"""Characters of a server's message that are passed on."""


def is_busy(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in _BUSY or status >= 500


def clean_url(url: str) -> str:
    """An address as it is stored and shown: scheme, no credentials, no trailing path of an API.

    Raises:
        ConfigError: if it is not an http(s) address.
    """
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url!r} is not an address: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"--url {url!r} is not an address such as http://127.0.0.1:30000")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port is None else f"{host}:{port}"
    path = parts.path.rstrip("/")
    for suffix in ("/generate", "/v1", "/completion"):
        path = path.removesuffix(suffix)
    return urlunsplit((parts.scheme, netloc, path, "", ""))


class HttpClient:
    """Posts JSON to one server and returns the parsed object."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = clean_url(url)
        self._key = api_key
        given = urlsplit(url if "://" in url else f"http://{url}")
        self._login = (given.username, given.password or "") if given.username else None
        self._open: Wire | None = None

    @property
    def _wire(self) -> Wire:
        if self._open is None:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            elif self._login:
                pair = b64encode(":".join(self._login).encode()).decode()
                headers["Authorization"] = f"Basic {pair}"
            self._open = Wire(self.url, headers)
        return self._open

    async def close(self) -> None:
        """Close all connections; requests in flight are cut off, which aborts them."""
        if self._open is not None:
            self._open.close()

    async def post(
        self, path: str, body: Mapping[str, Any], *, packed: bool = False
    ) -> dict[str, Any]:
        """POST a JSON object and return the JSON object that came back.

        Args:
            packed: whether lists of ids in it may be `Ids`.

        Raises:
            EngineError: the kind that fits; see `eyas.errors`.
        """
        data = orjson.dumps(body, as_json)
        status, headers, raw = await self._request("POST", path, data)
        if packed and status == 200:
            value = read_object(raw, _IDS)
            if value is not None and not _is_error(value):
                return value
        return self._parse(status, headers, raw)

    async def get(self, path: str, *, timeout_s: float = 10.0) -> dict[str, Any] | None:
        """GET a JSON object, or None where the server has no such page or gives no object."""
        for pause in (*_GET_PAUSES_S, None):
            try:
                async with asyncio.timeout(timeout_s):
                    status, headers, raw = await self._request("GET", path, None)
            except (TimeoutError, TransportError):
                return None
            if pause is None or not is_busy(status):
                break
            await asyncio.sleep(pause)
        if status in (401, 403):
            self._parse(status, headers, raw)
        if status != 200:
            return None
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return None
        return value if isinstance(value, dict) else None

    async def get_status(self, path: str, *, timeout_s: float = 10.0) -> tuple[int, str] | None:
        """The status and text of a page, or None where nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                status, _, raw = await self._request("GET", path, None)
        except (TimeoutError, EngineError):
            return None
        return status, raw.decode("utf-8", "replace")

    async def healthy(self, timeout_s: float) -> bool | None:
        """What ``/health`` says; None where there is no such page."""
        answer = await self.get_status("/health", timeout_s=timeout_s)
        if answer is None:
            return False
        return None if answer[0] in (404, 405, 501) else answer[0] == 200

    async def post_status(self, path: str, body: Mapping[str, Any]) -> int:
        """The status that a POST gets, whatever the body says."""
        return (await self._request("POST", path, orjson.dumps(body)))[0]

    async def reachable(self) -> bool:
        """Whether the server accepts a connection."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(5):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def _request(self, method: str, path: str, data: bytes | None) -> Answer:
        try:
            return await self._wire.request(method, path, data)
        except NotConnected as error:
            raise ServerUnreachable(
                self._strike(f"nothing answers at {self.url} ({error})")
            ) from error
        except CutAnswer as error:
            raise MalformedAnswer(
                self._strike(f"the answer was cut off: {error}"), reason="cut_answer"
            ) from error
        except NoAnswer as error:
            raise TransportError(
                self._strike(f"the connection to {self.url} broke before an answer came: {error}")
            ) from error

    def _parse(self, status: int, headers: Mapping[str, str], raw: bytes) -> dict[str, Any]:
        if status != 200:
            raise self._status_error(status, headers, raw)
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise MalformedAnswer(
                f"the answer is not whole JSON ({error}; {len(raw)} bytes)",
                seen=self._shown(raw),
            ) from error
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0]
        if not isinstance(value, dict):
            raise MalformedAnswer(
                f"the answer is a JSON {type(value).__name__}, not an object",
                seen=self._shown(raw),
            )
        if _is_error(value):
            raise MalformedAnswer(
                f"an error under status 200: {self._message(raw)}",
                reason="error_body",
                seen=self._shown(raw),
            )
        return value

    def _status_error(self, status: int, headers: Mapping[str, str], raw: bytes) -> EngineError:
        said = f"HTTP {status}: {self._message(raw)}"
        if is_busy(status):
            return BusyError(said, status=status, retry_after=_retry_after(headers))
        if status in (401, 403):
            hint = "is the key in the variable that --api-key-env names right?"
            return RequestRefused(f"{said} ({hint})", status=status)
        if "location" in headers:
            hint = f"it points to {headers['location']}: give the address that answers itself"
            return RequestRefused(f"{said} ({hint})", status=status)
        if status < 400:
            return MalformedAnswer(said, seen=self._shown(raw))
        return RequestRefused(said, status=status)

    def _message(self, raw: bytes) -> str:
        """One clear sentence out of the shapes that error bodies come in."""
        try:
            value: Any = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return self._shown(raw) or "(no body)"
        for _ in range(3):  # {"error": {"message": …}}, {"detail": [{"msg": …}]}, …
            if isinstance(value, dict):
                value = next(
                    (value[k] for k in ("message", "error", "detail", "msg") if value.get(k)),
                    value,
                )
            if isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, str):
                return self._strike(value)[:_SHOWN]
        return self._shown(raw)

    def _shown(self, raw: bytes) -> str:
        return self._strike(raw[: 4 * _SHOWN].decode("utf-8", "replace"))[:_SHOWN].strip()

    def _strike(self, text: str) -> str:
        """Servers may echo the key; no message of ours does."""
        if self._key:
            text = text.replace(self._key, "***")
        if self._login is not None and self._login[1]:
            text = text.replace(self._login[1], "***")
        return text


def _is_error(value: dict[str, Any]) -> bool:
    return bool(value.get("error") or value.get("object") == "error") and "output_ids" not in value


_LONGEST_ASKED_S = 600.0


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header (a number or a date), at most ten minutes, or None.

    A date is one of the server's clock, so it is compared with the answer's own ``Date``.
    """
    value = headers.get("retry-after")
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        until, now = _moment(value), _moment(headers.get("date"))
        if until is None:
            return None
        seconds = until - (time.time() if now is None else now)
    return min(max(0.0, seconds), _LONGEST_ASKED_S) if math.isfinite(seconds) else None


def _moment(value: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(value or "").timestamp()
    except (TypeError, ValueError):
        return None
