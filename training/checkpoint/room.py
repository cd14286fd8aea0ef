"""Memory for leaves that are read: aligned as tensors are, in pieces so large that the system can give it in huge pages."""

import numpy as np

ALIGNMENT = 64
_HUGE = 2 << 20
_SHARED = 16 << 20
"""Bytes of a piece that leaves share. It is given back when the last of them is gone."""


class Rooms:
    """Not for threads to share."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """Room for `size` bytes. Raises MemoryError."""
        if size >= _SHARED // 4:
            return _aligned(size, _HUGE)
        if len(self._rest) < size:
            self._rest = _aligned(_SHARED, _HUGE)
        room = self._rest[:size]
        self._rest = self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return room


def _aligned(size: int, step: int) -> memoryview:
    whole = np.empty(size + step, np.uint8)
    start = -whole.ctypes.data % step
    return whole[start : start + size].data
