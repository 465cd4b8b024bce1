"""What must hold of a generation before it is stored as a good row; each check has a name.

Invariant: a row is refused when anything shows that its ids are not what the model sampled,
and marked when the model really did something unusual. Nothing is repaired.

Sources: what SGLang and llama.cpp promise of their answers is in `eyas.engines`; that the
stop id is part of the output and of its count holds on both.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from eyas import core
from eyas.engines.base import Generation
from eyas.ids import Ids, as_list, first_bad, first_difference, pack
from eyas.tokens import Profile, Tokenizer

REFUSALS: dict[str, str] = {
    "finish_reason": "the engine's finish reason is neither stop nor length (an abort, say)",
    "engine_refusal": "the engine says that it did not run the request as it was sent",
    "prompt_tokens": "the engine counts another number of prompt ids than were sent, or none",
    "prompt_echo": "the engine's echo of the prompt ids differs from what was sent",
    "no_output_ids": "the answer holds no ids",
    "not_ids": "something among the output ids is no integer",
    "budget": "more output ids came than were asked for",
    "completion_tokens": "the engine counts another number of output ids than it gave, or none",
    "vocabulary": "an output id is outside the vocabulary",
    "stop_unmatched": "the engine does not name the id that it stopped at",
    "stop_text": "the engine stopped at a text, not at an id",
    "stop_id": "the last output id is not the one that the engine stopped at, or no stop id",
    "stop_inside": "a stop id stands before the last output id",
    "no_logprobs": "log-probabilities were asked for, and the engine gave none",
    "logprob_ids": "the ids of the log-probabilities are not the output ids",
    "text": "the engine's text is not what the output ids decode to",
    "missing_closer": "the reasoning was opened, and the turn ended without its closer",
}
"""Checks that refuse a row, with what each one means."""

MARKS: dict[str, str] = {
    "truncated": "the token budget ended the generation",
    "eos_at_cap": "the last id of the budget is a stop id: complete, though called length",
    "unusual_stop": "the engine stopped at an id that config and generation config do not name",
    "loop": "the output ends in a repeated n-gram",
    "reasoning_truncated": "the budget ended inside the reasoning",
    "empty_answer": "nothing but space stands after the closer",
    "control_text": "the user's text holds control strings",
    "history_drift": "an earlier answer stands in the prompt with other ids than were generated",
    "second_closer": "more closers stand in the output than reasoning was opened",
    "role_header": "a user's, the system's or a tool's header stands before the last id",
    "no_closer": "the reasoning has no closer, and the row is kept as --on-missing-closer says",
    "leading_assistant": "an assistant message before the first user message was dropped",
    "doubled_bos": "the prompt begins with two bos ids",
    "tool_calls": "the answer calls tools",
    "tool_call_unread": "the answer holds a call that cannot be read: the conversation ends there",
    "tool_result_missing": "there is no result for a call of the answer: the conversation ends there",
    "no_tool_call": "the answer calls no tool where the recorded one did",
    "tool_result_nearest": "the prompt holds a result that was recorded for other arguments",
    "tools_ignored": "the chat template shows no definitions of tools",
}
"""Marks that a row can carry, with what each one means."""


GIVEN_MARKS = frozenset(
    ("control_text", "leading_assistant", "history_drift", "tool_calls", "tool_call_unread",
     "tool_result_missing",
     "no_tool_call", "tool_result_nearest", "tools_ignored")
)  # fmt: skip
"""Marks that come from a row's conversation; the others the checks of its generation give."""


@dataclass(slots=True)
class Verdict:
    """What the checks say of one generation."""

    refusal: str | None = None
    """The name of the check that refuses the row, or None."""
    detail: str = ""
    """What was seen, as a sentence."""
    marks: list[str] = field(default_factory=list)
    stop_id: int | None = None
    reasoning_start: int | None = None
    reasoning_end: int | None = None

    @property
    def complete(self) -> bool:
        """Whether the model ended the turn itself."""
        return self.refusal is None and "truncated" not in self.marks


