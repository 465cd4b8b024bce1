"""Read a run with DuckDB, polars, Arrow and eyas. The Parquet parts alone are a data set.

    python examples/02_read_a_run.py [RUN]

Without a run a small one is captured first (see 01_capture.py). A library that is not installed
is left out.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from some_run import given_or_captured

from eyas import open_run

QUERY = """
    SELECT finish_reason,
           count(*) AS traces,
           sum(len(output_ids)) AS output_ids,
           round(avg(reasoning_end - reasoning_start), 1) AS reasoning_ids
    FROM '{parts}'
    GROUP BY finish_reason
"""


def with_duckdb(parts: str) -> None:
    """Count traces by finish reason."""
    import duckdb

    print(duckdb.sql(QUERY.format(parts=parts)))


def with_polars(parts: str) -> None:
    """Show the longest outputs; only the columns that are named are read."""
    import polars as pl

    print(
        pl.scan_parquet(parts)
        .select("id", pl.col("output_ids").list.len().alias("output_ids"), "marks")
        .sort("output_ids", "id", descending=[True, False])
        .head(5)
        .collect()
    )


def with_eyas(run: Path) -> None:
    """Derive what trainers want; it is not stored. Works while the run is written, too."""
    opened = open_run(run)
    for trace in opened:
        input_ids, loss_mask = trace.input_ids, trace.loss_mask
        print(f"{trace.id}: {len(input_ids)} input_ids, {sum(loss_mask)} of them supervised")
        break
    table = opened.arrow(["id", "input_ids", "loss_mask"]).read_all()
    print(f"Arrow: {table.num_rows} rows of {', '.join(table.column_names)}")


def main() -> int:
    with given_or_captured() as run:
        parts = str(run / "traces" / "*.parquet")  # the traces, not the whole directory
        for name, show in (("duckdb", with_duckdb), ("polars", with_polars)):
            if find_spec(name) is None:
                print(f"{name} is not installed; left out")
            else:
                show(parts)
        with_eyas(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
