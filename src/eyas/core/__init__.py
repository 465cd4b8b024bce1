"""What is done with every id of an answer, compiled where that could be.

`plain` says what each function means. `_fast.c` does the same in a tenth of the time or less: it is
compiled when eyas is installed, if there is a C compiler. ``EYAS_PLAIN=1`` chooses `plain`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or os.environ.get("EYAS_PLAIN"):
    from eyas.core import plain as _chosen
else:
    try:
        from eyas.core import _fast as _chosen
    except ImportError:  # not compiled here
        from eyas.core import plain as _chosen

COMPILED = not _chosen.__name__.endswith("plain")
"""Whether the compiled functions are in use."""

find = _chosen.find
is_loop = _chosen.is_loop
pack = _chosen.pack
read_lines = _chosen.read_lines
read_lists = _chosen.read_lists
read_object = _chosen.read_object
spells = _chosen.spells
within = _chosen.within
write_list = _chosen.write_list
