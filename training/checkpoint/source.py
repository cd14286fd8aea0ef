"""Where the files of a checkpoint are read from. A folder's stay held and open while they are read."""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.hold import is_current, let_go, open_held
from perdure.training.checkpoint.manifest import Manifest

_OPEN_FILES = 32
"""Of one checkpoint at a time: with thousands of ranks, all of them would be more than a process may have."""


class Extent(NamedTuple):
    """Bytes of a pack."""

    file: str
    offset: int
    length: int


class ByteSource(Protocol):
    """Where packs and indexes lie: a folder, or a store. Threads may share one."""

    def size(self, file: str) -> int | None: ...

    def expect(self, extents: Iterable[Extent]) -> None:
        """These will be read, about in the order in which they lie."""
        ...

    def read(self, file: str, offset: int, length: int) -> bytes: ...
    def read_into(self, file: str, offset: int, out: memoryview) -> int: ...

    def distrust(self, file: str) -> bool:
        """What was read of it is damaged: True where it will be read elsewhere from now on."""
        ...

    def close(self) -> None: ...


class FolderSource:
    """The files of one checkpoint folder; links are not followed. `held` is the descriptor that holds the checkpoint."""

    def __init__(self, folder: Path, held: int = -1) -> None:
        self._folder, self._held = folder, held
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def keep_open(self, names: list[str]) -> None:
        """Open these now, as many as may be, so that a roll-up cannot take them from under a reader."""
        for name in names[:_OPEN_FILES]:
            with contextlib.suppress(OSError), self._lock:  # missing or no file: said where it is needed
                self._fd(name)

    def _fd(self, file: str) -> int:
        """The lock is held."""
        if file not in self._open:
            fd = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise FileNotFoundError(errno.ENOENT, "not a regular file", str(self._folder / file))
            while len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = fd
        return self._open[file]

    def expect(self, extents: Iterable[Extent]) -> None:
        """Nothing to do: the kernel reads ahead."""

    def size(self, file: str) -> int | None:
        try:
            with self._lock:
                return os.fstat(self._fd(file)).st_size
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                return None
            raise  # no right to read, say: says nothing about the copy

    def read(self, file: str, offset: int, length: int) -> bytes:
        out = bytearray(length)
        return bytes(memoryview(out)[: self.read_into(file, offset, memoryview(out))])

    def read_into(self, file: str, offset: int, out: memoryview) -> int:
        """How many bytes there were, at most as many as `out` has."""
        with self._lock:
            fd = os.dup(self._fd(file))  # of our own: another thread may close the oldest meanwhile
        try:
            return os.preadv(fd, [out], offset)
        except OSError as error:
            if error.errno == errno.EIO:
                return 0  # a bad sector is damage of what lies there; the digests say of what
            raise
        finally:
            os.close(fd)

    def distrust(self, file: str) -> bool:
        return False

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        if self._held >= 0:
            let_go(self._held)
            self._held = -1


def open_folder(folder: Path) -> tuple[Manifest, FolderSource]:
    """Hold a checkpoint, read its manifest, open its files. Raises CheckpointNotFound, CheckpointDamaged."""
    while True:
        source = FolderSource(folder, held := open_held(folder))
        try:
            manifest = manifests.read_held(held, folder)
            source.keep_open([record.name for record in manifest.files])
            if is_current(held, folder):
                return manifest, source
        except BaseException:
            source.close()
            raise
        source.close()  # rolled up between reading the manifest and opening its files: those may be gone
