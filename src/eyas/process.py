"""What a capture changes of its process: collections, Arrow's memory, signals.

Invariant: all of it is put back when the capture ends, however it ends.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

_YOUNG = 20_000
"""Objects that have come and not gone before the young are collected."""


@contextmanager
def tuned() -> Iterator[None]:
    """Memory as a capture wants it.

    What is loaded is kept out of garbage collections, which else cost a fifth of each row; the
    young are collected seldom, since what a row leaves has no cycles; and Arrow takes memory from
    the system, since its own pool keeps up to 80 MB that nobody uses.
    """
    pool, thresholds = pa.default_memory_pool(), gc.get_threshold()
    pa.set_memory_pool(pa.system_memory_pool())
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        pa.set_memory_pool(pool)


@contextmanager
def signals(
    loop: asyncio.AbstractEventLoop,
    *,
    interrupt: Callable[[], None],
    hang_up: Callable[[], None],
) -> Iterator[None]:
    """Handle signals on the loop, where that can be: in the main thread.

    Args:
        interrupt: called on SIGINT and SIGTERM.
        hang_up: called on SIGHUP, unless the process ignores it, as nohup has it.
    """
    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: interrupt}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = hang_up
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
