"""Every error that eyas raises on purpose, as one tree.

EyasError                       a sentence for the user; the CLI prints it without a traceback
├── UsageError                  the command or its configuration is wrong            exit 2
│   ├── ConfigError             a configuration file or value
│   ├── InputError              prompt files that do not exist or cannot be opened
│   ├── TokenizerError          a tokenizer or chat template that cannot be used
│   ├── FingerprintError        the output directory belongs to another configuration
│   ├── UnsuitableServerError   a server of a kind or version that cannot be captured from
│   └── ProbeFailed             a capture from this server would be wrong
├── TemplateRefusal             the chat template refuses one conversation           (rejects a row)
├── EngineError                 one request failed
│   ├── ServerUnreachable       nothing answers at the address; no request was lost
│   ├── TransportError          the connection broke before a whole answer came
│   ├── BusyError               408, 425, 429, 5xx: the same request may succeed later
│   ├── MalformedAnswer         an answer that is not what the engine's API promises
│   └── RequestRefused          a 4xx that will not change                           (rejects a row)
└── StoreError                  the run directory
    ├── RunLocked               another process writes this run                      exit 2
    ├── DiskFull                no room, or a write failed                           exit 4
    └── DamagedRun              a part or the manifest cannot be read                exit 2

A message says what was wrong, the value that was seen, and what to do next.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_REJECTED = 3
EXIT_PENDING = 4
EXIT_INTERRUPTED = 130


class EyasError(Exception):
    """Base of all errors raised on purpose; ``str()`` is a sentence for the user."""

    exit_code = EXIT_USAGE


class UsageError(EyasError):
    """The command line or configuration cannot be carried out as given."""


class ConfigError(UsageError):
    """A configuration file or value is wrong."""


class InputError(UsageError):
    """A prompt file does not exist or cannot be opened at all."""


class TokenizerError(UsageError):
    """A tokenizer or chat template that cannot be loaded or must not be used."""


class FingerprintError(UsageError):
    """The output directory holds rows of another configuration."""


class UnsuitableServerError(UsageError):
    """The server is of a kind or version from which ids cannot be captured."""


class ProbeFailed(UsageError):
    """The probe before a capture found that its rows would be wrong."""


class TemplateRefusal(EyasError):
    """The chat template refuses this conversation; the message is the template's own."""


class EngineError(EyasError):
    """One request to a serving engine failed."""

    exit_code = EXIT_PENDING
    reason = "engine_error"
    """The name under which a row that failed this way stands in ``rejected/``."""


class ServerUnreachable(EngineError):
    """Nothing accepts connections at the address: the server is down or not there."""

    reason = "server_unreachable"


class TransportError(EngineError):
    """The connection broke before any answer began; whether the model ran is unknown."""

    reason = "connection_lost"


class BusyError(EngineError):
    """The server answered 408, 425, 429 or 5xx: trying again may help.

    ``retry_after`` is the pause in seconds that the server asked for, if it did.
    """

    reason = "server_error"

    def __init__(
        self, message: str, *, status: int = 503, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class MalformedAnswer(EngineError):
    """A cut or wrongly shaped answer, or an error body under status 200.

    ``seen`` is the beginning of what came, for the rejected row.
    """

    reason = "malformed_answer"

    def __init__(self, message: str, *, reason: str | None = None, seen: str = "") -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason
        self.seen = seen


class RequestRefused(EngineError):
    """The server refused this request with a 4xx that will not change.

    ``status`` is the HTTP status; 401, 403 and 404 concern every request, not this one.
    """

    reason = "request_refused"

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RowFailed(EngineError):
    """The last try of one request failed; ``tries`` says what each one met."""

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        tries: list[str],
        seen: str = "",
        server: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.tries = tries
        self.seen = seen
        self.server = server


class CaptureStopped(EngineError):
    """Nothing can be captured now (server gone, key refused, other weights)."""


class StoreError(EyasError):
    """The run directory cannot be used as it is."""


class RunLocked(StoreError):
    """Another process is writing this run."""


class DiskFull(StoreError):
    """A write to the run failed for want of room, quota or a working disk.

    ``full`` is true where room would help: then it is worth waiting for.
    """

    exit_code = EXIT_PENDING

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class DamagedRun(StoreError):
    """A manifest or part of the run cannot be read."""
