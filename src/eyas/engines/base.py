"""What every engine takes and gives: ids in, ids out.

Invariant: nothing in this package knows text beyond passing an engine's own `text` on; an
engine reports what the server said, and judges nothing (that is `checks`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, all of them sent with every request.

    The defaults are neutral. ``top_k`` -1 means all; ``temperature`` 0 means greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def penalised(self) -> bool:
        """Whether what was generated before changes what comes next, besides as context."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the fingerprint and the row's ``sampling`` column."""
        return {**asdict(self), "stop_token_ids": list(self.stop_token_ids)}


@dataclass(slots=True)
class Request:
    """One generation to ask for. ``prompt_ids`` were checked against the vocabulary."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    logprobs: bool = False
    packed: bool = False
    """Whether ids may come back as `eyas.ids.Ids`, where the engine can give them so."""


@dataclass(slots=True)
class Generation:
    """What the engine answered, in its own words but under common names.

    A field is None where the engine (or its version) does not give it, never a guess.
    """

    output_ids: Sequence[int]
    """The ids, stop token included. Not yet checked: may hold anything JSON can."""
    finish_reason: str | None
    """``stop``, ``length``, or whatever else the engine said (``abort``, ``word``)."""
    matched: Any = None
    """On ``stop``: the id that the engine says it matched, if it says so."""
    names_stop: bool = True
    """Whether this engine names the matched id; where it does, it must (SGLang)."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    length: int | None = None
    """On ``length``: how many ids the engine says it made, besides its count (SGLang)."""
    prompt_echo: Sequence[int] | None = None
    """The prompt ids that the engine says it ran."""
    text: str | None = None
    """The engine's own decoding of the output, without the stop token."""
    writes_text: bool = True
    """Whether an empty `text` says that the ids decode to nothing. False where the engine may
    have no tokenizer and writes none (vLLM)."""
    logprob_ids: list[int] | None = None
    logprobs: list[float] | None = None
    """Natural logarithms, one an output id."""
    weight_version: str | None = None
    cached_tokens: int | None = None
    renamed: bool = False
    """The answer calls the request by another id than it was sent under: something between."""
    server: str = ""
    """The address that answered."""
    refusal: str | None = None
    """A fact that by itself forbids the row, for example a prompt that the engine cut."""


@dataclass(slots=True)
class ServerInfo:
    """Who answers at an address, as far as it tells. Secrets are stripped."""

    engine: str
    url: str
    version: str | None = None
    model: str | None = None
    weight_version: str | None = None
    context_length: int | None = None
    slots: int | None = None
    """How many requests the server runs at once, where it says so."""
    details: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    doubt: str | None = None
    """Why it may be of another kind than the engine that was named."""


@dataclass(slots=True)
class Scores:
    """Log-probabilities of ids that were given, from one prefill."""

    ids: list[int]
    """The ids that the engine says it scored."""
    logprobs: list[float]
    """Natural logarithms at temperature 1, one an id."""
    tops: list[list[tuple[int, float]]] | None = None
    """The most likely (id, log-probability) at each position, the likeliest first."""


@dataclass(slots=True)
class ChatAnswer:
    """What the chat API said: text, as most scripts would store it."""

    content: str
    reasoning: str | None
    """``reasoning_content`` or ``reasoning``, where a parser on the server parts them."""
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """What a server holds now, by its own count."""

    running: int
    waiting: int


class Engine(Protocol):
    """A serving engine at one address."""

    name: str
    url: str
    sampling: Sampling
    scaled_logprobs: bool
    """Whether the log-probabilities of generated ids are those after the temperature."""

    async def identify(self) -> ServerInfo:
        """Ask the server who it is.

        Raises:
            UnsuitableServerError: a version that is known to give wrong ids, or none.
            ServerUnreachable: nothing answers.
        """
        ...

    async def generate(self, request: Request) -> Generation:
        """Generate once.

        Raises:
            EngineError: one of its kinds; nothing was stored and nothing is retried here.
        """
        ...

    async def score(self, ids: Sequence[int], *, start: int, top: int = 0) -> Scores | None:
        """Log-probabilities of ``ids[start:]``, each given all ids before it, in one prefill.

        Args:
            ids: checked against the vocabulary, with some room left in the context (SGLang
                0.5.23 refuses prompts beyond the context less 7, vLLM beyond the context less 1).
            start: at least 1, since the first id has no probability.
            top: how many of the most likely ids to give at each position.

        Returns:
            None where this engine (or version) cannot score a prompt.

        Raises:
            EngineError: one of its kinds.
        """
        ...

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's ids of a text, nothing added; None where it has no such page."""
        ...

    async def render(
        self, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any]
    ) -> list[int] | str | None:
        """The server's own rendering of messages with the generation prompt, as far as it has
        one: ids, or text (llama.cpp), or None."""
        ...

    async def chat(
        self, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any], *, max_tokens: int
    ) -> ChatAnswer | None:
        """The same messages through ``/v1/chat/completions`` at temperature 0; None without."""
        ...

    async def load(self) -> Load | None:
        """What the server says that it holds; None where it does not tell."""
        ...

    async def healthy(self, timeout_s: float) -> bool | None:
        """Whether the server says that it works; None where it has no page for that."""
        ...

    async def reachable(self) -> bool:
        """Whether something accepts connections there now."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


def resampled(engine: Engine, sampling: Sampling) -> Engine:
    """The same server over the same connections, asked with other sampling parameters."""
    twin = copy.copy(engine)
    twin.sampling = sampling
    return twin
