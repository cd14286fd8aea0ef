"""One measurement in a process of its own, forked so that the state is there already and every peer finds the same memory.

The parent watches the memory of the whole tree meanwhile. A measurement that fails or hangs gives its reason instead."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from perdure.training.process import die_with_parent

Values = dict[str, Any]  # Any: JSON values
THREADS = 2
_LIMIT = 300.0
_TICK = os.sysconf("SC_CLK_TCK")
_EVERY = 0.01
"""Seconds between two looks at memory."""


class Failed(Exception):
    """Why there is no figure."""


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found, waiting = [], [pid]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += map(int, path.read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of the tree, that of ended and reaped children included."""
    ticks = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICK


def _memory(pid: int) -> tuple[int, int]:
    """Anonymous and shared memory of one process, from its own counters (cheap: no page table is walked)."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                found[name] = int(rest.split()[0]) * 1024
    return found.get("RssAnon", 0), found.get("RssShmem", 0)


@dataclass
class _Watch:
    """Peak of (anonymous memory of the tree beyond what was forked) plus (shared memory, counted once)."""

    pid: int
    forked: int
    peak: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.wait(_EVERY):
            found = [_memory(pid) for pid in tree(self.pid)]
            self.peak = max(self.peak, sum(anon for anon, _ in found) - self.forked + max(shared for _, shared in found))


class Window:
    """What a child measures in: between `open` and `close` memory is watched, and CPU time is counted."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def open(self) -> None:
        self._pipe.send("open")
        self._pipe.recv()
        self._cpu = cpu_seconds(os.getpid())

    def close(self) -> float:
        """CPU seconds of this process and its descendants since `open`."""
        used = cpu_seconds(os.getpid()) - self._cpu
        self._pipe.send("close")
        return used


def _child(pipe: Connection, parent: int, work: Callable[[Window], Values]) -> None:
    import torch

    os.setsid()
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    torch.set_num_threads(THREADS)
    for stream in (1, 2):  # peers print and warn
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        pipe.send(work(Window(pipe)))
    except BaseException as error:  # the funnel of a measurement: any failure of a peer becomes a row that says why
        text = " ".join(str(error).split())
        pipe.send({"failed": f"{type(error).__name__}: {text[:300]}"})
    os._exit(0)  # whatever threads and daemons a peer left behind


def in_child(work: Callable[[Window], Values], limit: float = _LIMIT) -> Values:
    """What `work` returns, run in a forked process, with `peak` bytes of extra memory if it opened its window."""
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(there, os.getpid(), work))
    process.start()
    there.close()
    assert process.pid is not None
    try:
        return _listen(here, process.pid, time.monotonic() + limit)
    finally:
        for pid in reversed(tree(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.join()


def _listen(pipe: Connection, pid: int, end: float) -> Values:
    watch = _Watch(pid, _memory(pid)[0])
    thread = threading.Thread(target=watch.run)
    try:
        while pipe.poll(max(0.0, end - time.monotonic())):
            said = pipe.recv()
            if said == "open":
                thread.start()
                pipe.send("go")
            elif said == "close":
                watch.ended.set()
            else:
                return {**said, "peak": watch.peak} if thread.ident else dict(said)
        return {"failed": "no answer in time"}
    except EOFError:
        return {"failed": "the process died"}
    finally:
        watch.ended.set()
        if thread.ident:
            thread.join()


@contextlib.contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder, gone afterwards."""
    folder = parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        fsync_all(parent)  # the room is given back now, not within the next measurement


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


def fsync_all(folder: Path) -> None:
    """Every file and folder below and including this one."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(folder: Path) -> None:
    """Drop the page cache of these files, of nothing else."""
    fsync_all(folder)
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
