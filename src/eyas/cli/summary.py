"""What is said before a capture and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.cli.live import Live
from eyas.cli.panel import duration
from eyas.cli.tokens import printable

if TYPE_CHECKING:
    from eyas.progress import Summary
    from eyas.session import Session


_HISTORY = {
    "full": "earlier answers keep their reasoning",
    "tokens": "earlier prompts and answers stay id by id, and new messages are added behind them",
}


def print_start(session: Session, live: Live) -> None:
    """Who answers, how it is sampled, and what the prompt's end looks like."""
    target = session.target
    info, profile, tokenizer = target.info, target.profile, target.tokenizer
    engine = f"{info.engine} {info.version or '(version not told)'}"
    live.say(f"server    {info.url}  {engine}  model {info.model or 'not told'}")
    sampling = {k: v for k, v in target.sampling.as_dict().items() if v not in ([], 0.0) or k ==
                "temperature"}  # fmt: skip
    budget = session.config.max_new_tokens
    said = "  ".join(f"{name} {value}" for name, value in sampling.items())
    live.say(f"sampling  {said}  max_new_tokens {budget}  n {session.config.n}")
    weights = sum(mode.weight for mode in target.modes.each)
    for mode in target.modes.each:
        if mode.template is None or not mode.prompt_tail:
            continue
        tail = tokenizer.decode(mode.prompt_tail[-4:])
        thinking = {
            "open": f"opened by the prompt, closed by {profile.closer and profile.closer.text!r}",
            "closed": "closed by the prompt",
            "none": "not opened by the prompt",
        }[mode.reasoning]
        several = len(target.modes.each) > 1
        share = f"{mode.weight / weights:.0%} " if several else ""
        share += f"with {mode.text}: " if mode.kwargs else ""
        live.say(
            f"prompt    {share}ends {tail!r} {list(mode.prompt_tail[-4:])}; reasoning {thinking}"
        )
    if session.config.history != "served":
        live.say(f"history   {session.config.history}: {_HISTORY[session.config.history]}")
    stops = ", ".join(tokenizer.name(index) for index in sorted(profile.stop_ids)) or "none known"
    live.say(f"stop ids  {stops}")
    what = "continues" if session.continued else "new run in"
    live.say(f"run       {what} {session.run.path}, {_servers(session)}")


def _servers(session: Session) -> str:
    config = session.config
    many = f"{len(config.url)} servers, " if len(config.url) > 1 else ""
    if config.concurrency is None:
        return f"{many}as many requests in flight as keep them full"
    return f"{many}{config.concurrency} requests in flight{' at each' if many else ''}"


def _use(summary: Summary) -> list[str]:
    """How full the servers were, and how long they stood half empty at the end."""
    use = summary.use
    if use.share is None or not summary.new:
        return []
    parts = [f"{use.share:.1%} of places used"]
    if use.share_with_rows_left is not None:
        parts.append(f"{use.share_with_rows_left:.1%} while rows were left to begin")
    if use.below_half_s >= 1:
        parts.append(f"below half for the last {duration(use.below_half_s)}")
    return [f"servers   {', '.join(parts)}"]


def print_summary(summary: Summary) -> None:
    """The counts, the speed, where the rows lie, and what to do next."""
    about = "" if summary.input_known else "at least "
    print(
        f"input     {about}{summary.input:,} = {summary.done:,} done + {summary.rejected:,} "
        f"rejected + {summary.pending:,} pending"
    )
    if summary.shapes:
        shapes = ", ".join(f"{name} {count:,}" for name, count in summary.shapes.items())
        print(f"shapes    {printable(shapes)}")
    share = f" ({100 * summary.truncated / summary.done:.1f}% of done)" if summary.done else ""
    print(f"truncated {summary.truncated:,}{share}")
    if summary.extra:
        print(f"extra     {summary.extra:,} rows in the run that this input does not hold")
    rate = summary.output_tokens / summary.seconds if summary.seconds > 0 else 0.0
    print(
        f"captured  {summary.new:,} rows now: {summary.prompt_tokens:,} prompt and "
        f"{summary.output_tokens:,} output tokens in {duration(summary.seconds)}, "
        f"{rate:,.0f} output tokens/s"
    )
    if len(summary.modes) > 1:
        said = ", ".join(f"{mode} {count:,}" for mode, count in summary.modes.items())
        print(f"modes     {printable(said)}")
    if summary.cached_tokens is not None and summary.prompt_tokens:
        cached = min(1.0, summary.cached_tokens / summary.prompt_tokens)
        print(f"cached    {cached:.0%} of the prompt tokens stood in a server's cache")
    for line in _use(summary):
        print(line)
    for reason, count in summary.reasons.items():
        print(f"rejected  {count:,} {reason}")
    if summary.done:
        print(f"files     {summary.run}/traces/*.parquet")
    if summary.rejected:
        print(f"          {summary.run}/rejected/*.parquet, each row with its reason")
    if summary.stopped:
        print(f"stopped   {printable(summary.stopped)}")
    if summary.interrupted or summary.pending or summary.stopped or not summary.input_known:
        print("next      run the same command again to go on")
    elif summary.done:
        print(f"next      eyas show {summary.run}   eyas stats {summary.run}   "
              f"eyas export {summary.run} --to jsonl --out train.jsonl")  # fmt: skip
    if summary.truncated and not summary.pending:
        print(f"          eyas redo {summary.run} --which length --max-new-tokens N   goes on with "
              "the truncated rows")  # fmt: skip
    if summary.rejected and not summary.pending:
        print(f"          eyas redo {summary.run} --which rejected   does the rejected rows again")
