"""Figures of a running capture for Prometheus, in its text format over HTTP.

Invariants: counters only rise; figures are of completions; whoever asks, or does not read what
it asked for, holds up nothing: a page is made when the capture has a snapshot, and served by
threads that share only its bytes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Self

from eyas.errors import ConfigError
from eyas.pace import Pace, Rates
from eyas.progress import Progress

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE_S = 5.0

METRICS: dict[str, tuple[str, str]] = {
    "eyas_rows_total": ("counter", "Rows of this capture by outcome: stop, length, or the reason of a refusal."),
    "eyas_rows_durable_total": ("counter", "Rows of this capture that are on disk, refused ones included."),
    "eyas_prompt_tokens_total": ("counter", "Prompt tokens of finished answers."),
    "eyas_output_tokens_total": ("counter", "Generated tokens of finished answers."),
    "eyas_cached_prompt_tokens_total": ("counter", "Prompt tokens that a server had in its cache."),
    "eyas_seconds_total": ("counter", "Seconds since the capture began."),
    "eyas_input_rows": ("gauge", "Rows of the input by state, those of earlier captures included; pending may be an estimate."),
    "eyas_requests_in_flight": ("gauge", "Requests that were sent and not yet answered."),
    "eyas_eta_seconds": ("gauge", "Forecast of the seconds until the last row; absent where there is none."),
    "eyas_server_up": ("gauge", "1 if the server answers, 0 if it is down."),
    "eyas_server_slots": ("gauge", "Requests that a server is to hold at once."),
    "eyas_server_in_flight": ("gauge", "Requests in flight at a server."),
    "eyas_server_queued": ("gauge", "Requests that wait in a server, where it tells."),
    "eyas_server_answers_total": ("counter", "Answers of a server."),
    "eyas_server_output_tokens_total": ("counter", "Generated tokens of a server's answers."),
}  # fmt: skip
"""Name -> (type, help), in the order of the page."""

Sample = tuple[str, Mapping[str, str], float]


class Metrics:
    """Serves ``/metrics``; a context manager. Give `update` the capture's snapshots."""

    def __init__(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            ConfigError: if the address cannot be had.
        """
        self._pace = Pace()
        self._highest: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        page = self._page = _Page()
        page.text = self._render(Progress(), Rates())
        try:
            self._server = _Server(host, port, page)
        except (OSError, OverflowError, UnicodeError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(
                f"--metrics-port {port} cannot be opened on {host}: {said}. Choose another port."
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="eyas-metrics", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def update(self, progress: Progress) -> None:
        """Make the page anew."""
        self._page.text = self._render(progress, self._pace.take(progress))

    def _render(self, progress: Progress, rates: Rates) -> bytes:
        by_name: dict[str, list[str]] = {}
        for name, labels, value in _samples(progress, rates):
            if METRICS[name][0] == "counter":
                which = (name, tuple(labels.items()))
                value = self._highest[which] = max(value, self._highest.get(which, 0.0))
            by_name.setdefault(name, []).append(f"{name}{_labels(labels)} {_number(value)}\n")
        lines: list[str] = []
        for name, (kind, text) in METRICS.items():
            if name in by_name:
                lines += [f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n", *by_name[name]]
        return "".join(lines).encode("utf-8", "replace")


def _samples(progress: Progress, rates: Rates) -> Iterator[Sample]:
    for outcome, count in progress.finish_reasons.items():
        yield "eyas_rows_total", {"outcome": outcome}, count
    yield "eyas_rows_durable_total", {}, progress.new
    yield "eyas_prompt_tokens_total", {}, progress.prompt_tokens
    yield "eyas_output_tokens_total", {}, progress.output_tokens
    yield "eyas_cached_prompt_tokens_total", {}, progress.cached_tokens or 0
    yield "eyas_seconds_total", {}, progress.seconds
    yield "eyas_input_rows", {"state": "done"}, progress.done
    yield "eyas_input_rows", {"state": "rejected"}, progress.rejected
    if progress.total is not None:
        pending = max(0, progress.total - progress.done - progress.rejected)
        yield "eyas_input_rows", {"state": "pending"}, pending
    yield "eyas_requests_in_flight", {}, progress.in_flight
    if rates.eta_seconds is not None:
        yield "eyas_eta_seconds", {}, rates.eta_seconds
    for server in progress.servers:
        labels = {"server": server.url}
        yield "eyas_server_up", labels, server.up
        yield "eyas_server_slots", labels, server.slots
        yield "eyas_server_in_flight", labels, server.in_flight
        if server.queued is not None:
            yield "eyas_server_queued", labels, server.queued
        yield "eyas_server_answers_total", labels, server.answered
        yield "eyas_server_output_tokens_total", labels, server.output_tokens


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    said = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{said}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.3f}"


class _Page:
    """The bytes that are served; replaced as a whole."""

    text = b""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, page: _Page) -> None:
        self.page = page
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for our own name, which can take seconds."""
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that went away are nobody's business."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    server: _Server

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        found = self.path.split("?", 1)[0] == "/metrics"
        text = self.server.page.text if found else b"the figures are at /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if body:
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing: the terminal belongs to the capture."""
