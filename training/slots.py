"""The slot: shared memory (a memfd) that holds one rank's snapshot, from which a checkpoint is written.

Layout: 64 bytes of control, the msgpack header, then the data area at `DATA_ALIGN`. A generation counter is raised before
the copy (odd: being written) and after it (even: whole), so a snapshot torn by a kill is recognised by anyone who maps it."""

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

CONTROL_BYTES = 64
DATA_ALIGN = 4096
_CONTROL = struct.Struct("<8sQQQQ")  # magic, generation, step, header bytes, data offset
_MAGIC = b"PRDSLOT1"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One leaf of the state. `kind` is `tensor` (little-endian, C order) or `plain` (typed msgpack, see docs/format.md)."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes into the data area."""
    nbytes: int


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank says of a snapshot; it goes into the manifest as it is."""

    step: int
    world: dict[str, Any]  # Any in this class: plain JSON values
    data: dict[str, Any]
    """Position in samples, epoch, batch geometry."""
    environment: dict[str, Any]
    """Versions, thread counts, determinism flags, devices."""
    code: dict[str, Any]
    """Commit, dirty."""
    config: dict[str, Any]
    """The settings that change the trajectory."""
    loss: dict[str, Any]
    exact: bool = True
    exact_reasons: tuple[str, ...] = ()


class Header(msgspec.Struct, frozen=True, kw_only=True):
    about: About
    entries: tuple[Entry, ...]


def create_slot(name: str) -> int:
    """A new empty memfd; whoever holds the descriptor keeps the snapshot alive."""
    fd = os.memfd_create(f"perdure-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, DATA_ALIGN)
    return fd


def aligned(size: int) -> int:
    return -(-size // DATA_ALIGN) * DATA_ALIGN


class SlotWriter:
    """The rank's side of one slot: `reserve`, `begin`, fill `data`, `finish`. Nobody reads between begin and finish."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.generation = 0

    def reserve(self, size: int) -> bool:
        """Grow to hold `size` bytes and touch them, so that no later copy pays for page faults. True when it grew."""
        if len(self._map) >= size:
            return False
        os.ftruncate(self._fd, aligned(size))  # the old mapping goes with the last view into it
        self._map = mmap.mmap(self._fd, aligned(size), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return True

    def begin(self, header: Header, data_bytes: int) -> tuple[mmap.mmap, int]:
        """Mark the slot as being written; returns the mapping and the offset of the data area in it."""
        text = msgspec.msgpack.encode(header)
        data = aligned(CONTROL_BYTES + len(text))
        self.reserve(data + data_bytes)
        self.generation += 1 + self.generation % 2
        _CONTROL.pack_into(self._map, 0, _MAGIC, self.generation, header.about.step, len(text), data)
        self._map[CONTROL_BYTES : CONTROL_BYTES + len(text)] = text
        return self._map, data

    def finish(self) -> None:
        self.generation += 1
        struct.pack_into("<Q", self._map, 8, self.generation)


class Snapshot:
    """A whole snapshot, mapped for reading. `data(entry)` is valid until `close`."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._view = memoryview(self._map)
        magic, self.generation, self.step, header_bytes, self._data = _CONTROL.unpack_from(self._map, 0)
        self.whole = magic == _MAGIC and self.generation > 0 and self.generation % 2 == 0
        self.header: Header | None = None
        if self.whole:
            self.header = msgspec.msgpack.decode(self._view[CONTROL_BYTES : CONTROL_BYTES + header_bytes], type=Header)

    @property
    def about(self) -> About:
        assert self.header is not None
        return self.header.about

    @property
    def entries(self) -> Sequence[Entry]:
        assert self.header is not None
        return self.header.entries

    def data(self, entry: Entry) -> memoryview:
        start = self._data + entry.offset
        return self._view[start : start + entry.nbytes]

    def close(self) -> None:
        self._view.release()
        self._map.close()
