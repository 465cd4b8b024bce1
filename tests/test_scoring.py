"""Scores of a second look: what is noise, and what no noise explains."""

from __future__ import annotations

import random

import pytest

from eyas.engines import Sampling, Scores
from eyas.scoring import Noise, compare, noise_of

GREEDY, NEUTRAL = Sampling(temperature=0.0), Sampling()


def row(count: int = 200, *, noise: float = 0.0, seed: int = 0) -> tuple[list[int], list[float]]:
    chosen = random.Random(seed)
    return list(range(count)), [-chosen.expovariate(2.0) + chosen.gauss(0, noise)
                                for _ in range(count)]  # fmt: skip


def jitter(values: list[float], width: float, seed: int = 1) -> list[float]:
    chosen = random.Random(seed)
    return [value + chosen.gauss(0, width) for value in values]


def test_the_same_numbers_agree() -> None:
    ids, lps = row()
    found = compare(ids, Scores(ids, lps), generated=lps, sampling=NEUTRAL, noise=Noise())
    assert (found.refusal, found.suspects, found.largest) == (None, (), 0.0)
    assert found.compared == 200


@pytest.mark.parametrize("width", [0.001, 0.02, 0.05])
def test_an_engines_own_noise_is_no_fault(width: float) -> None:
    ids, lps = row(2000)
    scored = Scores(ids, jitter(lps, width))
    repeated = [Scores(ids, jitter(lps, width, seed)) for seed in (2, 3, 4)]
    noise = noise_of(repeated)
    assert noise.usable
    found = compare(ids, scored, generated=lps, sampling=NEUTRAL, noise=noise)
    assert found.refusal is None


def test_improbable_ids_may_differ_more() -> None:
    """In the tail of the distribution rounding is worth whole units; nothing follows from it."""
    ids, lps = row(500)
    scored = list(lps)
    for at in range(0, 500, 50):
        lps[at], scored[at] = -9.0, -14.0
    found = compare(ids, Scores(ids, scored), generated=lps, sampling=NEUTRAL, noise=Noise())
    assert found.refusal is None


def test_one_id_in_a_thousand_stands_out() -> None:
    """What follows a lost marker was likely when it was generated, and is not now."""
    ids, lps = row(1000)
    scored = jitter(lps, 0.01)
    lps[700], scored[700] = -0.2, -9.0
    found = compare(ids, Scores(ids, scored), generated=lps, sampling=NEUTRAL, noise=Noise(0.05))
    assert found.refusal is not None
    assert [s.position for s in found.suspects] == [700]
    assert found.badness == pytest.approx(8.8)


def test_a_shifted_row_is_off_everywhere() -> None:
    ids, lps = row(300)
    lps = [3 * lp for lp in lps]
    scored = [*lps[1:], lps[0]]
    found = compare(ids, Scores(ids, scored), generated=lps, sampling=NEUTRAL, noise=Noise())
    assert found.refusal is not None
    assert "half of its ids" in found.refusal


def test_several_that_are_near_count_together() -> None:
    ids, lps = row(200)
    scored = list(lps)
    for at in range(0, 200, 20):
        lps[at], scored[at] = -0.1, -3.0
    found = compare(ids, Scores(ids, scored), generated=lps, sampling=NEUTRAL, noise=Noise())
    assert found.refusal == "10 ids are off by more than 2.0"


def test_one_in_twenty_of_a_long_row() -> None:
    """Other weights: no id is far off, but many are off by more than any rounding."""
    count = 400
    ids, lps = list(range(count)), [-0.5] * count
    for share, refused in ((0.04, False), (0.08, True)):
        scored = [lp - 1.5 if at < share * count else lp for at, lp in enumerate(lps)]
        found = compare(ids, Scores(ids, scored), generated=lps, sampling=NEUTRAL, noise=Noise())
        assert (found.refusal is not None) is refused


def test_other_ids_were_scored() -> None:
    ids, lps = row(10)
    found = compare(ids, Scores([9, *ids[1:]], lps), generated=lps, sampling=NEUTRAL,
                    noise=Noise())  # fmt: skip
    assert found.refusal == "the engine scored other ids than were sent"


def tops_for(ids: list[int], lps: list[float]) -> list[list[tuple[int, float]]]:
    return [[(1000, -0.05), (own, lp)] for own, lp in zip(ids, lps, strict=True)]


@pytest.mark.parametrize(
    ("sampling", "scored", "suspect"),
    [
        (GREEDY, -0.6, False),  # a tie that rounding decided
        (GREEDY, -8.0, True),
        (Sampling(top_k=1), -8.0, True),
        (Sampling(top_k=2), -8.0, False),
        (Sampling(min_p=0.1), -12.0, True),
        (Sampling(min_p=0.1), -2.0, False),
        (Sampling(top_p=0.9), -8.0, True),
        (Sampling(top_p=1.0), -8.0, False),
        (Sampling(temperature=2.0), -8.0, False),
        (Sampling(temperature=0.3), -8.0, True),
        (NEUTRAL, -22.0, True),
        (Sampling(repetition_penalty=1.3), -22.0, False),
    ],
)
def test_without_the_first_numbers_sampling_itself_forbids_ids(
    sampling: Sampling, scored: float, suspect: bool
) -> None:
    ids, lps = [5, 6], [-0.05, scored]
    tops = [[(5, -0.05)], [(1000, -0.05), (6, scored)]]
    found = compare(ids, Scores(ids, lps, tops), generated=None, sampling=sampling, noise=Noise())
    assert bool(found.suspects) is suspect
    assert (found.refusal is not None) is suspect


def test_noise_is_the_spread_of_equal_questions() -> None:
    noise = noise_of([Scores([1, 2], [-1.0, -2.0]), Scores([1, 2], [-1.5, -2.0])])
    assert (noise.largest, noise.median) == (0.5, 0.25)
    assert noise_of([Scores([1], [-1.0])]) == Noise()
    assert not Noise(0.8).usable
