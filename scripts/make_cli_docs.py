"""Write docs/cli.md from what `--help` says, so that it cannot drift.

python scripts/make_cli_docs.py            # write it
python scripts/make_cli_docs.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TARGET = Path(__file__).parent.parent / "docs" / "cli.md"
VERBS = (
    "",
    "demo",
    "probe",
    "capture",
    "status",
    "show",
    "stats",
    "verify",
    "redo",
    "merge",
    "archive",
    "export",
    "vocab",
    "drift",
)

HEAD = """# Command line

Written from `--help` by `scripts/make_cli_docs.py`; do not edit it by hand.

## Exit codes

| code | meaning |
|---|---|
| 0 | all done: every unit of the input is stored and good |
| 2 | the command, its configuration, the tokenizer, the server's kind or the run directory is wrong; nothing was sent |
| 3 | some units are rejected; each stands in `rejected/` with its reason |
| 4 | some units are pending: the server is or went away, the disk is full, the key was refused; run the same command again |
| 130 | interrupted with Ctrl-C or SIGTERM; what was finished is on disk |

Rejected and pending together give 4. `eyas status` gives the code of the capture that it shows:
0 while that runs, 4 if it was killed. Messages and progress go to standard error, results to
standard output. `NO_COLOR` turns colours off, `FORCE_COLOR` on. `EYAS_CACHE` names the
directory for converted tokenizers (default `~/.cache/eyas`).

The options of `eyas capture` have the same names in a file for `--config` and in
`eyas.CaptureConfig`, with `_` for `-`; PROMPTS is `prompts` and `--stop-token-id` is
`stop_token_ids`, both lists, and so is `reject`. `--config`, `--archive`, `--no-probe`,
`--metrics-port`, `--metrics-host` and `--json` belong to the command alone.
`--template-kwargs @FILE` reads the JSON from a file.
"""


def help_of(verb: str) -> str:
    """What `eyas VERB --help` prints, 100 columns wide."""
    env = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "eyas", *([verb] if verb else []), "--help"]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in shown.strip().splitlines())


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for verb in VERBS:
        parts.append(f"## `{f'eyas {verb}'.strip()}`\n\n```text\n{help_of(verb)}\n```\n")
    return "\n".join(parts)


def main() -> int:
    """Write the page, or compare it."""
    wanted = page()
    if "--check" in sys.argv:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != wanted:
            print("docs/cli.md is out of date: run make docs", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
