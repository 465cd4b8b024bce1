"""The checks of rows that hold messages or texts: what a trainer's own rendering makes of them.

Invariant: a row is rendered whole, as trainers render it, and up to its last answer, as serving
does; what is said of it is the difference between the two, seen in text and ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.conversation import Message
from eyas.errors import TemplateRefusal
from eyas.ids import first_difference
from eyas.prompting import declarations
from eyas.verify.faults import Tally
from eyas.verify.reference import Reference
from eyas.verify.rows import TextRow, show

_NEAR = 96
"""Characters before and behind a border that are enough to see whether a token crosses it."""


@dataclass(slots=True)
class _Rendered:
    """One row as texts."""

    row: TextRow
    found: dict[str, str]
    whole: str
    prompt: str | None
    """What serving would send for the last answer; None where it is not known."""
    answer: str
    """What follows the prompt in the whole."""


@dataclass
class TextChecks:
    """The checks of text rows for one target; `check` takes them in batches."""

    reference: Reference
    tally: Tally
    max_length: int | None = None

    def check(self, rows: Sequence[TextRow]) -> None:
        """Check a batch."""
        rendered: list[_Rendered] = []
        faults: list[tuple[TextRow, dict[str, str]]] = []
        for row in rows:
            found: dict[str, str] = {}
            faults.append((row, found))
            self._check_messages(row, found)
            text = self._render(row, found)
            if text is not None:
                rendered.append(text)
        self._check_ids(rendered)
        for row, found in faults:
            self.tally.add_all(row.place, found)

    def _check_messages(self, row: TextRow, found: dict[str, str]) -> None:
        """What can be seen before anything is rendered."""
        if row.finish == "length":
            found["truncated_text"] = "its finish reason says that the token budget ended it"
        if row.rendered is not None:
            return
        answers = [m for m in row.messages if m["role"] == "assistant"]
        if not answers:
            roles = ", ".join(sorted({show(m["role"], 20) for m in row.messages}))
            found["no_answer"] = f"the roles are {roles}"
        pattern = self.reference.control_text
        for number, message in enumerate(row.messages, 1):
            content = message["content"] or ""
            if message["role"] == "assistant":
                if not content.strip() and not message.get("tool_calls"):
                    found.setdefault("empty_answer", f"message {number} has no content")
                stop = self._stop_at_end(content)
                if stop is not None:
                    found.setdefault("stop_text", f"message {number} ends in {show(stop)}")
                    content = content.rstrip()[: -len(stop)]
            match = pattern.search(content) if pattern is not None else None
            if match is not None:
                found.setdefault(
                    "control_text", f"message {number} ({message['role']}) holds {match[0]!r}"
                )
        self._check_reasoning(answers, found)

    def _stop_at_end(self, content: str) -> str | None:
        end = content.rstrip()
        return next((text for text in self.reference.stop_texts if end.endswith(text)), None)

    def _check_reasoning(self, answers: list[Message], found: dict[str, str]) -> None:
        if not self.reference.marker_texts or not answers:
            return
        has = [self._has_reasoning(m) for m in answers]
        if has[-1]:
            self.tally.counts["with_reasoning"] += 1
        else:
            self.tally.counts["without_reasoning"] += 1
            if self.reference.reasons:
                found["reasoning_missing"] = (
                    "the last answer has neither reasoning_content nor thinking markers"
                )

    def _has_reasoning(self, message: Message) -> bool:
        if message.get("reasoning_content"):
            return True
        content = message["content"] or ""
        return any(text in content for text in self.reference.marker_texts)

    def _render(self, row: TextRow, found: dict[str, str]) -> _Rendered | None:
        if row.rendered is not None:
            return self._rendered_text(row, row.rendered[1], found)
        if row.kind.count("+") and len(row.messages) == 2 and self._is_rendered(row.messages[0]):
            return self._rendered_pair(row, found)
        template = self.reference.template
        if template is None or not row.messages:
            return None
        try:
            more: dict[str, Any] = {"tools": row.tools} if row.tools else {}
            more |= declarations(self.reference.tokenizer, template, row.tools)
            whole = template.render(row.messages, add_generation_prompt=False, **more)
        except TemplateRefusal as refusal:
            found["template_refuses"] = str(refusal)[:300]
            return None
        last = max((n for n, m in enumerate(row.messages) if m["role"] == "assistant"), default=-1)
        if last < 1:
            return _Rendered(row, found, whole, None, "")
        try:
            prompt = template.render(row.messages[:last], **more)
        except TemplateRefusal as refusal:
            found["template_refuses"] = f"up to the last answer: {str(refusal)[:300]}"
            return None
        self._compare(row, last, whole, prompt, found)
        answer = whole[len(prompt) :] if whole.startswith(prompt) else ""
        return _Rendered(row, found, whole, prompt, answer)

    def _is_rendered(self, message: Message) -> bool:
        """Whether a prompt's text was rendered already: it holds the template's own headers."""
        pattern = self.reference.control_text
        text = (message["content"] or "").lstrip()
        return message["role"] == "user" and pattern is not None and bool(pattern.match(text))

    def _rendered_text(self, row: TextRow, text: str, found: dict[str, str]) -> _Rendered:
        if self.reference.reasons and self.reference.marker_texts[-1] not in text:
            found["reasoning_missing"] = "the text holds no thinking markers"
        return _Rendered(row, found, text, None, "")

    def _rendered_pair(self, row: TextRow, found: dict[str, str]) -> _Rendered:
        """A prompt that was rendered already, and the answer as the engine's text."""
        prompt, answer = (message["content"] or "" for message in row.messages)
        found.pop("control_text", None)
        # Here the stop string belongs into the text, for no template adds one.
        if found.pop("stop_text", None) is None and row.finish != "length":
            found["stop_absent"] = f"the answer ends {show(answer[-20:])}"
        return _Rendered(row, found, prompt + answer, prompt, answer)

    def _compare(
        self, row: TextRow, last: int, whole: str, prompt: str, found: dict[str, str]
    ) -> None:
        """The whole rendering against the last prompt and the answer as it was generated."""
        message = row.messages[last]
        content = message["content"] or ""
        reasoning = message.get("reasoning_content") or ""
        inline = not reasoning and any(text in content for text in self.reference.marker_texts)
        if inline:
            reasoning, content = self._take_apart(content)
            found["reasoning_inline"] = self._fate(message["content"], reasoning, whole)
            self.tally.counts[f"inline_{found['reasoning_inline'].split(':')[0]}"] += 1
        if reasoning.strip() and self.reference.marker_texts:
            self._check_place(whole, prompt, reasoning, content, found)
        if not whole.startswith(prompt) and "reasoning_dropped" not in found:
            at = first_difference(whole.encode(), prompt.encode())
            text = prompt.encode()[at:].decode("utf-8", "replace")
            found["prompt_lost"] = f"from byte {at} on the prompt's {show(text)} is not there"
        if last == len(row.messages) - 1 and self.reference.stop_texts:
            end = whole[-64:]
            if not any(text in end for text in self.reference.stop_texts):
                found["stop_not_rendered"] = f"the text ends {show(end[-24:])}"
        for number, earlier in enumerate(row.messages[:last], 1):
            said = earlier.get("reasoning_content") if earlier["role"] == "assistant" else None
            if said and said.strip() and said.strip() not in whole:
                found.setdefault("history_reasoning", f"message {number} is rendered without it")

    def _check_place(
        self, whole: str, prompt: str, reasoning: str, content: str, found: dict[str, str]
    ) -> None:
        opener, closer = self.reference.marker_texts
        starts = whole.startswith(prompt)
        rest = whole[len(prompt) :] if starts else ""
        made = f"{reasoning}{closer}{content}"
        if self.reference.profile.reasoning != "open":
            made = opener + made
        squeezed = _squeezed(rest)
        if starts and squeezed.startswith(_squeezed(made)):
            return
        closed = squeezed.startswith((_squeezed(closer + content), _squeezed(content)))
        shown = show(rest) if starts else f"at the end {show(whole[-60:])}"
        if (starts and closed) or reasoning.strip() not in (rest or whole):
            found["reasoning_dropped"] = f"after the prompt stands {shown}"
        else:
            found["reasoning_misplaced"] = f"after the prompt stands {shown}"

    def _take_apart(self, content: str) -> tuple[str, str]:
        """Inline reasoning and what follows it."""
        opener, closer = self.reference.marker_texts
        before, found, after = content.partition(closer)
        if not found:
            before, after = content, ""
        return before.rpartition(opener)[2], after

    def _fate(self, content: str, reasoning: str, whole: str) -> str:
        """What the template does with inline reasoning."""
        if content.strip() in whole:
            return "kept: the template leaves the content as it stands"
        if reasoning.strip() and reasoning.strip() in whole:
            return "parsed: the template takes the reasoning out and renders it itself"
        return "stripped: the template leaves the reasoning out"

    def _check_ids(self, rendered: list[_Rendered]) -> None:
        """Encode the texts, and look at BOS, length, border and way back."""
        reference, tokenizer = self.reference, self.reference.tokenizer
        encoded = tokenizer.encode_batch([text.whole for text in rendered])
        for text, ids in zip(rendered, encoded, strict=True):
            self.tally.counts["text_ids"] += len(ids)
            if reference.bos is not None and ids[:1] == [reference.bos]:
                if ids[:2] == [reference.bos, reference.bos]:
                    text.found["doubled_bos"] = f"the text begins {show(text.whole)}"
                elif reference.defaults_add_bos:
                    text.found["text_bos_doubled"] = f"the text begins {show(text.whole)}"
            if tokenizer.decode(ids) != text.whole:
                text.found["text_changed"] = f"the text begins {show(text.whole)}"
            if self.max_length is not None and len(ids) > self.max_length:
                text.found["too_long"] = f"{len(ids)} ids; the maximum is {self.max_length}"
                if text.prompt is not None:
                    before = len(tokenizer.encode(text.prompt))
                    if before >= self.max_length:
                        text.found["supervision_cut_off"] = f"the prompt alone has {before} ids"
        self._check_seams([text for text in rendered if text.prompt and text.answer])

    def _check_seams(self, rendered: list[_Rendered]) -> None:
        """Where prompt and answer, tokenized as one text, share an id or part otherwise.

        Nothing merges across a control string, so only what stands between the last one of the
        prompt and some characters of the answer is encoded.
        """
        texts: list[str] = []
        kept: list[_Rendered] = []
        for text in rendered:
            assert text.prompt is not None
            before = self._behind_control(text.prompt)
            if before:
                texts += [before, text.answer[:_NEAR], before + text.answer[:_NEAR]]
                kept.append(text)
        encoded = self.reference.tokenizer.encode_batch(texts)
        for number, text in enumerate(kept):
            before_ids, answer_ids, joint = encoded[3 * number : 3 * number + 3]
            if joint != before_ids + answer_ids:
                at = first_difference(joint, before_ids + answer_ids)
                name = self.reference.around
                text.found["seam"] = (
                    f"{name(before_ids + answer_ids, at)} apart, {name(joint, at)} together"
                )

    def _behind_control(self, prompt: str) -> str:
        """The end of a prompt that may merge with what follows; empty behind a control string."""
        end = prompt[-_NEAR:]
        pattern = self.reference.tokenizer.control_pattern
        if pattern is None:
            return end
        last = 0
        for match in pattern.finditer(end):
            last = match.end()
        return end[last:]


def _squeezed(text: str) -> str:
    """The text without space: templates trim and pad what they render."""
    return "".join(text.split())
