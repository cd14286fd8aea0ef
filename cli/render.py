"""How things look: tables and progress on a terminal, aligned columns and single lines in a pipe or a log, without ANSI."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from perdure.training import amounts

size, age, counted = amounts.size, amounts.span, amounts.counted
RIGHT = (int, float)


def print_json(value: Mapping[str, Any]) -> None:  # Any: JSON values
    print(json.dumps(value, indent=2))


def visible(text: str) -> str:
    """Text from elsewhere (a user's error, a foreign file) for a terminal: control characters as escapes, lines kept."""
    if text.isprintable():
        return text
    return "\n".join(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in text.split("\n")
    )


def say(text: str) -> None:
    """Beside the answer: on standard error."""
    print(visible(text), file=sys.stderr, flush=True)


def when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Numbers to the right, texts to the left; a column that is empty everywhere is left out."""
    used = [index for index in range(len(columns)) if any(str(row[index]) for row in rows)]
    heads, body = [columns[index] for index in used], [[row[index] for index in used] for row in rows]
    right = [all(isinstance(row[index], RIGHT) for row in body) for index in range(len(used))]
    texts = [[visible(str(cell)) for cell in row] for row in body]
    if sys.stdout.isatty():
        _rich_table(heads, texts, right)
    else:
        _plain_table(heads, texts, right)


def _plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    widths = [max(len(heads[i]), *(len(row[i]) for row in rows)) if rows else len(heads[i]) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _rich_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for head, to_right in zip(heads, right, strict=True):
        shown.add_column(head, justify="right" if to_right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*[_colored(cell) for cell in row])
    Console().print(shown)


_COLORS = {
    "verified": "green",
    "replicated": "green",
    "archived": "green",
    "quarantined": "red",
    "written": "yellow",
    "good": "green",
    "damaged": "red",
}


def _colored(cell: str) -> Any:  # Any: rich is imported on terminals only
    from rich.text import Text

    return Text(cell, style=_COLORS.get(cell, ""))


class Progress:
    """Bytes done of a known total. On a terminal a bar with rate and time left; otherwise silent, since each item that is
    finished gets a line of its own. On standard error, so that standard output stays the result."""

    def __init__(self, label: str, total: int, *, quiet: bool = False) -> None:
        self.total = total
        self._bar: Any = None  # Any: rich is imported on terminals only
        if sys.stderr.isatty() and not quiet:
            self._start(label)

    def _start(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(label, total=self.total)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, done: int, total: int | None = None) -> None:
        """`done` bytes of `total` (or of the total given at first)."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total or self.total)