@dataclass(frozen=True)
class Checker:
    """The checks for one target.

    An answer of a thousand ids is looked through once, at C speed, for the few ids that mean
    something (`_notable`); all that Python does afterwards concerns their positions.
    """

    tokenizer: Tokenizer
    profile: Profile
    keep_missing_closer: bool = False
    want_logprobs: bool = False
    _plain_text: list[bool] = field(default_factory=list, init=False, repr=False)
    """Not empty once a text stood without spaces where slow tokenizers put them."""

    def judge(
        self,
        prompt_ids: Sequence[int],
        generation: Generation,
        max_new_tokens: int | None = None,
        before: Sequence[int] = (),
    ) -> Verdict:
        """Check one answer against the prompt and the token budget that were sent.

        Where an answer is continued, `before` is its output so far, which was sent behind the
        prompt: counts, echo and text concern this piece, positions and marks the whole.

        The order is from the plainest fault to the finest, so that the name given is the one
        that explains most.
        """
        refusal = self._finish(generation) or self._counts(
            [*prompt_ids, *before] if before else prompt_ids, generation
        )
        if refusal is not None:
            return Verdict(*refusal)
        packed = pack(generation.output_ids)
        notable = None if packed is None else core.find(packed.data, self._notable)
        if packed is None or notable is None:
            return Verdict(*self._bad_id(as_list(generation.output_ids)))
        ids = packed.view
        if max_new_tokens is not None and len(ids) > max_new_tokens:
            refusal = "budget", f"{len(ids)} output ids came; {max_new_tokens} were asked for"
            return Verdict(*refusal)
        refusal = self._stop(generation, ids, notable) or self._second_account(generation, packed)
        if refusal is not None:
            return Verdict(*refusal)
        if before:
            packed = Ids(array("i", before).tobytes() + packed.data)
            notable = core.find(packed.data, self._notable) or []
        return self._mark(prompt_ids, generation, packed, notable)

    def _finish(self, g: Generation) -> tuple[str, str] | None:
        if g.finish_reason not in ("stop", "length"):
            return "finish_reason", f"the engine's finish reason is {g.finish_reason}"
        if g.refusal is not None:
            return "engine_refusal", g.refusal
        return None

    def _counts(self, prompt_ids: Sequence[int], g: Generation) -> tuple[str, str] | None:
        if g.prompt_tokens != len(prompt_ids):
            seen = "does not count them" if g.prompt_tokens is None else f"says {g.prompt_tokens}"
            return "prompt_tokens", f"{len(prompt_ids)} prompt ids were sent; the engine {seen}"
        if g.prompt_echo is not None and g.prompt_echo != prompt_ids:
            at = first_difference(prompt_ids, g.prompt_echo)
            return "prompt_echo", f"the engine's echo of the prompt ids differs at position {at}"
        if not g.output_ids:
            return "no_output_ids", (
                f"the engine gave no output ids (it counts {g.completion_tokens}); "
                "SGLang before 0.5.0 and vLLM without return_token_ids give none"
            )
        if g.completion_tokens != len(g.output_ids):
            return "completion_tokens", self._count_detail(prompt_ids, g)
        if g.finish_reason == "length" and g.length is not None and g.length > len(g.output_ids):
            return "completion_tokens", (
                f"{len(g.output_ids)} output ids came, and the engine says that it stopped at its "
                f"budget of {g.length}"
            )
        return None

    def _count_detail(self, prompt_ids: Sequence[int], g: Generation) -> str:
        given, counted = len(g.output_ids), g.completion_tokens
        if counted is None:
            return f"{given} output ids came, and the engine does not count them"
        extra = given - counted
        if extra > 0 and g.output_ids[:extra] == list(prompt_ids[-extra:]):
            return (
                f"{given} output ids came for {counted} generated ones: the first {extra} are "
                "the prompt's last ids, as SGLang 0.5.1 to 0.5.4.post2 sends them"
            )
        return f"{given} output ids came, and the engine counts {counted}"

    @cached_property
    def _notable(self) -> bytes:
        """Which ids of the vocabulary mean something by themselves: a byte for each id.

        The stop ids, the closer, and the first ids of role headers.
        """
        profile = self.profile
        wanted = {*profile.stop_ids, *(header[0] for header in profile.role_headers)}
        if profile.closer is not None:
            wanted.update(profile.closer.ids)
        return bytes(map(wanted.__contains__, range(profile.vocab_size)))

    def _bad_id(self, ids: list[int]) -> tuple[str, str]:
        size = self.profile.vocab_size
        at = first_bad(ids, size) or 0
        bad = ids[at]
        if type(bad) is not int:
            return "not_ids", f"output id {at} is {bad!r}"
        return "vocabulary", f"output id {at} is {bad}; the vocabulary ends at {size - 1}"

    def _stop(
        self, g: Generation, ids: Sequence[int], notable: list[int]
    ) -> tuple[str, str] | None:
        stop_ids = self.profile.stop_ids
        if g.finish_reason == "stop":
            last = ids[-1]
            if isinstance(g.matched, str):
                return "stop_text", f"the engine stopped at the text {g.matched[:80]!r}"
            if g.names_stop and (type(g.matched) is not int):
                return "stop_unmatched", f"stop with matched = {g.matched!r}; it must be an id"
            if type(g.matched) is int and g.matched != last:
                return "stop_id", (
                    f"the engine stopped at {self.tokenizer.name(g.matched)}, but the last "
                    f"output id is {self.tokenizer.name(last)}"
                )
            named = type(g.matched) is int
            if not named and last not in stop_ids and last not in self.tokenizer.control.values():
                return "stop_id", f"the last output id {self.tokenizer.name(last)} ends no turn"
        for at in notable:
            if ids[at] in stop_ids and at < len(ids) - 1:
                named_stop = self.tokenizer.name(ids[at])
                return "stop_inside", (
                    f"the stop id {named_stop} stands at output id {at} of {len(ids)}"
                )
        return None

    def _second_account(self, g: Generation, ids: Ids) -> tuple[str, str] | None:
        if self.want_logprobs and (g.logprob_ids is None or g.logprobs is None):
            return "no_logprobs", "log-probabilities were asked for, and the engine gave none"
        if g.logprob_ids is not None and ids != g.logprob_ids:
            at = first_difference(ids, g.logprob_ids)
            return "logprob_ids", f"log-probabilities and output ids differ at output id {at}"
        told = g.text is not None and (g.text or g.writes_text)
        if told and g.text is not None and not self._same_text(g, ids):
            ours = self.tokenizer.decode(ids)
            at = first_difference(ours, g.text)
            return "text", (
                f"the engine's text differs from the decoded ids at character {at}: "
                f"{g.text[max(0, at - 20) : at + 20]!r} against {ours[max(0, at - 20) : at + 20]!r}"
            )
        return None

    def _same_text(self, g: Generation, packed: Ids) -> bool:
        """Whether the engine's text is one of the ways in which engines decode these ids.

        An id that it stopped at is trimmed, or shown if it is a control string; special ids are
        shown or skipped; unfinished characters may have become any number of U+FFFD, or nothing.
        """
        text, ended = g.text or "", g.finish_reason == "stop"
        if self.tokenizer.spells(Ids(packed.data[:-4]) if ended else packed, text):
            if not self._plain_text and self._with_spaces(text) != text:
                self._plain_text.append(True)
            return True
        ids = packed.tolist()
        control = ids[-1] in self.tokenizer.control.values()
        unfinished = not ended and "\ufffd" in self.tokenizer.decode(ids[-1:])
        parts = [ids[:-1] if ended else ids]
        if control or unfinished:
            parts.append(ids if ended else ids[:-1])
        backend = self.tokenizer.backend
        ways = [
            _without_replacements(ours)
            for part in parts
            for ours in (
                self.tokenizer.decode(part),
                backend.decode(part, skip_special_tokens=True),
                backend.decode(part, skip_special_tokens=False),
            )
        ]
        text = _without_replacements(text)
        if text in ways or (not self._plain_text and text in map(self._with_spaces, ways)):
            return True
        return any(plain(text) == plain(ours) for plain in self._plain_forms() for ours in ways)

    def _with_spaces(self, text: str) -> str:
        """With spaces between text and control strings, as slow tokenizers write them.

        (Kimi's, behind a router that drops ``spaces_between_special_tokens``.) A server that has
        written a text without them puts none.
        """
        control = self.tokenizer.control_pattern
        if control is None:
            return text
        return " ".join(filter(None, re.split(f"({control.pattern})", text)))

    def _plain_forms(self) -> list[Callable[[str], str]]:
        """What decoders may do to spaces, from the strictest comparison to the loosest.

        One that is not byte-level may drop the first space, which an engine that decodes behind
        the prompt keeps (sentencepiece); where spaces are cleaned up, only what is none is left.
        """
        forms: list[Callable[[str], str]] = []
        if self.tokenizer.changes_spaces:
            forms.append(lambda text: text.removeprefix(" "))
        if self.tokenizer.cleans_up_spaces:
            forms.append(lambda text: "".join(text.split()))
        return forms

    def _mark(
        self, prompt_ids: Sequence[int], g: Generation, packed: Ids, notable: list[int]
    ) -> Verdict:
        profile, ids = self.profile, packed.view
        start, end, after, closers = profile.spans(self.tokenizer, prompt_ids, ids, among=notable)
        verdict = Verdict()
        if start != end:  # closed at once: there is none
            verdict.reasoning_start, verdict.reasoning_end = start, end
        marks = verdict.marks
        ended = g.finish_reason == "stop"
        if not ended and ids[-1] in profile.stop_ids:
            marks.append("eos_at_cap")
            ended = True
        if ended:
            verdict.stop_id = ids[-1]
            if ids[-1] not in profile.declared_stop_ids:
                marks.append("unusual_stop")
        else:
            marks.append("truncated")
        if start is not None and end is None:
            if not ended:
                marks.append("reasoning_truncated")
            elif self.keep_missing_closer:
                marks.append("no_closer")
            else:
                where = "the prompt" if start <= len(prompt_ids) else "the output"
                closer = profile.closer.text if profile.closer else ""
                return Verdict(
                    "missing_closer",
                    f"the reasoning that {where} opened ends without {closer!r}",
                    reasoning_start=start,
                )
        elif end is not None and ended:
            first, last = profile.content_span(
                self.tokenizer, ids, after - len(prompt_ids), len(ids) - 1
            )
            if self.tokenizer.is_blank(ids[first:last]):
                marks.append("empty_answer")
        if closers > (start is not None):
            marks.append("second_closer")
        if core.is_loop(packed.data[:-4] if ended else packed.data):
            marks.append("loop")
        if self._has_role_header(ids, notable):
            marks.append("role_header")
        bos = profile.bos_ids
        if bos and tuple(prompt_ids[:2]) == bos * 2:
            marks.append("doubled_bos")
        return verdict

    def _has_role_header(self, ids: Sequence[int], notable: list[int]) -> bool:
        last = len(ids) - 1
        return any(
            ids[at] == header[0]
            and at + len(header) <= last
            and tuple(ids[at : at + len(header)]) == header
            for header in self.profile.role_headers
            for at in notable
        )


def _without_replacements(text: str) -> str:
    return text.replace("\ufffd", "")
