"""Capture sixteen answers from the demo target, and look at one of them.

    python examples/01_capture.py [DIRECTORY]

Starts the engine that comes with eyas (no GPU, no download), captures, and prints the spans and
the loss mask of one trace. Without a directory the files go to a temporary one. Needs the demo
packages: pip install 'eyas[demo]'.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from eyas import CaptureConfig, Profile, Run, Summary, Trace, capture, load_tokenizer
from eyas.demo.problems import generate
from eyas.demo.server import TARGET, serve


def capture_sixteen(directory: Path) -> Summary:
    """Write sixteen problems to a prompt file, and capture the target's answers to them."""
    prompts = directory / "prompts.jsonl"
    problems = generate(seed=3, n=16, split="held_out")
    rows = [{"id": f"{p.kind}-{at}", "prompt": p.question} for at, p in enumerate(problems)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with serve(TARGET / "model.gguf") as server:
        return capture(
            CaptureConfig(
                prompts=[str(prompts)],
                out=str(directory / "run"),
                url=server.url,
                tokenizer=str(TARGET),
                max_new_tokens=512,
            )
        )


def print_spans(run: Run, trace: Trace) -> None:
    """Show where prompt, reasoning, answer and stop id lie, all cut out of the ids."""
    tokenizer = load_tokenizer(run.manifest.tokenizer)
    profile = Profile.from_dict(run.manifest.profile)
    reading = profile.read(tokenizer, trace.prompt_ids, trace.output_ids)
    print(f"trace     {trace.id}, {trace.finish_reason}")
    print(f"prompt    {tokenizer.decode(trace.prompt_ids)!r}")
    print(f"reasoning {reading.reasoning!r}  at {reading.start} to {reading.end}")
    print(f"answer    {reading.content!r}  from {reading.content_start}")
    if trace.stop_id is not None:
        print(f"stop id   {tokenizer.name(trace.stop_id)}")
    print(f"input_ids {trace.input_ids}")
    print(f"loss_mask {trace.loss_mask}")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="eyas-example-") as temporary:
        directory = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        directory.mkdir(parents=True, exist_ok=True)
        summary = capture_sixteen(directory)
        print(
            f"captured  {summary.done} of {summary.input} rows, {summary.output_tokens} output "
            f"tokens in {summary.seconds:.1f} s, into {summary.run}"
        )
        run = Run(summary.run)
        trace = next(run.traces(), None)
        if trace is not None:
            print_spans(run, trace)
        return summary.exit_code


if __name__ == "__main__":
    sys.exit(main())
