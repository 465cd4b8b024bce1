"""How a capture stands, and how it ended. Plain values: what shows them is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PENDING, EXIT_REJECTED


@dataclass(slots=True)
class ServerProgress:
    """One server as it stands."""

    url: str
    up: bool = True
    slots: int = 0
    """Requests that it is to hold at once."""
    in_flight: int = 0
    queued: int | None = None
    """Requests that wait in the server, where it tells."""
    answered: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Use:
    """How full the servers' places were, 0 to 1; None where they offered none."""

    share: float | None = None
    """Of the whole time."""
    share_with_rows_left: float | None = None
    """As long as there were rows that were not begun: what is missing here was missed."""
    below_half_s: float = 0.0
    """How long at the end fewer than half of the places were in use."""


@dataclass(slots=True)
class Progress:
    """A capture as it stands. Figures are of durable rows and finished answers."""

    done: int = 0
    rejected: int = 0
    truncated: int = 0
    input: int = 0
    """Units of the input met so far; all of them once `input_known`."""
    input_known: bool = False
    input_fraction: float | None = None
    """How much of the input files was read, 0 to 1; None for standard input."""
    output_left: float | None = None
    """Output tokens that are still to come, where an earlier run tells how long answers are."""
    new: int = 0
    """Rows decided by this capture."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that a server had in its cache; None where none tells."""
    in_flight: int = 0
    servers: list[ServerProgress] = field(default_factory=list)
    use: Use = Use()
    finish_reasons: dict[str, int] = field(default_factory=dict)
    """Answers by ``stop`` and ``length``, and refused rows by their reason."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """The last problems, newest last."""

    @property
    def total(self) -> int | None:
        """Units of the whole input: counted, or estimated from how much was read."""
        if self.input_known or not self.input:
            return self.input or None
        if not self.input_fraction:
            return None
        return round(self.input / self.input_fraction)


@dataclass(slots=True)
class Summary:
    """How a capture ended."""

    run: str
    input: int
    """Units of the input; a lower bound where `input_known` is false."""
    done: int
    rejected: int
    pending: int
    extra: int
    """Rows in the run that the input no longer holds."""
    truncated: int
    new: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    input_known: bool = True
    interrupted: bool = False
    stopped: str | None = None
    """Why the capture ended early, as a sentence."""
    cached_tokens: int | None = None
    """Prompt tokens that a server had in its cache; None where none tells."""
    use: Use = Use()
    reasons: dict[str, int] = field(default_factory=dict)
    """Rows refused by this capture, by reason."""
    shapes: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    """Good rows of this capture by their template switches (JSON), the most first."""

    @property
    def exit_code(self) -> int:
        """As documented in docs/cli.md."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        if self.pending or not self.input_known or self.stopped:
            return EXIT_PENDING
        return EXIT_REJECTED if self.rejected else EXIT_OK
