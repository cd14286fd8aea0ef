"""The only door to the disk for what a run keeps: a file is there whole, or it is not there.

Order everywhere: temporary file beside the target, write, fsync, rename (or link), fsync the folder. Before each disk call
stands a fail point, so tests can kill the process or make the call fail at every one of them in turn (`PERDURE_FAIL`)."""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

FILE_MODE = 0o600
DIR_MODE = 0o700
Buffer = bytes | bytearray | memoryview
_STAGE = 8 << 20
"""Bytes gathered for one direct write: half as many are a third slower."""
_BLOCK = 4096
"""What direct writes must be multiples of."""
_stages: list[mmap.mmap] = []
"""Kept for the next file: fresh memory costs more than the write."""


class _FailPlan:
    """`PERDURE_FAIL=role:action:n[:repeat]`: in the process of that role, the n-th disk call (from 1) ends in SIGKILL
    (`kill`) or raises that errno (`ENOSPC`, `EIO`, ...); `repeat` makes all later ones fail too. For tests only."""

    def __init__(self, text: str) -> None:
        role, action, number, *rest = (text + ":::").split(":")
        self.role, self.action, self.number = role, action, int(number or 0)
        self.repeat = "repeat" in rest
        self._calls = itertools.count(1)  # next() of it is one step, whatever other threads do
        self.armed = False

    def step(self, call: str, target: str) -> None:
        now = next(self._calls)
        if now == self.number or (self.repeat and now > self.number):
            if self.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            code: int = getattr(errno, self.action)
            raise OSError(code, f"{os.strerror(code)} (fail point {now}: {call})", target)


_plan = _FailPlan(os.environ.get("PERDURE_FAIL", ""))


def set_role(role: str) -> None:
    """Name this process (`saver`, `agent`, `flow`, `rank`, `push`); arms a fail plan that is meant for it."""
    _plan.armed = bool(_plan.number) and _plan.role == role


def plan_failure(text: str) -> None:
    """Put another plan in the place of `PERDURE_FAIL`, unarmed and counting from 0; "" is none. For tests only."""
    global _plan
    _plan = _FailPlan(text)


def fail_point(call: str, target: str | Path) -> None:
    """Stands before every call that changes a disk or a store."""
    if _plan.armed:
        _plan.step(call, str(target))


def temporary_name(path: Path) -> Path:
    """Beside `path`, so that the rename stays on one file system; readers and `leftovers` know the shape."""
    unique = f"{os.getpid()}-{os.urandom(4).hex()}"  # on a shared folder another host's process may have our pid
    return path.with_name(f".{path.name}.{unique}.tmp")


