"""Reading leaf after leaf while those that follow in the index are being decoded, in whatever order they are asked for."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from perdure.training.checkpoint.ordered import INLINE
from perdure.training.checkpoint.pack import BLOB_BYTES
from perdure.training.checkpoint.pieces import is_piece
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.checkpoint.room import Rooms

_AHEAD = 64 << 20
"""Raw bytes of leaves that are decoded before they are asked for."""


class _Coming(NamedTuple):
    """A leaf that threads work on: where it comes to lie, and its blobs on their way there."""

    out: memoryview
    blobs: list["Future[memoryview]"]


class ReadAhead:
    """`read` as that of the reader, which it does not close. Each leaf is best asked for once."""

    def __init__(self, reader: CheckpointReader, threads: int, rank: int = 0) -> None:
        self._reader, self._rank = reader, rank
        self._leaves = sorted(reader.state(rank).values(), key=lambda leaf: leaf[0])
        """Each with the rank in whose pack it is, pack by pack in the order of the index."""
        self._places = {entry.path: place for place, (_, entry) in enumerate(self._leaves)}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="perdure-read")
        self._coming: dict[int, _Coming] = {}
        self._rooms = Rooms()
        self._given: set[int] = set()
        self._ahead = 0
        """Bytes under way."""
        self._next: dict[int, int] = {}
        """In each pack the first leaf that was not looked at yet."""

    def read(self, path: str) -> memoryview:
        """All bytes of a leaf. Raises KeyError where there is none, CheckpointDamaged naming it where it is damaged."""
        place = self._places[path]
        if not self._is_worth_it(place):
            owner, entry = self._leaves[place]
            out = self._reader.room(entry, self._rooms)
            self._reader.read_into(path, out, owner)
            return out
        self._start(place)
        coming = self._coming.pop(place)
        self._given.add(place)
        self._ahead -= len(coming.out)
        self._look_ahead(place)
        for blob in coming.blobs:
            blob.result()
        return coming.out

    def _look_ahead(self, place: int) -> None:
        pack = self._leaves[place][0]
        at = max(self._next.get(pack, 0), place + 1)
        while self._ahead < _AHEAD and at < len(self._leaves) and self._leaves[at][0] == pack:
            if self._is_worth_it(at):
                self._start(at)
            at += 1
        self._next[pack] = at

    def _is_worth_it(self, place: int) -> bool:
        """Small leaves are read on the spot: handing them to a thread costs more. Others' pieces are hardly asked for."""
        pack, entry = self._leaves[place]
        ours = pack == self._rank or not is_piece(entry.path)
        return ours and entry.kind == "tensor" and entry.nbytes > INLINE and place not in self._given

    def _start(self, place: int) -> None:
        if place in self._coming:
            return
        owner, entry = self._leaves[place]
        out = self._reader.room(entry, self._rooms)
        parts = [out[start : start + BLOB_BYTES] for start in range(0, entry.nbytes, BLOB_BYTES)]
        blobs = [self._pool.submit(self._reader.blob, entry, number, owner, part) for number, part in enumerate(parts)]
        self._coming[place] = _Coming(out, blobs)
        self._ahead += entry.nbytes

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
