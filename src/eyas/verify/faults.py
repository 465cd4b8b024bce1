"""The faults that training data can have, and the count of what was found in some files.

Invariant: a row counts at most once for each fault, examples are bounded, and no number here
is an estimate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eyas.findings import Verdict
from eyas.verify.rows import Place, show

EXAMPLES = 5


class Fault(NamedTuple):
    """What a kind of fault means."""

    topic: str
    verdict: Verdict
    says: str
    """What is wrong with these rows, as what follows 'rows that'."""


FAULTS: dict[str, Fault] = {
    # lines
    "bad_line": Fault("lines", "failed", "cannot be read as training data"),
    # ids
    "no_ids": Fault("ids", "failed", "hold no ids"),
    "ids_not_integers": Fault("ids", "failed", "hold ids that are no whole numbers"),
    "ids_outside_vocabulary": Fault("ids", "failed", "hold ids that the model does not have"),
    "doubled_bos": Fault(
        "ids", "failed", "begin with two BOS ids (rendered text was tokenized as if it had none)"
    ),
    "bos_added": Fault("ids", "warning", "begin with a BOS that the chat template does not write"),
    "bos_missing": Fault("ids", "warning", "lack the BOS that the chat template writes"),
    "labels_differ": Fault(
        "ids", "failed", "have labels that are not the ids at the same positions"
    ),
    # mask
    "mask_missing": Fault("mask", "failed", "say nowhere which ids are supervised"),
    "mask_length": Fault("mask", "failed", "have a mask of another length than their ids"),
    "mask_values": Fault("mask", "failed", "have a mask of something else than 0 and 1"),
    "mask_all_zero": Fault("mask", "failed", "supervise nothing (their mask is all 0)"),
    "mask_all_one": Fault(
        "mask", "failed", "supervise everything, the prompt included (their mask is all 1)"
    ),
    "prompt_supervised": Fault(
        "mask", "failed", "supervise ids of the generation prompt, which the template writes"
    ),
    "prompt_repeated": Fault(
        "mask",
        "failed",
        "begin their supervised ids with the prompt's last ones once more, or with the opener "
        "that it wrote (SGLang 0.5.1 to 0.5.4.post2 put the prompt's end before the output)",
    ),
    "opener_supervised": Fault(
        "mask",
        "failed",
        "supervise the thinking opener, which the generation prompt writes and not the model",
    ),
    "answer_masked": Fault(
        "mask",
        "failed",
        "leave the beginning of the answer, such as its reasoning, out of the mask",
    ),
    "mask_gap": Fault("mask", "failed", "have a hole in the mask of an answer"),
    "prompt_end": Fault(
        "mask", "warning", "supervise ids that do not follow the template's generation prompt"
    ),
    "after_stop_supervised": Fault(
        "mask", "failed", "supervise space behind the stop id, which no model generates"
    ),
    "role_header": Fault(
        "mask", "warning", "have the header of a user, system or tool message among supervised ids"
    ),
    # stop
    "stop_missing": Fault(
        "stop", "failed", "are called complete or go on, and their answer has no stop id"
    ),
    "stop_not_supervised": Fault(
        "stop", "failed", "leave the stop id out of the mask (a draft never learns where to end)"
    ),
    "stop_absent": Fault("stop", "warning", "end in no stop id and do not say that they were cut"),
    "stop_inside": Fault("stop", "failed", "have a stop id inside a supervised span"),
    "stop_text": Fault(
        "stop",
        "failed",
        "have a stop string at the end of an answer's text, where the template adds one",
    ),
    "stop_not_rendered": Fault(
        "stop", "warning", "get no stop string behind the last answer from the template"
    ),
    "truncated": Fault("stop", "note", "were cut by their token budget, and say so"),
    "truncated_text": Fault(
        "stop",
        "failed",
        "were cut by their token budget and, rendered as training data, seem to end there",
    ),
    "cut_at_length": Fault(
        "stop",
        "warning",
        "have exactly the greatest length of all and no stop id, as rows that were cut",
    ),
    # reasoning
    "reasoning_missing": Fault(
        "reasoning", "failed", "have answers without the reasoning that the target writes"
    ),
    "reasoning_closed": Fault(
        "reasoning",
        "failed",
        "have prompts that close the reasoning before the answer (it was switched off, or lost)",
    ),
    "reasoning_empty": Fault(
        "reasoning", "failed", "have answers that close the reasoning at once"
    ),
    "opener_missing": Fault(
        "reasoning",
        "failed",
        "hold reasoning whose opener is not in the prompt, where serving has it",
    ),
    "closer_missing": Fault(
        "reasoning", "failed", "open the reasoning and end the turn without closing it"
    ),
    "reasoning_truncated": Fault(
        "reasoning", "note", "were cut inside the reasoning and hold no answer"
    ),
    "reasoning_inline": Fault(
        "reasoning", "warning", "carry the reasoning inside the content, between markers"
    ),
    "reasoning_dropped": Fault(
        "reasoning", "failed", "hold reasoning that the template drops when it renders them"
    ),
    "reasoning_misplaced": Fault(
        "reasoning",
        "failed",
        "hold reasoning that the template renders elsewhere than the model generates it",
    ),
    "history_reasoning": Fault(
        "reasoning",
        "warning",
        "hold reasoning of earlier answers that the template drops (only the last answer may be supervised)",
    ),
    # template and text
    "template_refuses": Fault("template", "failed", "are refused by the chat template"),
    "prompt_lost": Fault(
        "template",
        "failed",
        "do not begin, rendered whole, with the prompt that serving sends for the last answer",
    ),
    "no_answer": Fault("template", "failed", "hold no answer of the assistant"),
    "empty_answer": Fault("template", "failed", "have an answer without content"),
    "control_text": Fault(
        "template", "warning", "hold control strings in their text, which become control ids"
    ),
    "text_bos_doubled": Fault(
        "template",
        "warning",
        "get a second BOS where the rendered text is tokenized with the tokenizer's defaults",
    ),
    "seam": Fault(
        "template",
        "failed",
        "get other ids at the border of prompt and answer when both are tokenized as one text",
    ),
    "text_changed": Fault(
        "template", "warning", "do not get their text back from the ids that it is encoded to"
    ),
    "prompt_drift": Fault(
        "drift",
        "warning",
        "have a prompt that its text does not encode to (another tokenizer, or not from text)",
    ),
    # length
    "loop": Fault("length", "note", "end in a phrase that is repeated over and over"),
    "too_long": Fault("length", "warning", "are longer than the maximum and will be cut"),
    "supervision_cut_off": Fault(
        "length", "failed", "keep no supervised id within the maximum length"
    ),
}
"""Every fault by name, from the plainest to the finest within its topic."""

TOPICS: dict[str, str] = {
    "lines": "every line was read as training data",
    "ids": "every id is a whole number of the vocabulary, and no BOS is wrong",
    "mask": "every row has a mask of its length, of 0 and 1, which begins behind the prompt",
    "stop": "every answer ends in a supervised stop id, and none stands earlier",
    "reasoning": "every answer has its reasoning where serving has it",
    "template": "the template renders every row as serving would, and text and ids agree",
    "drift": "every prompt is what the tokenizer makes of its text",
    "length": "no row is too long",
}
"""What is proven where no fault of a topic was found."""


@dataclass(slots=True)
class Example:
    """One row that has a fault."""

    where: str
    """``file:line``."""
    id: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.where}{f' (id {show(self.id)})' if self.id else ''}: {self.detail}"


@dataclass(slots=True)
class Seen:
    """How many rows have a fault, and the first of them."""

    count: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """What the checks found so far; memory does not grow with the rows."""

    faults: dict[str, Seen] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Figures that are no faults: rows with and without reasoning, ids, supervised ids, …"""

    def add(self, fault: str, place: Place, detail: str) -> None:
        """Count a row for a fault; who calls does so once a row."""
        seen = self.faults.setdefault(fault, Seen())
        seen.count += 1
        if len(seen.examples) < EXAMPLES:
            seen.examples.append(Example(place.where, place.id, detail))

    def add_all(self, place: Place, found: dict[str, str]) -> None:
        """Count a row for all of its faults."""
        for fault, detail in found.items():
            self.add(fault, place, detail)


@dataclass(slots=True)
class FileReport:
    """What `verify_file` found."""

    files: list[str] = field(default_factory=list)
    rows: int = 0
    """Rows and lines seen, unreadable ones included."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Rows by the columns in which they hold their data."""
    ids: int = 0
    """Ids of tokenized rows."""
    supervised: int = 0
    """Those with a mask of 1."""
    faults: dict[str, Seen] = field(default_factory=dict)
    """Each fault that was found, by its name in `FAULTS`."""
    drift: dict[str, Any] = field(default_factory=dict)
    """What of the tokenized rows survives text and back; see `Drift.as_dict`."""
    counts: dict[str, int] = field(default_factory=dict)
    regenerate_command: str | None = None
    """The command that makes the data anew, where any of it is damaged."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "files": self.files,
            "rows": self.rows,
            "kinds": self.kinds,
            "ids": self.ids,
            "supervised": self.supervised,
            "faults": {
                name: {
                    "count": seen.count,
                    "examples": [
                        {"where": e.where, "id": e.id, "detail": e.detail} for e in seen.examples
                    ],
                }
                for name, seen in self.faults.items()
            },
            "drift": self.drift,
            "counts": self.counts,
            "regenerate_command": self.regenerate_command,
        }
