"""A pretended model of any tokenizer and template whose every answer is known, and a second,
independent account of what it should have been asked: transformers over messages kept here."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capturing import config_for, write_prompts
from eyas import Run, capture
from eyas.ids import first_difference
from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile, load_tokenizer
from eyas.tokens.markers import prompt_state
from eyas.trace import Trace
from fault_server import FaultServer, Target

WORDS = [
    "one",
    "sees",
    "12",
    "falcons",
    "über",
    "Zürich",
    "東京",
    "`x",
    "!=",
    "10`",
    "(really?)",
    "naïve",
    "—",
    "so\n\tit",
    "is",
]


@dataclass
class Said:
    """One answer."""

    reasoning: str | None
    content: str
    ids: list[int]
    canonical: bool
    """Whether its parts' ids are those that tokenizing their texts gives."""


class Speaker(Target):
    """Answers as a model does that learned a template: with its markers, and its line feeds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        profile: Profile,
        *,
        stop: int,
        leads: tuple[str, str, str] = ("", "", ""),
        reasons: bool = True,
        odd_share: float = 0.0,
    ) -> None:
        """`leads` are what it writes before and after its reasoning and before its content;
        `odd_share` of its answers have ids that are not those of tokenizing their text."""
        self.tokenizer = tokenizer
        self.profile = profile
        self.stop = stop
        self.leads = leads
        self.reasons = reasons
        self.odd_share = odd_share
        self.said: dict[tuple[int, ...], Said] = {}

    @property
    def end(self) -> int:  # type: ignore[override]
        return self.stop

    def right_ids(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self.said:
            self.said[key] = self._say(prompt)
        return self.said[key].ids

    def _say(self, prompt: list[int]) -> Said:
        seed = hashlib.sha256(json.dumps(prompt).encode()).digest()
        chosen = random.Random(seed)
        opener, closer = self.profile.opener, self.profile.closer
        state = "none"
        if opener is not None and closer is not None:
            tail = self.tokenizer.decode(prompt[-30:])
            state = prompt_state(tail, opener.text, closer.text)
        before, after, lead = self.leads
        frame = self.profile.content_openers
        odd = chosen.random() < self.odd_share
        ids: list[int] = []
        reasoning = None
        if opener and closer and self.reasons and state != "closed":
            if state == "none":
                ids += self.tokenizer.encode(opener.text)
            reasoning = before + " ".join(chosen.choices(WORDS, k=chosen.randint(3, 30))) + after
            ids += self.tokenizer.encode(reasoning)
            ids += self.tokenizer.encode(closer.text)
            ids += frame[0].ids if frame else ()
            content = lead
        else:
            ids += frame[-1].ids if frame else ()
            content = ""
        content += " ".join(chosen.choices(WORDS, k=chosen.randint(2, 20)))
        whole = self.tokenizer.encode(content)
        letters = self._letter_by_letter(content) if odd else whole
        ids += letters
        last = self.profile.content_closer
        ids += [*(last.ids if last else ()), self.stop]
        return Said(reasoning, content, ids, letters == whole)

    def _letter_by_letter(self, text: str) -> list[int]:
        return [i for letter in text for i in self.tokenizer.encode(letter)]


class Second:
    """transformers' own tokenizer and template, for one model directory."""

    def __init__(self, directory: Path, source: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self._own = PreTrainedTokenizerFast.from_pretrained(str(directory))
        self._source = source

    def prompt(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        text = self._own.apply_chat_template(
            messages, chat_template=self._source, tokenize=False, add_generation_prompt=True,
            **kwargs,
        )  # fmt: skip
        ids: list[int] = self._own(text, add_special_tokens=False)["input_ids"]
        return ids


def model_directory(folder: Path, tokenizer: Tokenizer, source: str, stops: list[int]) -> Path:
    """A model's files: tokenizer, template and config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": tokenizer.size, "eos_token_id": stops})
    )
    return folder


@dataclass
class Stage:
    """One model's directory, with what it says and what it should be asked."""

    directory: Path
    speaker: Speaker
    second: Second

    @classmethod
    def set(
        cls,
        folder: Path,
        tokenizer: Tokenizer,
        source: str,
        *,
        stop: str,
        kwargs: dict[str, Any] | None = None,
        **speaking: Any,
    ) -> Stage:
        """`stop` is the control string that ends its answers."""
        ends = tokenizer.control[stop]
        directory = model_directory(folder, tokenizer, source, [ends])
        own = load_tokenizer(str(directory))
        profile = build_profile(own, ChatTemplate.of(own, kwargs=kwargs))
        speaker = Speaker(own, profile, stop=ends, **speaking)
        return cls(directory, speaker, Second(directory, source))

    def converse(
        self, folder: Path, *, turns: int = 20, conversations: int = 2, **config: Any
    ) -> list[list[Trace]]:
        """Capture some conversations; the traces of each, in order."""
        folder.mkdir(parents=True, exist_ok=True)
        asked = [
            [f"Question {t} of {c}: what is {t} times {c + 2}?" for t in range(turns)]
            for c in range(conversations)
        ]
        rows = [{"id": f"c{c}", "turns": questions} for c, questions in enumerate(asked)]
        prompts = write_prompts(folder / "p.jsonl", rows)
        with FaultServer(self.speaker) as server:
            values = {"tokenizer": str(self.directory), "max_new_tokens": 2000, **config}
            summary = capture(config_for(server, prompts, folder / "run", **values), probe=False)
        assert (summary.done, summary.rejected, summary.pending) == (turns * conversations, 0, 0), (
            summary
        )
        found = sorted(Run(folder / "run").traces(), key=lambda trace: (trace.key, trace.turn))
        threads = [found[at : at + turns] for at in range(0, len(found), turns)]
        assert all([t.turn for t in thread] == list(range(turns)) for thread in threads)
        return threads

    def check(self, thread: list[Trace], *, history: str, **kwargs: Any) -> int:
        """Compare every prompt of a conversation with transformers' own rendering of what was
        said; returns how many of its turns are marked as drifted."""
        messages: list[dict[str, Any]] = []
        drifted = False
        before: list[int] = []
        for trace in thread:
            number = int(trace.conversation_id[1:])
            messages.append({
                "role": "user",
                "content": f"Question {trace.turn} of {number}: what is {trace.turn} times "
                f"{number + 2}?",
            })  # fmt: skip
            right = self.second.prompt(messages, **kwargs)
            if history == "tokens":
                assert trace.prompt_ids[: len(before)] == before
            if history != "tokens" or not drifted:
                assert trace.prompt_ids == right, self.differing(trace.prompt_ids, right)
            assert ("history_drift" in trace.marks) is drifted, trace.id
            said = self.speaker.said[tuple(trace.prompt_ids)]
            assert trace.output_ids == said.ids
            before = trace.prompt_ids + trace.output_ids
            message = {"role": "assistant", "content": said.content}
            if said.reasoning is not None:
                message["reasoning_content"] = said.reasoning
            messages.append(message)
            drifted = drifted or not said.canonical
        return sum("history_drift" in trace.marks for trace in thread)

    def differing(self, sent: list[int], right: list[int]) -> str:
        at = first_difference(sent, right)
        decode = self.speaker.tokenizer.decode
        return f"{decode(sent[max(0, at - 20) : at + 20])!r}, {decode(right[max(0, at - 20) : at + 20])!r}"
