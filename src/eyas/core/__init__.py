"""What is done with every id of an answer, compiled where that could be.

`plain` says what each function means. `_fast.c` does the same in a tenth of the time or less: it is
compiled when eyas is installed, if there is a C compiler. ``EYAS_PLAIN=1`` chooses `plain`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__all__ = [
    "COMPILED", "find", "is_loop", "pack", "read_lists", "read_object", "spells",
    "within", "write_list",
]  # fmt: skip

COMPILED = False
"""Whether the compiled functions are in use."""

if TYPE_CHECKING or os.environ.get("EYAS_PLAIN"):
    from eyas.core.plain import (
        find,
        is_loop,
        pack,
        read_lists,
        read_object,
        spells,
        within,
        write_list,
    )  # fmt: skip
else:
    try:
        from eyas.core._fast import (
            find,
            is_loop,
            pack,
            read_lists,
            read_object,
            spells,
            within,
            write_list,
        )  # fmt: skip

        COMPILED = True
    except ImportError:  # not compiled here
        from eyas.core.plain import (
            find,
            is_loop,
            pack,
            read_lists,
            read_object,
            spells,
            within,
            write_list,
        )  # fmt: skip
