"""An export from end to end: a run's rows, chosen, put in order, and written.

Invariants: the figures of the report are those of what was written; nothing is at ``--out`` unless
all of it is; memory does not grow with the run but for 8 bytes a trace (32 with ``dedupe``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import ConfigError, DamagedRun
from eyas.export.forms import Finished, Form, Opening, Sink
from eyas.export.options import ExportOptions
from eyas.export.places import Shards, by_split, shuffled
from eyas.export.report import ExportReport, SplitFigures, Tally
from eyas.export.rows import NEEDED, rows_of, schema_with
from eyas.export.staging import RECORD, Stage, check_place, staged
from eyas.store import REJECTED, TRACES, Run
from eyas.trace import Trace, arrow_schema

if TYPE_CHECKING:
    from eyas.export.texts import TextForm
    from eyas.run_target import RunTarget

_BATCH_BYTES = 2 * 2**20
"""Ids of a batch: what is worked on at a time."""
_MOST_FILES = 512
"""How many files may be open at once."""


def export_run(
    run: str | Path,
    *,
    to: str,
    out: str | Path,
    options: ExportOptions | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    tokenizer: str | None = None,
    chat_template: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    on_plan: Callable[[list[str]], None] = lambda _: None,
    on_rows: Callable[[int], None] = lambda _: None,
    **choices: Any,
) -> ExportReport:
    """Write a run's good rows in a form; the file or directory appears whole or not at all.

    Args:
        to: the form, one of `FORMS`.
        out: a file; a directory where the form is one, or with `split` or `shards`.
        options: what goes out, and how; each field of it may be given by its name as well.
        overwrite: replace a file, or a directory that an earlier export made.
        dry_run: do everything but write, to see the figures.
        tokenizer: for forms of text: the run's tokenizer, where it is not where it was.
        chat_template: likewise its chat template (`eyas.target.read_template`), where it had its own.
        revision: of a tokenizer on the hub.
        trust_remote_code: whether the model's own code may make prompts, as it did in the capture.
        on_plan: gets what is going to be done, before it is done.
        on_rows: gets the number of traces read so far.

    Raises:
        ConfigError: a choice that cannot be carried out, or the place is taken.
        DamagedRun: the run cannot be read.
        DiskFull: a write failed; then nothing is there.
    """
    from eyas.export import FORMS

    if to not in FORMS:
        raise ConfigError(f"--to {to} is not known; there is {', '.join(FORMS)}")
    chosen = replace(options or ExportOptions(), **choices)
    form, place = FORMS[to], Path(out)
    form.check(chosen)
    is_directory = form.makes_directory(chosen)
    check_place(place, overwrite=overwrite, is_directory=is_directory, suffix=form.suffix)
    files = (chosen.shards or 1) * max(1, len(chosen.split))
    if files > _MOST_FILES:
        raise ConfigError(f"--shards {chosen.shards}: at most {_MOST_FILES} files are written")
    opened = Run(run)
    if opened.path.resolve() in place.resolve().parents[1:]:
        raise ConfigError(
            f"--out {place} lies among the run's own files, which would be taken for its rows; "
            "name a place outside of it"
        )
    target = None
    if form.text is not None:
        from eyas.export.texts import open_text_target

        target = open_text_target(
            opened, tokenizer, chat_template, revision=revision, trust_remote_code=trust_remote_code
        )
    export = _Export(opened, form, chosen, target, on_rows)
    report = export.report
    report.to, report.out, report.rejected = to, str(place), opened.count(REJECTED)
    report.plan = [f"{export.sizes.rows:,} rows of {opened.path} as {to}", *chosen.lines()]
    on_plan(report.plan)
    try:
        with staged(place, is_directory=is_directory, keep=not dry_run) as stage:
            export.carry_out(stage, write=not dry_run)
    except ValueError as error:  # keys that are none
        raise DamagedRun(f"{opened.path}: {error}; eyas verify {opened.path} says more") from error
    return report


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a run is, from what its parts say of themselves."""

    rows: int
    ids: int
    bytes: int
    """In memory, of the ids and of the columns that go along."""

    @classmethod
    def of(cls, run: Run, carried: Sequence[str] = ()) -> Sizes:
        """Parts are not read for it; of unsealed rows the ids are a guess."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from eyas.store.journal import segments
        from eyas.store.parts import parts

        ids = others = 0
        for part in parts(run.path, TRACES):
            try:
                metadata = pq.read_metadata(part)
            except (OSError, pa.ArrowException):
                continue  # reading it will say what is wrong
            for group in range(metadata.num_row_groups):
                for column in map(metadata.row_group(group).column, range(metadata.num_columns)):
                    name = column.path_in_schema.split(".")[0]
                    if name in ("prompt_ids", "output_ids"):
                        ids += column.num_values
                    elif name in carried:
                        others += column.total_uncompressed_size
        unsealed = sum(path.stat().st_size for _, path in segments(run.path / "journal"))
        ids += unsealed // 5
        return cls(run.count(TRACES), ids, 4 * ids + others + (unsealed if carried else 0))

    def batch_rows(self) -> int:
        """How many rows make up a batch."""
        return max(1, min(1 << 16, _BATCH_BYTES * self.rows // max(1, self.bytes)))


class _Export:
    """One export under way."""

    def __init__(
        self,
        run: Run,
        form: Form,
        options: ExportOptions,
        target: RunTarget | None,
        on_rows: Callable[[int], None],
    ) -> None:
        self._run = run
        self._form = form
        self._options = options
        self._target = target
        self._on_rows = on_rows
        self.report = ExportReport()
        self._sinks: dict[Path, Sink] = {}
        self._carried = tuple(options.columns) + tuple(
            name for name in form.reads if name not in options.columns
        )
        self.sizes = Sizes.of(run, self._carried)

    def carry_out(self, stage: Stage, *, write: bool) -> None:
        """Read, choose and write."""
        tally = Tally(self.report, self._form.cuts_at)
        files = self._form.files(stage.path, self._options, self.sizes.ids)
        self.report.splits = {split: SplitFigures() for split in files}
        with ExitStack() as stack:
            writer = stack.enter_context(_Writing(self._shards(files, stack) if write else {}))
            for rows in self._rows(stage):
                for split, some in by_split(rows, self._options.split):
                    tally.add(split, some)
                    writer.write(split, some)
                self._on_rows(self.report.read)
        tally.finish()
        self.report.trainer = self._form.said(self.report)
        if write:
            self._finish(stage, files)

    def _shards(self, files: dict[str, list[Path]], stack: ExitStack) -> dict[str, Shards]:
        count = sum(map(len, files.values()))
        schema = schema_with([arrow_schema(Trace).field(name) for name in self._carried])
        made: dict[str, Shards] = {}
        for split, paths in files.items():
            sinks: list[Sink] = []
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                sink = self._form.open(Opening(path, schema, count))
                stack.callback(sink.close)
                self._sinks[path] = sink
                sinks.append(sink)
            made[split] = Shards(sinks)
        return made

    def _rows(self, stage: Stage) -> Iterator[Any]:
        """The rows that go out, in their order."""
        from eyas.export.choosing import Sieve

        rows = Sieve(self._options, self.report).pass_on(self._joined(stage))
        if self._form.text is not None:
            rows = self._as_text(self._form.text, rows)
        if self._options.shuffle is None:
            return rows
        return shuffled(rows, self._options.shuffle, self._buckets(stage, "shuffled"))

    def _as_text(self, form: TextForm, rows: Iterator[Any]) -> Iterator[Any]:
        from eyas.export.texts import Texts

        assert self._target is not None
        texts = Texts(form, self._target, self.report)
        yield from texts.pass_on(rows)
        texts.finish()

    def _joined(self, stage: Stage) -> Iterator[Any]:
        from eyas.export.choosing import chosen_traces
        from eyas.export.merging import joined_rows, last_rows, repeated, thread_words

        options = self._options
        is_text = self._form.text is not None
        read = self._traces([*NEEDED, *self._carried])
        traces = chosen_traces(read, options, self.report, text=is_text)
        rows = (
            rows_of(batch, reasoning=options.mask != "no-reasoning", carry=self._carried)
            for batch in traces
        )
        if not options.merge_turns and not is_text:
            return rows
        several = repeated(map(thread_words, self._traces(["key", "sample"])))
        buckets = self._buckets(stage, "threads")
        if is_text:
            return last_rows(rows, several, buckets, self.report)
        return joined_rows(
            rows,
            several,
            buckets,
            max_length=options.max_length,
            last_turn=options.mask == "last-turn",
        )

    def _traces(self, columns: Sequence[str]) -> Iterator[Any]:
        columns = list(dict.fromkeys(columns))
        size = self.sizes.batch_rows() if "prompt_ids" in columns else 1 << 16
        for batch in self._run.batches(TRACES, columns, batch_size=size):
            if len(batch):
                yield batch

    def _buckets(self, stage: Stage, name: str) -> Any:
        from eyas.export.buckets import Buckets

        folder = stage.spool / name
        folder.mkdir()
        return Buckets(folder, self.sizes.bytes)

    def _finish(self, stage: Stage, files: dict[str, list[Path]]) -> None:
        manifest = self._run.manifest
        done = Finished(stage.path, files, self.report, self._options, manifest, self._sinks)
        self._form.finish(done)
        if stage.path.is_dir():
            (stage.path / RECORD).write_text(done.record(), encoding="utf-8")


class _Writing:
    """Writes batches on a thread of its own, one after the other, while the next is made."""

    def __init__(self, shards: dict[str, Shards]) -> None:
        self._shards = shards
        self._pool = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._pool.shutdown()

    def write(self, split: str, rows: Any) -> None:
        """Have a batch written, once the one before it is."""
        if self._shards:
            self._wait()
            self._under_way = self._pool.submit(self._shards[split].write, rows)

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None
