"""Reading leaf after leaf while those that follow in the index are being decoded, in whatever order they are asked for."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from perdure.training.checkpoint.ordered import INLINE
from perdure.training.checkpoint.pack import BLOB_BYTES, IndexEntry
from perdure.training.checkpoint.pieces import is_piece
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.checkpoint.room import Rooms

_AHEAD = 64 << 20
"""Raw bytes of leaves that are decoded before they are asked for."""


class _Coming(NamedTuple):
    """A leaf that threads work on: where it comes to lie, and its blobs on their way there."""

    out: memoryview
    blobs: list["Future[memoryview]"]


_Place = tuple[int, int]
"""A rank, and which leaf of its index."""


class ReadAhead:
    """`read` as that of the reader, which it does not close. Each leaf is best asked for once; no index is opened before."""

    def __init__(self, reader: CheckpointReader, threads: int, rank: int = 0) -> None:
        self._reader, self._rank = reader, rank
        self._leaves: dict[int, list[IndexEntry]] = {}
        """Of the ranks in whose packs something was read, in the order of the index."""
        self._numbers: dict[int, dict[str, int]] = {}
        """Where in that order each path is."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="perdure-read")
        self._coming: dict[_Place, _Coming] = {}
        self._rooms = Rooms()
        self._given: set[_Place] = set()
        self._ahead = 0
        """Bytes under way."""
        self._next: dict[int, int] = {}
        """In each pack the first leaf that was not looked at yet."""

    def read(self, path: str) -> memoryview:
        """All bytes of a leaf. Raises KeyError where there is none, CheckpointDamaged naming it where it is damaged."""
        place = self._find(path)
        if not self._is_worth_it(place):
            out = self._reader.room(self._entry(place), self._rooms)
            self._reader.read_into(path, out, place[0])
            return out
        self._start(place)
        coming = self._coming.pop(place)
        self._given.add(place)
        self._ahead -= len(coming.out)
        self._look_ahead(place)
        for blob in coming.blobs:
            blob.result()
        return coming.out

    def _find(self, path: str) -> _Place:
        owner = self._reader.find(path, self._rank)
        if owner not in self._leaves:
            self._leaves[owner] = list(self._reader.rank_entries(owner).values())
            self._numbers[owner] = {entry.path: number for number, entry in enumerate(self._leaves[owner])}
        return owner, self._numbers[owner][path]

    def _entry(self, place: _Place) -> IndexEntry:
        owner, number = place
        return self._leaves[owner][number]

    def _look_ahead(self, place: _Place) -> None:
        owner, number = place
        at = max(self._next.get(owner, 0), number + 1)
        while self._ahead < _AHEAD and at < len(self._leaves[owner]):
            if self._is_worth_it((owner, at)):
                self._start((owner, at))
            at += 1
        self._next[owner] = at

    def _is_worth_it(self, place: _Place) -> bool:
        """Small leaves are read on the spot: handing them to a thread costs more. What only others have is hardly asked for."""
        owner, entry = place[0], self._entry(place)
        ours = owner == self._rank or not (is_piece(entry.path) or entry.path in self._reader.rank_entries(self._rank))
        return ours and entry.kind == "tensor" and entry.nbytes > INLINE and place not in self._given

    def _start(self, place: _Place) -> None:
        if place in self._coming:
            return
        owner, entry = place[0], self._entry(place)
        out = self._reader.room(entry, self._rooms)
        parts = [out[start : start + BLOB_BYTES] for start in range(0, entry.nbytes, BLOB_BYTES)]
        blobs = [self._pool.submit(self._reader.blob, entry, number, owner, part) for number, part in enumerate(parts)]
        self._coming[place] = _Coming(out, blobs)
        self._ahead += entry.nbytes

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
