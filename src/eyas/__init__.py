"""eyas captures the exact token sequences that a large language model generates.

The parts have short names here and are imported when they are first used, so that importing
eyas (and ``eyas --help``) stays fast::

    from eyas import CaptureConfig, capture, open_run

    summary = capture(CaptureConfig(prompts=["prompts.jsonl"], out="run", url="...", tokenizer="..."))
    for trace in open_run("run"):
        trace.input_ids, trace.loss_mask
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.checks import Checker, Verdict
    from eyas.config import CaptureConfig, TargetConfig
    from eyas.conversation import BadLine, Conversation
    from eyas.drift import DriftReport, measure_drift
    from eyas.engines import VLLM, Engine, Generation, LlamaCpp, Request, Sampling, SGLang
    from eyas.errors import EyasError
    from eyas.export import ExportOptions, ExportReport, export_run
    from eyas.findings import Finding, Findings
    from eyas.library import OpenRun, open_run
    from eyas.loop import capture
    from eyas.merge import MergeReport, merge_runs
    from eyas.probe import Probe
    from eyas.progress import Progress, Summary
    from eyas.readers import PromptReader
    from eyas.run_target import RunTarget, open_run_target
    from eyas.store import Run
    from eyas.tokens import ChatTemplate, Profile, Tokenizer, build_profile, load_tokenizer
    from eyas.trace import Rejected, Trace
    from eyas.vocabulary import Vocabulary, choose_vocabulary

__version__ = "0.1.0"

_HOMES = {
    "checks": ("Checker", "Verdict"),
    "config": ("CaptureConfig", "TargetConfig"),
    "conversation": ("BadLine", "Conversation"),
    "drift": ("DriftReport", "measure_drift"),
    "engines": ("Engine", "Generation", "LlamaCpp", "Request", "SGLang", "Sampling", "VLLM"),
    "errors": ("EyasError",),
    "export": ("ExportOptions", "ExportReport", "export_run"),
    "findings": ("Finding", "Findings"),
    "library": ("OpenRun", "open_run"),
    "loop": ("capture",),
    "merge": ("MergeReport", "merge_runs"),
    "probe": ("Probe",),
    "progress": ("Progress", "Summary"),
    "readers": ("PromptReader",),
    "run_target": ("RunTarget", "open_run_target"),
    "store": ("Run",),
    "tokens": ("ChatTemplate", "Profile", "Tokenizer", "build_profile", "load_tokenizer"),
    "trace": ("Rejected", "Trace"),
    "vocabulary": ("Vocabulary", "choose_vocabulary"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "VLLM",
    "BadLine",
    "CaptureConfig",
    "ChatTemplate",
    "Checker",
    "Conversation",
    "DriftReport",
    "Engine",
    "ExportOptions",
    "ExportReport",
    "EyasError",
    "Finding",
    "Findings",
    "Generation",
    "LlamaCpp",
    "MergeReport",
    "OpenRun",
    "Probe",
    "Profile",
    "Progress",
    "PromptReader",
    "Rejected",
    "Request",
    "Run",
    "RunTarget",
    "SGLang",
    "Sampling",
    "Summary",
    "TargetConfig",
    "Tokenizer",
    "Trace",
    "Verdict",
    "Vocabulary",
    "build_profile",
    "capture",
    "choose_vocabulary",
    "export_run",
    "load_tokenizer",
    "measure_drift",
    "merge_runs",
    "open_run",
    "open_run_target",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'eyas' has no attribute {name!r}")
    value = getattr(import_module(f"eyas.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
