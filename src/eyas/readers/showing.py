"""Why a row is refused, in words that show the value.

Invariant: whatever a value is, showing it raises nothing, writes no control characters and stays
short.
"""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """This row cannot be used. `reason` is one of `REASONS`; `detail` shows the value."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def kind(value: Any) -> str:
    """What a value is, in JSON's words."""
    names = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def show(value: Any) -> str:
    """The value as a message can show it: escaped, and cut."""
    try:
        shown = repr(value[:80] if type(value) in (str, list) else value)
    except RecursionError:
        return f"{kind(value)}, nested too deeply to show"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
