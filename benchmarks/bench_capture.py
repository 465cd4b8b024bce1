"""Client cost of `eyas capture` against the floor, in one run on one zero-latency server.

    python benchmarks/bench_capture.py [--rows 30000] [--tokenizer DIR] [--memory]

The floor of a thousand rows is the CPU time of the bare loop (`bare_loop.py`), of the compiled
chat template's rendering, and of the tokenizer's own `encode_batch`, over the same prompts.
`eyas capture` does all of that, checks every row and makes it durable. Where the input brings
ready-made `prompt_ids`, the floor is the bare loop alone. The CPU time per row is the slope
between a small and a large run, so that imports (shown apart) do not count as rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson

from eyas.demo.server import TARGET
from eyas.engines import Sampling, SGLang
from eyas.tokens import ChatTemplate, Tokenizer, load_tokenizer

HERE = Path(__file__).parent
PROMPT_TOKENS = 256
SMALL = 1000
GOALS = {"text": 0.8, "ids": 0.6}
PEERS = {
    "bare loop (aiohttp, orjson, uvloop)": 0.13,
    "the same with the standard library's json": 0.29,
    "speculators' script": 0.83,
    "the same loop over httpx": 4.1,
    "SpecForge's script": 26.0,
}
"""CPU seconds of the client a 1,000 rows of 256 ids in and 512 out, 64 in flight, as they were
measured on such a machine, in other runs: to compare orders of magnitude."""


def make_prompts(tokenizer: Tokenizer, count: int) -> list[dict[str, object]]:
    """Distinct prompts of about 256 ids each."""
    words = [
        "the",
        "of",
        "a",
        "river",
        "stone",
        "light",
        "winter",
        "paper",
        "garden",
        "city",
        "under",
        "seven",
        "green",
        "quiet",
    ]
    chosen = random.Random(1)
    sample = " ".join(chosen.choices(words, k=400))
    per_word = len(tokenizer.encode(sample)) / 400
    length = round((PROMPT_TOKENS - 10) / per_word)
    return [
        {"id": str(at), "prompt": f"{at} " + " ".join(chosen.choices(words, k=length))}
        for at in range(count)
    ]


def run_child(command: list[str]) -> tuple[float, float, str]:
    """CPU seconds (user + system), seconds, standard output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            raise SystemExit(f"{command} ended with {process.returncode}:\n{err.read()[-2000:]}")
        cpu = usage.ru_utime + usage.ru_stime
        return cpu, seconds, out.read()


def run_measured(command: list[str]) -> tuple[float, float, str, float]:
    """The same of a ``python -m``, and its peak memory in MiB."""
    with tempfile.NamedTemporaryFile("r") as file:
        python, *more = command
        found = run_child([python, str(HERE / "peak.py"), file.name, *more])
        return *found, int(file.read()) / 1024


def capture_command(
    url: str, prompts: Path, out: Path, tokenizer: str, in_flight: int
) -> list[str]:
    return [
        sys.executable, "-m", "eyas", "capture", str(prompts), "--out", str(out), "--url", url,
        "--tokenizer", tokenizer, "--max-new-tokens", "512", "--temperature", "1.0",
        "--concurrency", str(in_flight), "--json", "--no-probe",
    ]  # fmt: skip


def cpu_of(work: object) -> float:
    """CPU seconds of a callable, threads included: the least of three."""
    times = []
    for _ in range(3):
        began = time.process_time()
        work()  # type: ignore[operator]
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--tokenizer", default=str(TARGET))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="also peak memory at 50,000 rows")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    template = ChatTemplate.of(tokenizer)
    folder = Path(tempfile.mkdtemp(prefix="eyas-bench-"))
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), options.tokenizer],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        report = compare(folder, url, tokenizer, template, options.rows, options.repeat,
                         options.tokenizer)  # fmt: skip
        if options.memory:
            report["memory"] = memory(folder, url, tokenizer, options.tokenizer)
        report["help_s"] = min(run_child([sys.executable, "-m", "eyas", "--help"])[1]
                               for _ in range(5))  # fmt: skip
        print(f"eyas --help            {report['help_s']:.2f} s (goal: below 0.3)")
        (HERE / "last.json").write_text(json.dumps(report, indent=2) + "\n")
    finally:
        server.communicate("")
        shutil.rmtree(folder)