def is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def fsync_dir(path: Path) -> None:
    fail_point("fsync_dir", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: Path) -> None:
    """Create `path` and its missing parents (0700), each made durable in its parent."""
    missing = []
    at = path
    while not at.is_dir():
        missing.append(at)
        at = at.parent
    for folder in reversed(missing):
        fail_point("mkdir", folder)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=DIR_MODE)
        fsync_dir(folder.parent)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Of a file that is open already, the system does not say which it was."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class NewFile:
    """A file being written under a temporary name; `commit` makes it appear, leaving without it removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        fail_point("open", path)
        self._fd, self._temporary = self._open()

    def _open(self) -> tuple[int, Path]:
        temporary = temporary_name(self.path)
        return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), temporary

    def write(self, data: Buffer) -> None:
        fail_point("write", self.path)
        view = memoryview(data).cast("B")
        with _named(self.path):
            while len(view):
                written = os.write(self._fd, view)
                self.size += written
                view = view[written:]

    def _make_durable(self) -> None:
        fail_point("fsync", self.path)
        with _named(self.path):
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1

    def commit(self, *, sync_folder: bool = True) -> None:
        """fsync, rename onto the final name, fsync the folder (or leave that to a later call on it)."""
        self._make_durable()
        fail_point("rename", self.path)
        os.replace(self._temporary, self.path)
        if sync_folder:
            fsync_dir(self.path.parent)

    def commit_if_absent(self) -> bool:
        """As `commit`, but never over an existing file: exactly one of several writers gets True."""
        self._make_durable()
        fail_point("link", self.path)
        try:
            os.link(self._temporary, self.path)
        except FileExistsError:
            return False
        finally:
            os.unlink(self._temporary)
        fsync_dir(self.path.parent)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)


class PackFile(NewFile):
    """A NewFile of many megabytes, written once from front to back, past the page cache where the file system can do that: the
    processor is left to the training, the user's cached data stays in memory, and the final fsync has nothing to wait for."""

    def __init__(self, path: Path) -> None:
        self._direct = True
        super().__init__(path)
        self._stage = _stages.pop() if _stages else mmap.mmap(-1, _STAGE)
        """Gathers what is to be written; aligned, and touched only once in the life of the process."""
        self._staged = 0

    def _open(self) -> tuple[int, Path]:
        temporary, flags = temporary_name(self.path), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(temporary, flags | os.O_DIRECT, FILE_MODE), temporary
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._direct = False
        return os.open(temporary, flags, FILE_MODE), temporary

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self.size += len(view)
        while len(view):
            piece = view[: _STAGE - self._staged]
            self._stage[self._staged : self._staged + len(piece)] = piece
            self._staged += len(piece)
            view = view[len(piece) :]
            if self._staged == _STAGE:
                self._write_out(_STAGE)
                self._staged = 0

    def _write_out(self, end: int, start: int = 0) -> None:
        fail_point("write", self.path)
        view = memoryview(self._stage)[start:end]
        while len(view):
            try:
                with _named(self.path):
                    view = view[os.write(self._fd, view) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._use_cache()  # blocks of this disk are larger than ours

    def _use_cache(self) -> None:
        self._direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def _make_durable(self) -> None:
        whole = self._staged // _BLOCK * _BLOCK
        if whole:
            self._write_out(whole)
        if self._staged > whole:
            self._use_cache()
            self._write_out(self._staged, whole)
        self._staged = 0
        super()._make_durable()

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        if not _stages:
            _stages.append(self._stage)


class PartFile(NewFile):
    """A file of `size` bytes that is put together in any order, by any threads. What a killed process wrote is `found` by the
    next one, for its temporary name is always the same, and one process at a time holds it."""

    def __init__(self, path: Path, size: int) -> None:
        self.found = self.kept = self._stays = False
        """`kept`: leaving without commit keeps what is there."""
        super().__init__(path)
        os.ftruncate(self._fd, size)
        self.size = size

    def _open(self) -> tuple[int, Path]:
        """Where another process is at work on it, or nothing can be locked, this one starts anew."""
        stable = self.path.with_name(f".{self.path.name}.partial.tmp")
        fd = os.open(stable, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            current = os.path.samestat(os.stat(stable), os.fstat(fd))  # else it was committed meanwhile
        except OSError:
            current = False
        if not current:
            os.close(fd)
            return super()._open()
        self.found, self._stays = os.fstat(fd).st_size > 0, True
        return fd, stable

    def read_at(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def write_at(self, offset: int, data: Buffer) -> None:
        fail_point("write", self.path)
        view = memoryview(data).cast("B")
        with _named(self.path):
            while len(view):
                written = os.pwrite(self._fd, view, offset)
                offset, view = offset + written, view[written:]

    def _make_durable(self) -> None:
        """Closed after the rename: nobody takes it over before."""
        fail_point("fsync", self.path)
        os.fsync(self._fd)
        self.kept = True

    def __exit__(self, *problem: object) -> None:
        if self.kept and self._stays:
            os.close(self._fd)
        else:
            super().__exit__(*problem)


def write_atomically(path: Path, data: Buffer | Iterable[Buffer]) -> None:
    with NewFile(path) as new:
        for part in [data] if isinstance(data, (bytes, bytearray, memoryview)) else data:
            new.write(part)
        new.commit()


def create_exclusively(path: Path, data: Buffer) -> bool:
    """Write `path` only if it does not exist; False when another writer was first."""
    with NewFile(path) as new:
        new.write(data)
        return new.commit_if_absent()


def publish(path: Path, data: Buffer) -> None:
    """Replace a small file that readers may see at any moment but that need not survive a power cut (no fsync)."""
    temporary = temporary_name(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def append(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Add `data` (whole lines) in one write; a torn last line left by a crash is closed off first."""
    fail_point("append", path)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # another's write is seen page by page: its middle must not be taken for a torn tail
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data
        os.write(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def replace(source: Path, target: Path) -> None:
    """Put a durable file in the place of another, durably; a reader of the old one keeps what it has open."""
    fail_point("rename", target)
    os.replace(source, target)
    fsync_dir(target.parent)


def link(source: Path, target: Path) -> None:
    """Give a file a second name (fine when it has it), durably."""
    fail_point("link", target)
    with contextlib.suppress(FileExistsError):
        os.link(source, target)
    fsync_dir(target.parent)


def remove(path: Path, *, durable: bool = True) -> None:
    """Remove a file (fine when it is gone) and make that durable, or leave that to a later call on its folder."""
    fail_point("unlink", path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        if durable:
            fsync_dir(path.parent)


def remove_tree(path: Path) -> None:
    fail_point("rmtree", path)
    shutil.rmtree(path, ignore_errors=False)
    fsync_dir(path.parent)


def read_limited(path: Path, limit: int) -> bytes:
    """The whole file; ValueError when it is larger than `limit` bytes (a hostile or foreign file)."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(size, limit) + 1)  # memory for all of `limit` would take longer than the reading
        if len(data) > size:  # it grows, or is no plain file
            data += file.read(limit + 1 - len(data))
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes")
    return data


@contextlib.contextmanager
def open_private(path: Path) -> Iterator[int]:
    """A descriptor for appending to a 0600 log file."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        yield fd
    finally:
        os.close(fd)
