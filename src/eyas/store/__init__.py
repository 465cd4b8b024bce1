"""The run directory. Knows traces, never where they came from."""

from eyas.store.ledger import (
    CALLED,
    GOOD,
    OPEN,
    REFUSED,
    TRUNCATED,
    UNANSWERED,
    UNREADABLE,
    Ledger,
    Met,
)
from eyas.store.lock import WriterLock
from eyas.store.manifest import Manifest
from eyas.store.parts import REJECTED, TRACES
from eyas.store.run import Run, archive, archive_run, is_run, prepare_directory, remove_temporaries
from eyas.store.writer import Writer, seal_leftovers

__all__ = [
    "CALLED",
    "GOOD",
    "OPEN",
    "REFUSED",
    "REJECTED",
    "TRACES",
    "TRUNCATED",
    "UNANSWERED",
    "UNREADABLE",
    "Ledger",
    "Manifest",
    "Met",
    "Run",
    "Writer",
    "WriterLock",
    "archive",
    "archive_run",
    "is_run",
    "prepare_directory",
    "remove_temporaries",
    "seal_leftovers",
]
