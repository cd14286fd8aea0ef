"""Holding a checkpoint while it is read or written against, so that nobody deletes it: a lock on its manifest.json.

Whoever deletes must hold it alone first. The kernel lets go of what a killed process held."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import MANIFEST

_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
"""A file system without locks: what lies there can be read, and is never deleted."""


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep the checkpoint from being deleted; any number may hold it. Waits for a deletion under way.

    Raises CheckpointNotFound when it is gone, CheckpointDamaged when its manifest is no file."""
    fd = open_held(folder)
    try:
        yield
    finally:
        let_go(fd)


@contextlib.contextmanager
def try_hold_alone(folder: Path) -> Iterator[bool]:
    """For deleting: True when nobody else holds it, and nobody can until this ends. False when somebody does, or it is gone."""
    try:
        fd = _locked(folder, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, CheckpointNotFound, CheckpointDamaged):
        yield False
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        yield False
        return
    try:
        yield True
    finally:
        let_go(fd)


def open_held(folder: Path) -> int:
    """`hold` by hand: a descriptor of the manifest, to be given to `let_go`."""
    try:
        return _locked(folder, os.O_RDONLY, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return _opened(folder, os.O_RDONLY)


def let_go(fd: int) -> None:
    """Unlock before closing: a child forked meanwhile has the same open file, which would stay locked while it lives."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _locked(folder: Path, mode: int, kind: int) -> int:
    """While we waited for the lock, the manifest may have been removed or replaced: the lock counts on what lies there now."""
    while True:
        fd = _opened(folder, mode)
        try:
            fcntl.flock(fd, kind)
            if is_current(fd, folder):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _opened(folder: Path, mode: int) -> int:
    try:
        fd = os.open(folder / MANIFEST, mode | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(folder / MANIFEST):
            raise _no_file(folder) from None
        raise CheckpointNotFound(f"{folder} holds no {MANIFEST}: there is no checkpoint of this name") from None
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise _no_file(folder) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_file(folder)
    return fd


def _no_file(folder: Path) -> CheckpointDamaged:
    return CheckpointDamaged(f"{folder}: manifest refused: {MANIFEST} is not a regular file", part="manifest")


def is_current(fd: int, folder: Path) -> bool:
    """Whether the manifest there is still the one of this descriptor: neither deleted nor replaced by a roll-up."""
    try:
        found = os.stat(folder / MANIFEST)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(fd))
