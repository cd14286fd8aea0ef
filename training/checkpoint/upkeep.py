"""One at a time: whoever deletes checkpoints of a run, or rolls them up, holds this lock. Training never waits for it."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from perdure.training import files
from perdure.training.errors import RunBusy
from perdure.training.run_dir import RunDir

_REFUSED = (errno.EWOULDBLOCK, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
"""Held by another, or a file system without locks, on which nothing is ever deleted."""


@contextlib.contextmanager
def try_upkeep(run: RunDir) -> Iterator[bool]:
    """True while the lock is ours; False when somebody else works on this run's checkpoints."""
    with try_lock(run.upkeep_lock) as ours:
        yield ours


@contextlib.contextmanager
def try_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """True while the lock at `path` is ours; `wait` for whoever has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
    try:
        ours = _locked(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if ours:
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)  # for the message of whoever comes second
        yield ours
    finally:
        os.close(fd)


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return False
    return True


@contextlib.contextmanager
def await_upkeep(run: RunDir) -> Iterator[None]:
    """For a pull: nothing that it has just brought is deleted before the rest is there."""
    with try_lock(run.upkeep_lock, wait=True):
        yield


@contextlib.contextmanager
def upkeep(run: RunDir) -> Iterator[None]:
    """As `try_upkeep`, for a person: raises RunBusy naming the holder."""
    with try_upkeep(run) as ours:
        if not ours:
            holder = files.read_limited(run.upkeep_lock, 100).decode(errors="replace") or "another process"
            raise RunBusy(f"{run.root}: process {holder} deletes or rolls up checkpoints of this run", "wait until it is done")
        yield
