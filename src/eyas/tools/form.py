"""How one target's template writes calls and results, and what reads its calls.

Invariant: a reader is used only if it read back every call that the template wrote for it, names
and arguments, several in one answer included where the template can write them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eyas.conversation import Message, plain_arguments
from eyas.errors import TemplateRefusal
from eyas.tokens import ChatTemplate, Profile, Tokenizer
from eyas.tools.calls import Reading
from eyas.tools.formats import VERSION, LearntForm, learn
from eyas.tools.packaged import EXTRA, PackagedReader, package_version, packaged_readers
from eyas.tools.samples import ANSWER, PLAIN, PLAIN_TWO, QUESTION, RESULT, TOOLS, Sample, Samples


@dataclass(frozen=True, slots=True)
class ToolForm:
    """What was found of a template's calls, with one tokenizer."""

    reader: PackagedReader | LearntForm | None
    """What reads the target's calls; None where nothing reads back what the template writes."""
    reader_name: str | None
    """Its name and version, for the fingerprint."""
    as_text: bool
    """Arguments are given to the template as JSON text, not as an object."""
    shows_tools: bool
    """The template shows the definitions of tools."""
    shows_results: bool
    parallel: bool
    """It can write several calls in one answer."""
    learnt: LearntForm | None
    """The form of its calls, where that is a simple one."""
    call_end: int | None
    """The control id that ends an answer with calls."""
    answer_end: int | None
    """The one that ends an answer without."""
    problem: str | None = None
    """Why calls cannot be answered, as a sentence; None where they can."""

    def read(
        self,
        tokenizer: Tokenizer,
        profile: Profile,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        tools: list[dict[str, Any]] | None,
    ) -> Reading:
        """The calls in an answer that the target ended itself."""
        if isinstance(self.reader, PackagedReader):
            found = self.reader.read(prompt_ids, output_ids, tools)
        elif self.reader is not None:
            found = self.reader.read(tokenizer, profile, prompt_ids, output_ids)
        else:
            found = Reading()
        if found.calls and self.problem is not None:
            return Reading(fault=self.problem)
        if found.calls or found.fault:
            return found
        return Reading(fault=self._overlooked(tokenizer, profile, prompt_ids, output_ids))

    def _overlooked(
        self,
        tokenizer: Tokenizer,
        profile: Profile,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> str | None:
        """What shows that an answer without a call that could be read holds one."""
        why = f" ({self.problem})" if self.problem else ""
        opening = None if self.learnt is None else self.learnt.opening_id
        after = profile.spans(tokenizer, prompt_ids, output_ids)[2] - len(prompt_ids)
        if opening is not None and opening in output_ids[after:]:
            return f"{tokenizer.name(opening)} begins no call that can be read{why}"
        last = output_ids[-1] if output_ids else None
        if last is not None and last == self.call_end != self.answer_end:
            return (
                f"{tokenizer.name(last)} ends the answer as it ends calls, and none was read{why}"
            )
        if self.reader is None and (found := _CALL.search(tokenizer.decode(output_ids[after:]))):
            return f"{found.group().strip()!r} looks like the beginning of a call{why}"
        return None


_CALL = re.compile(
    r"<[|｜]?(?:[\w-]+:)?(?:tool|function)[_▁]?calls?(?![a-z])|\[TOOL_CALLS\]|<\|python_tag\|>|<function=\w"
    r"|\A\s*\[?\{\s*\"name\"\s*:\s*\"[^\"]+\"\s*,\s*\"(?:arguments|parameters)\"",
    re.IGNORECASE,
)
"""How calls begin in the usual formats. Only where nothing reads the target's: so that an answer
which calls is not taken for one that does not."""

_LOCK = threading.Lock()


def tool_form(tokenizer: Tokenizer, template: ChatTemplate, profile: Profile) -> ToolForm:
    """Find how a template writes calls. The first time costs a second or two (imports)."""
    with _LOCK:
        return _tool_form(tokenizer, template, profile)


@lru_cache(maxsize=8)
def _tool_form(tokenizer: Tokenizer, template: ChatTemplate, profile: Profile) -> ToolForm:
    found: tuple[PackagedReader | LearntForm, str, Samples] | None = None
    kinds = [Samples(tokenizer, template, profile, as_text=text) for text in (False, True)]
    for samples in kinds:
        found = _find_reader(tokenizer, template, profile, samples)
        if found is not None:
            break
    reader, name, samples = found or (None, None, kinds[0])
    written = samples.one(PLAIN, "")
    if written is None:
        samples = kinds[1]
        written = samples.one(PLAIN, "")
    learnt = learn(tokenizer, profile, samples)
    shows_results = written is not None and f"{RESULT}0" in written.output + written.follows
    return ToolForm(
        reader=reader,
        reader_name=name,
        as_text=samples.as_text,
        shows_tools=_shows_tools(template),
        shows_results=shows_results,
        parallel=_parallel(samples),
        learnt=learnt,
        call_end=_end_of_calls(tokenizer, profile, written),
        answer_end=_end_of_answers(tokenizer, template),
        problem=_problem(samples, written, shows_results, reader is not None),
    )


def _find_reader(
    tokenizer: Tokenizer, template: ChatTemplate, profile: Profile, samples: Samples
) -> tuple[PackagedReader | LearntForm, str, Samples] | None:
    """The reader that reads back all samples; one that also writes as the template does first."""
    written = [sample for sample in samples.all() if _shows_calls(sample)]
    if not written:
        return None
    proven: list[PackagedReader] = []
    for reader in packaged_readers(tokenizer, tokenizer.source):
        if all(_reads_back(reader, tokenizer, profile, sample) for sample in written):
            if _writes_alike(reader, tokenizer, samples, template):
                proven = [reader]
                break
            proven.append(reader)
    if proven:
        return proven[0], f"renderers {package_version()}: {proven[0].name}", samples
    form = learn(tokenizer, profile, samples)
    if form is not None and all(_reads_back(form, tokenizer, profile, s) for s in written):
        return form, f"template {VERSION}", samples
    return None


def _shows_calls(sample: Sample) -> bool:
    """Whether every call of a sample is in what the template wrote."""
    return sum(sample.output.count(name) for name in {call.name for call in sample.calls}) >= len(
        sample.calls
    )


def _reads_back(
    reader: PackagedReader | LearntForm, tokenizer: Tokenizer, profile: Profile, sample: Sample
) -> bool:
    """Whether a reader gives back a sample's calls; their ids too, where the template does not
    write ids of its own (as Kimi-K2's first one numbers calls itself)."""
    prompt, output = tokenizer.encode(sample.prompt), tokenizer.encode(sample.output)
    stop = next((n for n, i in enumerate(output) if i in profile.stop_ids), None)
    output = output if stop is None else output[: stop + 1]
    if isinstance(reader, PackagedReader):
        found = reader.read(prompt, output, TOOLS)
    else:
        found = reader.read(tokenizer, profile, prompt, output)
    if found.fault or len(found.calls) != len(sample.calls):
        return False
    if sample.content in sample.output and found.content != sample.content:
        return False
    return all(
        read.name == call.name
        and plain_arguments(read.arguments) == plain_arguments(call.arguments)
        and (read.id in (None, call.id) or str(call.id) not in sample.output)
        for read, call in zip(found.calls, sample.calls, strict=True)
    )


def _writes_alike(
    reader: PackagedReader, tokenizer: Tokenizer, samples: Samples, template: ChatTemplate
) -> bool:
    """Whether the renderer's own ids of a conversation with a call are the template's."""
    messages = samples.conversation(PLAIN_TWO)
    try:
        text = template.render(messages, add_generation_prompt=False)
        return bool(reader.renderer.render_ids(messages) == tokenizer.encode(text))
    except Exception:  # the one or the other refuses it
        return False


def _shows_tools(template: ChatTemplate) -> bool:
    question: list[Message] = [{"role": "user", "content": QUESTION}]
    try:
        return TOOLS[0]["function"]["name"] in template.render(question, tools=TOOLS)
    except TemplateRefusal:
        return False


def _parallel(samples: Samples) -> bool:
    two = samples.one(PLAIN_TWO, "")
    return two is not None and _shows_calls(two)


def _end_of_calls(tokenizer: Tokenizer, profile: Profile, written: Sample | None) -> int | None:
    """The first stop id behind the call, in the answer or in what follows it (GLM's)."""
    if written is None or tokenizer.control_pattern is None:
        return None
    name = written.calls[0].name
    text = written.output.rpartition(name)[2] + written.follows
    found = (tokenizer.control[m] for m in tokenizer.control_pattern.findall(text))
    return next((i for i in found if i in profile.stop_ids), None)


def _end_of_answers(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    question, again = ({"role": "user", "content": text} for text in (QUESTION, RESULT))
    answer = {"role": "assistant", "content": ANSWER}
    try:
        text = template.render([question, answer, again]).rpartition(ANSWER)[2]
    except TemplateRefusal:
        return None
    found = tokenizer.control_pattern.search(text) if tokenizer.control_pattern else None
    return None if found is None else tokenizer.control[found.group()]


def _problem(
    samples: Samples, written: Sample | None, shows_results: bool, has_reader: bool
) -> str | None:
    if written is None:
        return f"no call can be rendered: {samples.refusal}"
    if not _shows_calls(written):
        return "the chat template shows no calls of earlier answers"
    if not shows_results:
        return "the chat template shows no results of tools"
    if not has_reader:
        hint = "" if package_version() else f"; {EXTRA} adds readers for some thirty model families"
        return f"nothing at hand reads back the calls that the chat template writes{hint}"
    return None
