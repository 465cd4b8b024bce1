"""A run in a trainer's own form; one module a form.

Invariant: no id changes on the way, and what is left out or cut is counted by reason.
"""

from eyas.export import (
    automodel,
    eagle,
    hf,
    jsonl,
    openai,
    parquet,
    sharegpt,
    specforge,
    specforge_chat,
    speculators,
    torchspec,
)
from eyas.export.exporting import export_run
from eyas.export.forms import Form
from eyas.export.options import ExportOptions, parse_split
from eyas.export.report import REASONS, ExportReport

FORMS: dict[str, Form] = {
    module.FORM.name: module.FORM
    for module in (
        jsonl,
        parquet,
        hf,
        speculators,
        specforge,
        specforge_chat,
        openai,
        sharegpt,
        eagle,
        torchspec,
        automodel,
    )
}

__all__ = [
    "FORMS",
    "REASONS",
    "ExportOptions",
    "ExportReport",
    "Form",
    "export_run",
    "parse_split",
]
