"""The checks of data that is already there.

Invariant: what is checked is never changed, and a fault is shown with the row that has it.
"""

from eyas.verify.faults import FAULTS, FileReport
from eyas.verify.foreign import verify_file

__all__ = ["FAULTS", "FileReport", "verify_file"]
