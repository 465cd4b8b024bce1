"""Who answers, and whether its tokenizer and template are the client's.

Invariant: agreement is shown by ids that both sides made of the same text, never by a name.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

from eyas.engines.known_faults import known_faults, parse_version
from eyas.errors import EngineError, TemplateRefusal
from eyas.findings import Findings, Verdict
from eyas.ids import first_difference
from eyas.probe.question import question_messages
from eyas.target import Target

HARD_STRINGS: tuple[str, ...] = (
    "The quick brown fox jumps over the lazy dog.",
    "Zürich naïve façade Ærøskøbing",
    "東京は日本の首都です。人工智能正在改变世界。",
    "안녕하세요 Привет мир مرحبا नमस्ते",
    "🦅👩‍👩‍👧‍👦🏳️‍🌈 ∑∞≠",
    "1234567890 3.14159 1,000,000 0x1F",
    "a  b   c    d\t\te\n\n\nf \n g\r\nh   ",
    "def f(x):\n    return {k: v for k, v in x.items() if v >= 10}\n",
    '{"name": "f", "arguments": {"a": [1, 2.5, null]}}',
    "don't we'll I'M they'Ve \u00a0\u200b\u3000\ufeff",
    "AAAAAAAAAAAAAAAAAAAAAAAA ================ ....",
)
"""Texts on which tokenizers part: scripts, emoji, digits, runs of space, code, odd spaces."""

_SETTINGS = {
    "reasoning_parser": "a reasoning parser, which parts text on the chat route only",
    "tool_call_parser": "a tool parser, which parts text on the chat route only",
    "quantization": "quantised weights",
    "kv_cache_dtype": "a KV cache of this type",
    "speculative_algorithm": "speculative decoding",
    "chat_template": "a chat template of the server's own",
    "sampling_defaults": "sampling defaults for its chat route; eyas sends every parameter itself",
}


async def look_at_server(target: Target, findings: Findings) -> None:
    """Who is there, what its version is known for, and which settings bear on ids."""
    info = target.info
    context = f", context {target.context_length:,}" if target.context_length else ""
    weights = f", weights {info.weight_version!r}" if info.weight_version else ""
    findings.add(
        "server",
        "ok",
        f"{info.engine} {info.version or '(version not told)'} at {info.url} serves "
        f"{info.model or '(model not told)'}{weights}{context}",
        engine=info.engine,
        version=info.version,
        model=info.model,
        weight_version=info.weight_version,
        context_length=target.context_length,
    )
    if info.doubt is not None:
        findings.add("engine", "warning", info.doubt)
    _version(target, findings)
    _settings(target, findings)


def _version(target: Target, findings: Findings) -> None:
    info = target.info
    if parse_version(info.version) is None:
        if info.engine == "sglang":
            findings.add(
                "version",
                "unproven",
                "the server does not tell its version, so its known faults cannot be named; the "
                "checks look for each of them in every answer",
            )
        return
    for fault in known_faults(info.engine, info.version, info.details):
        verdict: Verdict = "failed" if fault.fatal else "warning" if fault.needs else "note"
        findings.add("version", verdict, f"{info.engine} {info.version} {fault.what}")


def _settings(target: Target, findings: Findings) -> None:
    details = target.info.details
    told = {name: details[name] for name in _SETTINGS if details.get(name) not in (None, "auto")}
    if told:
        text = "; ".join(f"{_SETTINGS[name]} ({name} {value})" for name, value in told.items())
        findings.add("settings", "note", f"the server runs with {text}", **told)
    thresholds = [
        details.get(f"speculative_accept_threshold_{which}") for which in ("single", "acc")
    ]
    if details.get("speculative_algorithm") and any(
        isinstance(t, int | float) and t < 1.0 for t in thresholds
    ):
        findings.add(
            "settings",
            "warning",
            f"speculative decoding accepts with thresholds {thresholds} below 1, so what comes "
            "out is not exactly what the target would sample",
        )
    preferred = details.get("preferred_sampling_params")
    if isinstance(preferred, dict):
        unsent = sorted(set(preferred) - set(target.sampling.as_dict()) - {"max_new_tokens"})
        if unsent:
            findings.add(
                "settings",
                "warning",
                f"the server adds {', '.join(unsent)} to every request "
                f"(preferred_sampling_params {preferred}), which no request of eyas undoes",
                preferred_sampling_params=preferred,
            )
    if target.info.engine == "sglang" and not details.get("enable_deterministic_inference"):
        findings.add(
            "seeds",
            "note",
            "seeds have no effect on SGLang without --enable-deterministic-inference; rows are "
            "drawn anew if they are ever redone",
        )


async def look_at_tokenizer(target: Target, findings: Findings) -> None:
    """Whether client and server make the same ids of the same texts."""
    tokenizer = target.tokenizer
    _bounds(target, findings)
    control = list(tokenizer.control)
    bound = target.profile.vocab_size
    chosen = [
        text for text in control
        if "reserved" not in text.lower() and tokenizer.control[text] < bound
    ][:64]  # fmt: skip
    try:
        first = await target.engine.tokenize(HARD_STRINGS[0])
        if first is None:
            findings.add(
                "tokenizer",
                "unproven",
                "the server has no page that tokenizes, so the tokenizers were compared only in "
                "what the target answered",
            )
            return
        theirs = [first, *[await target.engine.tokenize(text) for text in HARD_STRINGS[1:]]]
        joined = "x".join(chosen)
        theirs_control = await target.engine.tokenize(joined)
    except EngineError as error:
        findings.add("tokenizer", "unproven", f"the server's tokenizer cannot be asked: {error}")
        return
    differing: list[dict[str, Any]] = []
    other_text = False
    added = False
    unanswered = sum(ids is None for ids in theirs)
    for text, ids in zip(HARD_STRINGS, theirs, strict=True):
        ours = tokenizer.encode(text)
        if ids is None or ids == ours:
            continue
        if (plain := _without_added(target, ids, ours)) != ids:
            added, ids = True, plain
        if ids == ours:
            continue
        differing.append({"text": text, "client": ours, "server": ids})
        other_text |= any(not 0 <= i < tokenizer.size for i in ids) or (
            tokenizer.decode(ids) != tokenizer.decode(ours)
        )
    ours_control = [tokenizer.control[text] for text in chosen]
    if theirs_control is not None:
        # Only control ids: what stands between them may be cut otherwise (llama.cpp puts a space
        # behind control strings of sentencepiece).
        known = set(tokenizer.control.values())
        theirs_control = _without_added(
            target, [i for i in theirs_control if i in known], ours_control
        )
    if theirs_control is not None and theirs_control != ours_control:
        at = first_difference(ours_control, theirs_control)
        here = tokenizer.name(ours_control[at]) if at < len(ours_control) else "the end"
        findings.add(
            "tokenizer",
            "failed",
            f"client and server disagree about control strings: where the client has {here}"
            f" the server has {theirs_control[at : at + 3]}. Give --tokenizer the files that the "
            "server was started with.",
            client=ours_control,
            server=theirs_control,
        )
        return
    if not differing:
        findings.add(
            "tokenizer",
            "ok",
            f"client and server make the same ids of {len(HARD_STRINGS) - unanswered} hard texts "
            f"{f'({unanswered} more were not answered) ' if unanswered else ''}and of "
            f"{len(chosen)} control strings"
            + (
                " (the server's page adds control ids at the ends, which eyas never sends)"
                if added
                else ""
            ),
        )
        return
    worst = differing[0]
    at = first_difference(worst["client"], worst["server"])
    where = (
        f"of {worst['text']!r} the client makes {worst['client'][at : at + 4]} and the server "
        f"{worst['server'][at : at + 4]} from id {at} on"
    )
    if other_text or 2 * len(differing) > len(HARD_STRINGS):
        findings.add(
            "tokenizer",
            "failed",
            f"client and server have different tokenizers: {where}. Give --tokenizer the files "
            "that the server was started with.",
            differing=differing,
        )
    else:
        findings.add(
            "tokenizer",
            "warning",
            f"client and server cut {len(differing)} of {len(HARD_STRINGS)} hard texts otherwise "
            f"(the same characters, other pieces): {where}. Captured ids are right, but text "
            "prompts to this server become other ids than here.",
            differing=differing,
        )


def _without_added(target: Target, theirs: list[int], ours: list[int]) -> list[int]:
    """Their ids without control ids at the ends that some pages add though asked not to."""
    control = set(target.tokenizer.control.values())
    for first, last in ((1, 0), (0, 1), (1, 1)):
        added = [*theirs[:first], *theirs[len(theirs) - last :]]
        if theirs[first : len(theirs) - last] == ours and control.issuperset(added):
            return ours
    return theirs


def _bounds(target: Target, findings: Findings) -> None:
    tokenizer, model = target.tokenizer, target.tokenizer.model
    served = target.info.details.get("vocab_size")
    text = f"ids must be below {tokenizer.vocab_size}"
    if model.vocab_size is None:
        text += " (the tokenizer's; there is no config.json that tells the model's)"
    elif model.vocab_size > tokenizer.size:
        padded = model.vocab_size - tokenizer.size
        text += f": the model's vocabulary, padded by {padded} ids beyond the tokenizer"
    elif model.vocab_size < tokenizer.size:
        text += f": the model's vocabulary, smaller than the tokenizer's {tokenizer.size}"
    else:
        text += ": the model's and the tokenizer's vocabularies are of one size"
    verdict: Verdict = "ok"
    if isinstance(served, int) and served < tokenizer.size:
        profile = target.profile
        needed = {*profile.stop_ids, *profile.prompt_tail, *tokenizer.encode(HARD_STRINGS[0])}
        for marker in (profile.opener, profile.closer):
            needed |= set(marker.ids) if marker else set()
        if max(needed, default=0) >= served:
            verdict = "failed"
            text += (
                f". The server's model has only {served} ids, fewer than its prompts need; give "
                "--tokenizer the files of the model that is served"
            )
        else:
            verdict = "warning"
            text += f". The server's model has only {served} ids, so that is the bound"
            target.profile = dataclasses.replace(
                profile, vocab_size=min(profile.vocab_size, served)
            )
    findings.add(
        "vocabulary",
        verdict,
        f"{text}; all {len(tokenizer.control)} control strings are one id each",
        tokenizer=tokenizer.size,
        config=model.vocab_size,
        server=served,
    )


async def look_at_served_template(target: Target, findings: Findings) -> None:
    """Whether the server's own template makes the same prompt of the question."""
    if target.template is None:
        return
    messages = question_messages(target)
    try:
        ours = target.template.prompt_ids(target.tokenizer, messages)
        theirs = await target.engine.render(messages, target.modes.each[0].kwargs)
    except TemplateRefusal:
        return  # the question itself says so
    except EngineError as error:
        findings.add("served_template", "unproven", f"the server renders nothing now: {error}")
        return
    if not theirs:
        findings.add(
            "served_template",
            "unproven",
            "the server has no page that renders messages, so its template cannot be compared",
        )
        return
    same_text = isinstance(theirs, str)
    other_tokenizer = False
    if isinstance(theirs, str):  # llama.cpp renders text; its own ids of it are asked for as well
        rendered = theirs
        theirs = target.tokenizer.encode(rendered)
        with suppress(EngineError):
            own = await target.engine.tokenize(rendered)
            other_tokenizer = own is not None and theirs == ours and own != theirs
            theirs = own or theirs
    bos = target.profile.bos_ids
    if same_text and bos and ours[:1] == list(bos) and theirs[:1] != list(bos):
        theirs = [*bos, *theirs]  # llama.cpp's text leaves BOS to its tokenizer
    if ours == theirs:
        findings.add(
            "served_template",
            "ok",
            f"the server's own chat template makes the same {len(ours)} prompt ids",
        )
        return
    at = first_difference(ours, theirs)
    if other_tokenizer:
        findings.add(
            "tokenizer",
            "failed",
            f"of the same rendered text the server makes other ids: at prompt id {at} the client "
            f"has {ours[at : at + 3]}, the server {theirs[at : at + 3]}. Give --tokenizer the "
            "files that the server was started with.",
            client=ours,
            server=theirs,
        )
        return
    explicit = target.config.chat_template is not None
    dated = target.template.shows_date
    verdict: Verdict = "warning" if explicit or same_text or dated else "failed"
    name = target.tokenizer.name
    here, there = ([name(i) for i in ids[at : at + 3]] for ids in (ours, theirs))
    advice = (
        "as --chat-template asks"
        if explicit
        else "the template prints the day, which may be all"
        if dated
        else "give the server's with --chat-template FILE, or name your own there if it is meant"
    )
    findings.add(
        "served_template",
        verdict,
        f"the server's chat template makes another prompt: at prompt id {at} the client has "
        f"{', '.join(here) or 'no more'}, the server {', '.join(there) or 'no more'} ({advice})",
        client=ours,
        server=theirs,
        at=at,
    )
