"""`python -m benchmarks [QUESTION ...] [--quick]`: all of the engine, or what is named; a page, a JSON file, plots."""

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import (
    coordination,
    increments,
    many,
    overhead,
    ranks,
    ratios,
    retention,
    saves,
    sizes,
    stall,
    throttled,
    travel,
    wall,
)
from benchmarks.report import RESULTS, Question, Report, Section, Setting

QUESTIONS: dict[str, Question] = {
    "stall": stall.measure,
    "saves-0.4": saves.small,
    "ratios": ratios.measure,
    "increments": increments.measure,
    "throttled": throttled.measure,
    "wall": wall.measure,
    "saves-1.5": saves.large,
    "sizes": sizes.measure,
    "retention": retention.measure,
    "many": many.measure,
    "overhead": overhead.measure,
    "travel": travel.measure,
    **{name: engine.measure for name, engine in ranks.ENGINES.items()},
    "coordination": coordination.measure,
}
APART = {"overhead": ("overhead",), "travel": ("travel",), "ranks": (*ranks.ENGINES, "coordination")}
"""What is asked only by name, and which questions that are."""
ENGINE = [name for name in QUESTIONS if not any(name in names for names in APART.values())]
"""What is asked unless questions are named: all about the checkpoint engine, in thirteen and a half minutes."""


def ask(name: str, setting: Setting, report: Report) -> None:
    """Answer one question. A failure is kept as its answer: the questions after it are still asked."""
    print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    section = Section(name)
    try:
        for section in QUESTIONS[name](setting):
            report.keep(name, section)
    except Exception as error:  # the funnel of a question: it is reported, and what was measured before it stays
        section.notes.append(f"Not finished: {type(error).__name__}: {error}")
        report.keep(name, section)


def _stop(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt  # a throttled disk is unmounted and children end, as on Ctrl-C


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = dict.fromkeys([*QUESTIONS, *APART])
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="tiny states, one round: does every row work?")
    parser.add_argument("--folder", type=Path, default=Path.home(), help="a folder on the disk to measure (default: home)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results go")
    options = parser.parse_args()
    if unknown := set(options.questions) - set(names):
        parser.error(f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    torch.set_num_threads(1)  # measurements are forked from here: no thread pool may exist yet
    with tempfile.TemporaryDirectory(prefix="perdure-bench-", dir=options.folder) as folder:
        setting = Setting(Path(folder), options.quick)
        what = "-".join(options.questions) or "engine"
        engine = set(options.questions or ENGINE) <= set(ENGINE)
        title = "The checkpoint engine" if engine else what.replace("-", ", ").capitalize()
        report = Report(setting, options.results, f"quick-{what}" if options.quick else what, title=title, engine=engine)
        with contextlib.suppress(KeyboardInterrupt):  # what was measured so far is the answer
            for name in [one for asked in options.questions or ENGINE for one in APART.get(asked, (asked,))]:
                ask(name, setting, report)
    print(report.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
