"""The spool: a run directory for checkpoints on their way from one place to another. Whoever uses it holds the archive lock."""

import contextlib
from collections.abc import Iterator

from perdure.training import files
from perdure.training.run_dir import RunDir


@contextlib.contextmanager
def spooled(run: RunDir) -> Iterator[RunDir]:
    """Empty at first; removed at the end, with what a killed one left."""
    clear(run)
    try:
        yield RunDir(run.spool)
    finally:
        clear(run)


def clear(run: RunDir) -> None:
    if run.spool.exists():
        files.remove_tree(run.spool)
