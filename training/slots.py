"""The slot: shared memory (a memfd) that holds one rank's snapshot, from which a checkpoint is written.

Layout: 64 bytes of control, the entries that hardly ever change (msgpack), the header (msgpack), then the data area at
`DATA_ALIGN`. A generation counter is raised before the copy (odd: being written) and after it (even: whole), so a snapshot torn
by a kill is recognised by anyone who maps it."""

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

CONTROL_BYTES = 64
DATA_ALIGN = 4096
HEADER_ROOM = 1 << 18
"""Bytes kept for the header, so that a longer one does not move the data area."""
_CONTROL = struct.Struct("<8sQQQQQ")  # magic, generation, step, bytes of fixed entries, header bytes, data offset
_GENERATION = struct.Struct("<8sQ")
_MAGIC = b"PRDSLOT2"


def aligned(size: int) -> int:
    return -(-size // DATA_ALIGN) * DATA_ALIGN


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
    milestone: str | msgspec.UnsetType = msgspec.UNSET
    """The name that the training code gave this checkpoint."""
    metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """The newest finite value of each name that it logged, loss and tokens apart."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    about: About
    entries: tuple[Entry, ...]
    """Those that are not among the fixed ones."""
    state_digest: str = ""
    """Of the live tensors, by the rank itself (`checkpoint.audit`)."""


_decode_entries = msgspec.msgpack.Decoder(tuple[Entry, ...]).decode


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """What `SlotWriter.begin` takes as `fixed`."""
    return msgspec.msgpack.encode(entries)


def data_offset(fixed: bytes, header_bytes: int = 0) -> int:
    """Where the data area begins behind these."""
    return aligned(CONTROL_BYTES + len(fixed) + max(HEADER_ROOM, header_bytes))


def slot_bytes(fixed: bytes, data_bytes: int) -> int:
    """Size of a slot that holds these, with the usual room for a header."""
    return data_offset(fixed) + aligned(data_bytes)


def create_slot(name: str) -> int:
    """A new empty memfd; whoever holds the descriptor keeps the snapshot alive."""
    fd = os.memfd_create(f"perdure-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, DATA_ALIGN)
    return fd


class SlotWriter:
    """The rank's side of one slot: `reserve`, `begin`, fill the data area, `finish`. Nobody reads between begin and finish."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.generation = 0
        self._fixed = b""
        self._data = 0

    def reserve(self, size: int) -> bool:
        """Grow to hold `size` bytes and touch them, so that no later copy pays for page faults. True when it grew."""
        if len(self.map) >= size:
            return False
        os.ftruncate(self._fd, aligned(size))  # the old mapping goes with the last view into it
        self.map = mmap.mmap(self._fd, aligned(size), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return True

    def begin(self, header: Header, data_bytes: int, fixed: bytes = b"") -> tuple[mmap.mmap, int]:
        """Mark the slot as being written; returns the mapping and the offset of the data area in it. The very same `fixed`
        object as last time is not written again."""
        text = msgspec.msgpack.encode(header)
        self.generation += 1 + self.generation % 2
        _GENERATION.pack_into(self.map, 0, _MAGIC, self.generation)
        if fixed is not self._fixed or CONTROL_BYTES + len(fixed) + len(text) > self._data:
            self._data = data_offset(fixed, len(text))
            self.reserve(self._data + aligned(data_bytes))
            self.map[CONTROL_BYTES : CONTROL_BYTES + len(fixed)] = fixed
            self._fixed = fixed
        self.reserve(self._data + data_bytes)
        start = CONTROL_BYTES + len(fixed)
        self.map[start : start + len(text)] = text
        _CONTROL.pack_into(self.map, 0, _MAGIC, self.generation, header.about.step, len(fixed), len(text), self._data)
        return self.map, self._data

    def finish(self) -> None:
        self.generation += 1
        struct.pack_into("<Q", self.map, 8, self.generation)


class Snapshot:
    """A whole snapshot, mapped for reading. `data(entry)` is valid until `close`."""

    def __init__(self, fd: int, space: mmap.mmap | None = None) -> None:
        """`space`: the slot's mapping where somebody keeps one."""
        self._map = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ) if space is None else space
        self._view = memoryview(self._map)
        magic, self.generation, self.step, fixed, header_bytes, self._data = _CONTROL.unpack_from(self._map, 0)
        self.header: Header | None = None
        self._fixed: tuple[Entry, ...] = ()
        if magic == _MAGIC and self.generation > 0 and self.generation % 2 == 0:
            start = CONTROL_BYTES + fixed
            with contextlib.suppress(msgspec.DecodeError):  # a rank that went mad wrote into it
                self._fixed = _decode_entries(self._view[CONTROL_BYTES:start]) if fixed else ()
                self.header = msgspec.msgpack.decode(self._view[start : start + header_bytes], type=Header)
        self.whole = self.header is not None

    @property
    def about(self) -> About:
        assert self.header is not None
        return self.header.about

    @property
    def entries(self) -> tuple[Entry, ...]:
        assert self.header is not None
        return self._fixed + self.header.entries

    def data(self, entry: Entry) -> memoryview:
        start = self._data + entry.offset
        return self._view[start : start + entry.nbytes]

    def close(self) -> None:
        self._view.release()
        del self._map  # unmapped, unless it is kept


class MappedSlots:
    """Keeps slots mapped between saves: reading a fresh mapping takes a tenth of the saver's time, in page faults."""

    def __init__(self) -> None:
        self._spaces: dict[int, mmap.mmap] = {}
        """By inode: the descriptor is another one each time."""

    def snapshot(self, fd: int) -> Snapshot:
        told = os.fstat(fd)
        space = self._spaces.get(told.st_ino)
        if space is None or len(space) != told.st_size:  # it has grown
            space = mmap.mmap(fd, told.st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
            self._spaces[told.st_ino] = space
        return Snapshot(fd, space)
