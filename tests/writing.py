"""Runs that tests write themselves, with the store's own writer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eyas.conversation import digest
from eyas.demo.server import TARGET
from eyas.store import Manifest, Writer, WriterLock, prepare_directory
from eyas.tokens import ChatTemplate, build_profile, load_tokenizer
from eyas.trace import Trace


def trace_of(at: int, prompt: list[int], output: list[int], **more: Any) -> Trace:
    """A row; `more` are its other columns."""
    key = digest(str(at).encode()).hex()
    return Trace(f"c{at}/0/0", f"c{at}", 0, 0, key, prompt, output, **{
        "finish_reason": "stop", "stop_id": output[-1], "reasoning_start": None,
        "reasoning_end": None, **more,
    })  # fmt: skip


def write_run(
    path: Path, rows: Iterable[Trace], *, source: Path = TARGET, seal_bytes: int | None = None,
    **fingerprint: Any,
) -> Path:  # fmt: skip
    """A run of the demo target (or of another one's files) that holds these rows."""
    tokenizer = load_tokenizer(str(source))
    template = ChatTemplate.of(tokenizer) if tokenizer.makes_prompts else None
    prepare_directory(path)
    Manifest(
        eyas="0",
        created="",
        date="2026-01-02",
        fingerprint={
            "tokenizer_files": tokenizer.files_hash,
            "template": template and template.hash,
            **fingerprint,
        },
        profile=build_profile(tokenizer, template).as_dict(tokenizer),
        max_new_tokens=512,
        tokenizer=str(source),
    ).save(path)
    lock = WriterLock(path)
    lock.acquire()
    more = {} if seal_bytes is None else {"seal_bytes": seal_bytes, "sync_every_s": 0.0}
    writer = Writer(path, lock, **more)
    for at, row in enumerate(rows):
        writer.put(row)
        if seal_bytes is not None or at % 1000 == 999:
            writer.flush()
    writer.close()
    lock.release()
    return path
