"""Where each trainer's own shift puts the loss, on a prompt of four ids and an answer of three.

Reported of SpecForge as #885: it shifts ids and targets, and not the mask.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from writing import trace_of

ROW = trace_of(0, [10, 11, 12, 13], [20, 21, 22])


def steps(ask: Callable[..., Any], trainer: str) -> list[list[int]]:
    """Of each step with loss: the id that it reads, the place of the states that it reads, and the
    place of the target's state that it aims at."""
    ids, mask = json.dumps(ROW.input_ids), json.dumps(ROW.loss_mask)
    found: list[list[int]] = ask(trainer, f"shift_{trainer}", ids, mask).value
    return found


def test_speculators_takes_the_mask_where_the_id_is_read(ask: Callable[..., Any]) -> None:
    assert steps(ask, "speculators") == [[20, 3, 4], [21, 4, 5], [22, 5, 6]]


def test_specforge_takes_the_mask_a_place_before(ask: Callable[..., Any]) -> None:
    assert steps(ask, "specforge") == [[21, 4, 5], [22, 5, 6]]