def compare(
    folder: Path,
    url: str,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    rows: int,
    repeat: int,
    source: str,
) -> dict[str, object]:
    """The ratios at 64 and 512 in flight."""
    prompts = make_prompts(tokenizer, rows + SMALL)
    chats = [[{"role": "user", "content": str(row["prompt"])}] for row in prompts[:2000]]
    texts = [template.render(chat) for chat in chats]
    ids = tokenizer.encode_batch(texts)
    render = cpu_of(lambda: [template.render(chat) for chat in chats]) / 2
    backend = tokenizer.backend
    encode = cpu_of(lambda: backend.encode_batch(texts, add_special_tokens=False)) / 2
    bodies = folder / "bodies.jsonl"
    asked = SGLang("http://127.0.0.1:1").parameters(Sampling())
    params = {**asked, "max_new_tokens": 512, "sampling_seed": 1}
    bodies.write_bytes(
        b"".join(
            orjson.dumps(
                {
                    "input_ids": ids[at % 2000],
                    "sampling_params": params,
                    "rid": "0" * 32,
                    "return_prompt_token_ids": True,
                    "stream": False,
                }
            )
            + b"\n"
            for at in range(rows)
        )
    )
    made = {
        "text": prompts,
        "ids": [{"id": row["id"], "prompt_ids": [*ids[at % 2000][:9], at % 500, *ids[at % 2000][10:]]}
                for at, row in enumerate(prompts)],
    }  # fmt: skip
    files = {}
    for kind, rows_of_kind in made.items():
        for size, count in (("small", SMALL), ("large", rows + SMALL)):
            files[kind, size] = folder / f"{kind}-{size}.jsonl"
            files[kind, size].write_bytes(
                b"".join(orjson.dumps(row) + b"\n" for row in rows_of_kind[:count])
            )
    mean = statistics.mean(map(len, ids))
    print(f"prompts of {mean:.0f} ids, answers of 512, tokenizer {source}; CPU s a 1,000 rows")
    print(f"rendering {render:.3f}   encode_batch {encode:.3f}")
    report: dict[str, object] = {"render": render, "encode": encode, "prompt_tokens": mean}
    for in_flight in (64, 512):
        loops: list[float] = []
        costs: dict[str, list[float]] = {"text": [], "ids": []}
        walls: dict[str, list[float]] = {"text": [], "ids": []}
        starts = []
        for at in range(repeat):
            loop = json.loads(run_child([sys.executable, str(HERE / "bare_loop.py"), url,
                                         str(bodies), "--in-flight", str(in_flight)])[2])  # fmt: skip
            loops.append(loop["cpu_s"] / rows * 1000)
            for kind in costs:
                cost = []
                for size in ("small", "large"):
                    out = folder / f"run-{kind}-{in_flight}-{at}-{size}"
                    command = capture_command(url, files[kind, size], out, source, in_flight)
                    cpu, _, said = run_child(command)
                    cost.append(cpu)
                    summary = json.loads(said)
                    shutil.rmtree(out)
                assert summary["done"] == rows + SMALL, summary
                costs[kind].append((cost[1] - cost[0]) / rows * 1000)
                starts.append(cost[0] - SMALL * costs[kind][-1] / 1000)
                walls[kind].append((rows + SMALL) / summary["seconds"])
        # The least of each: on a busy machine everything else only adds.
        floors = {"text": min(loops) + render + encode, "ids": min(loops)}
        for kind, floor in floors.items():
            eyas = min(costs[kind])
            print(
                f"{in_flight:>4} in flight, {kind:>4}: bare loop {min(loops):.3f}   floor "
                f"{floor:.3f}   eyas {eyas:.3f}   {statistics.median(walls[kind]):,.0f} rows/s   "
                f"ratio {floor / eyas:.2f} (goal: {GOALS[kind]:.2f})"
            )
            report[f"{in_flight} {kind}"] = {
                "loop": loops, "eyas": costs[kind], "floor": floor, "ratio": floor / eyas,
                "rows_per_second": walls[kind],
            }  # fmt: skip
        print(f"     start {statistics.median(starts):.1f} CPU s")
    print("measured elsewhere: " + "; ".join(f"{name} {s:g}" for name, s in PEERS.items()))
    return report


def memory(folder: Path, url: str, tokenizer: Tokenizer, source: str) -> dict[str, float]:
    """Peak memory at 5,000 and at 50,000 rows."""
    peaks = {}
    for rows in (5000, 50000):
        prompts = folder / f"{rows}.jsonl"
        with prompts.open("wb") as file:
            for row in make_prompts(tokenizer, rows):
                file.write(orjson.dumps(row) + b"\n")
        out = folder / f"memory-{rows}"
        peaks[str(rows)] = run_measured(capture_command(url, prompts, out, source, 64))[3]
        shutil.rmtree(out)
    ratio = peaks["50000"] / peaks["5000"]
    print(f"peak memory            {peaks['5000']:.0f} MiB at 5,000 rows, {peaks['50000']:.0f} "
          f"at 50,000: ratio {ratio:.2f} (goal: at most 1.20)")  # fmt: skip
    return {**peaks, "ratio": ratio}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(
        resource.RLIMIT_NOFILE)[1]),) * 2)  # fmt: skip
    main()
