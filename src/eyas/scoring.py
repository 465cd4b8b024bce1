"""Whether ids are what the model sampled, from log-probabilities of a second look at them.

Invariant: nothing is called wrong on an average alone. A row is suspect when single ids are out
of all proportion to the engine's own noise, or when half of its ids are beyond that noise.

Why this works: decoding and prefill compute the same numbers by other kernels. On one engine
the two differ by hundredths (measured in bfloat16 with a chat model of 135M parameters on SGLang
0.5.23 and vLLM 0.32: median 0.03, largest 0.31; log-probabilities are natural logarithms), and
scoring the same ids again may differ by nothing at all, so the noise measured has a floor. An id that was lost, added or exchanged leaves the
ids behind it in a context in which the model would hardly have chosen them: whole units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from eyas.engines.base import Engine, Sampling, Scores
from eyas.tokens import Tokenizer

REPEATS = 3
"""How often the same ids are scored to measure the noise."""
TOP = 20
"""Likeliest ids to ask for at each position: enough to rebuild a usual nucleus."""

_FAR = 4.0
"""A single id that differs by so much (55 times as likely) is no rounding."""
_NEAR = 2.0
"""Several that differ by so much are none either."""
_NEAR_SHARE = 0.01
_SOME, _SOME_SHARE = 1.0, 0.05
"""And one in twenty of a long row that differs by this: other weights, or a lost stretch."""
_SHIFTED = 0.5
"""Half of the ids beyond this: the whole row was scored in another context. (Far above what
decode and prefill kernels differ by in eight bits.)"""
_ROW = 20
"""A median over fewer ids says nothing."""
_NOISE_FACTOR = 10.0
_UNUSABLE_NOISE = 0.5
"""An engine whose scores differ by more when asked again proves nothing."""
_CHANGED = 0.05
"""An exchanged id changes some score behind it by at least this."""
_HARDLY = 0.01
"""An id that was generated with less is not judged by how unlikely it is now."""
_IMPOSSIBLE = 20.0
"""So far below the likeliest id (2e-9 of it) that even 160,000 such ids are hardly ever met."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How much an engine's scores of the same ids differ from one time to the next."""

    largest: float = 0.0
    median: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether scores of this engine can prove anything."""
        return self.largest <= _UNUSABLE_NOISE


@dataclass(frozen=True, slots=True)
class Suspect:
    """An id that the model would hardly have chosen where it stands."""

    position: int
    """In the scored ids, 0-based."""
    id: int
    generated: float | None
    """Its log-probability when it was generated, where the engine gave it."""
    scored: float
    """Its log-probability now."""
    likeliest: tuple[int, float] | None
    """The likeliest id at that place, with its log-probability."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How one row's ids fit what the engine says of them the second time."""

    ids: int
    compared: int
    """How many have a log-probability of their generation to compare with."""
    median: float | None
    """Of the absolute differences between generation and scoring."""
    largest: float | None
    suspects: tuple[Suspect, ...]
    refusal: str | None
    """Why the row is not what the model sampled, or None."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return {
            "ids": self.ids,
            "compared": self.compared,
            "median": self.median,
            "largest": self.largest,
            "suspects": [
                {
                    "position": s.position,
                    "id": s.id,
                    "generated": s.generated,
                    "scored": s.scored,
                    "likeliest": None if s.likeliest is None else list(s.likeliest),
                }
                for s in self.suspects
            ],
            "refusal": self.refusal,
        }

    def describe(self, tokenizer: Tokenizer, output_ids: Sequence[int]) -> str:
        """The worst id with its neighbours, as a clause; empty where no single id is suspect."""
        if not self.suspects:
            return ""
        worst, name = self.suspects[0], tokenizer.name
        before = tokenizer.decode(output_ids[max(0, worst.position - 6) : worst.position])
        was = "" if worst.generated is None else f" from {worst.generated:.2f} when generated"
        best = worst.likeliest
        instead = "" if best is None else f"; the model would write {name(best[0])} ({best[1]:.2f})"
        return (
            f". Output id {worst.position}, {name(worst.id)} after {before!r}, has log-probability "
            f"{worst.scored:.2f}{was}{instead}"
        )

    @property
    def badness(self) -> float:
        """To sort rows by: how far the worst id is off."""
        worst = max((_distance(s) for s in self.suspects), default=0.0)
        return max(worst, self.median or 0.0)


def noise_of(repeated: Sequence[Scores]) -> Noise:
    """The noise of several scorings of the same ids."""
    spreads = [
        max(values) - min(values)
        for values in zip(*(scores.logprobs for scores in repeated), strict=True)
    ]
    return Noise(max(spreads), median(spreads)) if len(repeated) > 1 and spreads else Noise()


async def measure_noise(
    engine: Engine, input_ids: Sequence[int], start: int
) -> tuple[Noise, Scores] | None:
    """Score ``input_ids[start:]`` several times; None where the engine cannot score them.

    Raises:
        EngineError: one of its kinds.
    """
    repeated: list[Scores] = []
    for _ in range(REPEATS):
        scores = await engine.score(input_ids, start=start, top=TOP)
        if scores is None or len(scores.logprobs) != len(input_ids) - start:
            return None
        repeated.append(scores)
    return noise_of(repeated), repeated[0]


def comparable(engine: Engine, sampling: Sampling) -> bool:
    """Whether log-probabilities of generated ids are those of temperature 1 without penalties."""
    if not engine.scaled_logprobs:
        return True
    return sampling.temperature in (0.0, 1.0) and not sampling.penalised


async def depends_on_ids(
    engine: Engine, input_ids: Sequence[int], start: int, before: Scores
) -> bool | None:
    """Whether the engine's scores change when an id does: what does not is no scoring.

    `before` are the scores of the ids as they are. None where it could not be tried.

    Raises:
        EngineError: one of its kinds.
    """
    count = len(input_ids) - start
    if count < 2:
        return None
    at = start + count // 2
    other = next(i for i in input_ids if i != input_ids[at]) if len(set(input_ids)) > 1 else None
    if other is None:
        return None
    changed = [*input_ids[:at], other, *input_ids[at + 1 :]]
    after = await engine.score(changed, start=start)
    if after is None or len(after.logprobs) != len(before.logprobs):
        return None
    first = at - start
    return any(
        abs(a - b) > _CHANGED
        for a, b in zip(before.logprobs[first:], after.logprobs[first:], strict=True)
    )


def compare(
    ids: Sequence[int],
    scores: Scores,
    *,
    generated: Sequence[float] | None,
    sampling: Sampling,
    noise: Noise,
) -> Agreement:
    """Judge one row's output ids.

    Args:
        ids: the output ids.
        scores: what the engine says of just these ids after the same prompt.
        generated: their log-probabilities when they were generated, at temperature 1 or before
            the temperature; None where they were not kept or are scaled.
        sampling: what they were sampled with.
        noise: of this engine.
    """
    if scores.ids != list(ids):
        return Agreement(len(ids), 0, None, None, (), "the engine scored other ids than were sent")
    far = max(_FAR, _NOISE_FACTOR * noise.largest)
    near = max(_NEAR, _NOISE_FACTOR * noise.largest)
    suspects: list[Suspect] = []
    differences: list[float] = []
    several = some = 0
    for at, (own, scored) in enumerate(zip(ids, scores.logprobs, strict=True)):
        likely = scores.tops[at] if scores.tops else []
        then = None if generated is None else generated[at]
        fell = 0.0
        if then is not None:
            differences.append(abs(then - scored))
            # What was unlikely from the start is judged by the second rule alone.
            fell = then - scored if math.exp(min(0.0, max(then, scored))) >= _HARDLY else 0.0
            several += abs(fell) > near
            some += abs(fell) > max(_SOME, near / 2)
        alone = then is None or sampling.temperature == 0
        if abs(fell) > far or (alone and _unreachable(scored, likely, sampling, far, noise)):
            suspects.append(Suspect(at, own, then, scored, likely[0] if likely else None))
    middle = median(differences) if differences else None
    refusal = None
    if (
        middle is not None
        and len(ids) >= _ROW
        and middle > max(_SHIFTED, _NOISE_FACTOR * noise.median)
    ):
        refusal = f"half of its ids are off by more than {middle:.2f}: another context was scored"
    elif suspects:
        count = len(suspects)
        refusal = f"{count} id{'s' if count > 1 else ''} that the model would hardly have chosen"
    elif several > max(1, _NEAR_SHARE * len(ids)):
        refusal = f"{several} ids are off by more than {near:.1f}"
    elif len(ids) >= _ROW and some > _SOME_SHARE * len(ids):
        refusal = f"{some} of {len(ids)} ids are off by more than {max(_SOME, near / 2):.1f}"
    return Agreement(
        ids=len(ids),
        compared=len(differences),
        median=middle,
        largest=max(differences, default=None),
        suspects=tuple(sorted(suspects, key=_distance, reverse=True)),
        refusal=refusal,
    )


def _unreachable(
    scored: float,
    likely: Sequence[tuple[int, float]],
    sampling: Sampling,
    far: float,
    noise: Noise,
) -> bool:
    """Whether sampling so could not have chosen an id that is this much below the likeliest.

    Only what the sampling parameters forbid counts, with a wide margin; penalties change the
    numbers, so with them only the widest rule is left.
    """
    if not likely:
        return False
    best = likely[0][1]
    if sampling.penalised:
        return best - scored > 1.5 * _IMPOSSIBLE
    if sampling.temperature == 0:
        return best - scored > far
    gap = (best - scored) / sampling.temperature
    if gap > _IMPOSSIBLE:
        return True
    if sampling.min_p > 0 and gap > far - math.log(sampling.min_p):
        return True
    above = [lp for _, lp in likely if lp - scored > far]
    if 0 < sampling.top_k <= len(above):
        return True
    if sampling.top_p < 1 and above:
        # The ids above alone fill the nucleus (the tail beyond `likely` weighs next to nothing).
        scaled = [math.exp((lp - best) / sampling.temperature) for _, lp in likely]
        rest = max(0.0, 1.0 - sum(math.exp(lp) for _, lp in likely))
        whole = sum(scaled) + rest / math.exp(best)
        mass = sum(math.exp((lp - best) / sampling.temperature) for lp in above) / whole
        # A probability moves by a quarter of what its logit does, at most.
        return mass > sampling.top_p + 0.2 * (1 - sampling.top_p) + 0.25 * noise.largest
    return False


def _distance(suspect: Suspect) -> float:
    off = 0.0 if suspect.generated is None else abs(suspect.generated - suspect.scored)
    below = 0.0 if suspect.likeliest is None else suspect.likeliest[1] - suspect.scored
    return max(off, below)
