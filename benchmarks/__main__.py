"""Run every question and write one table (Markdown) and one JSON file, named after the hardware and the day."""

import json
import os
import platform
import sys
import time
from pathlib import Path

from benchmarks import overhead, stall

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """CPU model, cores and memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {memory:.0f} GiB"


def main() -> int:
    rows = [*stall.measure(), *overhead.measure()]
    header = ["| question | measured | target | met |", "|---|---|---|---|"]
    table = [f"| {row['question']} | {row['shown']} | {row['target']} | {'yes' if row['met'] else '**no**'} |" for row in rows]
    day = time.strftime("%Y-%m-%d")
    text = "\n".join([f"# Overhead of checkpointing, {day}", "", hardware(), "", *header, *table, ""])
    RESULTS.mkdir(exist_ok=True)
    name = f"overhead_{os.cpu_count()}-cores_{day}"
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps({"hardware": hardware(), "day": day, "rows": rows}, indent=1))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
