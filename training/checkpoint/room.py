"""Memory for leaves that are read, aligned as tensors are; and memory for what is only passed through.

Leaves are not put together until huge pages can hold them (NumPy asks for those from 4 MiB on): to a virtual machine that gives
free memory back to its host, 0.4 GB of huge pages cost a second of system time, of small ones, which it had kept, 0.2 s."""

import threading

import numpy as np

ALIGNMENT = 64
_SHARED = 1 << 16
"""Bytes of a piece that small leaves share. It is given back when the last of them is gone."""
_local = threading.local()


class Rooms:
    """Not for threads to share."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """Room for `size` bytes. Raises MemoryError."""
        if size >= _SHARED // 4:
            return _aligned(size)
        if len(self._rest) < size:
            self._rest = _aligned(_SHARED)
        room = self._rest[:size]
        self._rest = self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return room


def _aligned(size: int) -> memoryview:
    whole = np.empty(size + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + size].data


def scratch(size: int, use: str) -> memoryview:
    """Memory of this thread's own, until it asks for the same use again: new memory costs more, in page faults, than what is
    done in it."""
    known: memoryview = getattr(_local, use, memoryview(b""))
    if len(known) < size:
        known = np.empty(size, np.uint8).data
        setattr(_local, use, known)
    return known[:size]
