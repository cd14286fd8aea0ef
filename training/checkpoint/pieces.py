"""A tensor that ranks have cut among themselves: its pieces are leaves of their own, `PATH%at/33,0` for the one that begins
there. A path is a piece's by its name alone; pieces of one tensor tile it, or it is damaged."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from perdure.training.checkpoint.layout import ITEM_SIZES
from perdure.training.checkpoint.pack import IndexEntry
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.errors import CheckpointDamaged

_MARK = "%at/"
"""No other path has it: a `%` of a user's key is written `%25`."""


def piece_path(path: str, offsets: Sequence[int]) -> str:
    """Of the piece of `path` that begins at these offsets."""
    return f"{path}{_MARK}{','.join(map(str, offsets))}"


def is_piece(path: str) -> bool:
    return _MARK in path


def whole_path(path: str) -> str:
    """Of the tensor that a piece is of."""
    return path.partition(_MARK)[0]


class Piece(NamedTuple):
    rank: int
    """In whose pack it is."""
    entry: IndexEntry
    offsets: tuple[int, ...]


class Whole(NamedTuple):
    """A tensor and its pieces, by their place in it."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    @property
    def is_stack(self) -> bool:
        """Whether it is cut along its first dimension alone: then its bytes are those of the pieces one after the other."""
        return all(piece.entry.shape[1:] == self.shape[1:] for piece in self.pieces)

    def read(self, reader: CheckpointReader) -> memoryview:
        """All bytes, in C order. Raises CheckpointDamaged naming the piece that is."""
        return self.read_part(reader, (0,) * len(self.shape), self.shape)

    def read_part(self, reader: CheckpointReader, offsets: Sequence[int], shape: Sequence[int]) -> memoryview:
        """Bytes of the part of this shape that begins there; of the packs only the blobs with rows of it are read."""
        if not self.shape:
            [piece] = self.pieces
            return reader.read(piece.entry.path, piece.rank)
        out = np.empty((*shape, ITEM_SIZES[self.dtype]), np.uint8)
        for piece in self._around(offsets[0], offsets[0] + shape[0]):
            starts = [max(pair) for pair in zip(offsets, piece.offsets, strict=True)]
            ends = [min(pair) for pair in zip(_ends(offsets, shape), _ends(piece.offsets, piece.entry.shape), strict=True)]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                rows = _rows(reader, piece, starts[0] - piece.offsets[0], ends[0] - piece.offsets[0])
                out[_slices(starts, ends, offsets)] = rows[_slices(starts, ends, (starts[0], *piece.offsets[1:]))]
        return out.reshape(-1).data

    def _around(self, first: int, end: int) -> Sequence[Piece]:
        """Those with rows from `first` on, before `end`: pieces are in order of their rows, and cut at the same ones."""
        row = self.pieces[bisect_right(self.pieces, first, key=_row) - 1].offsets[0]
        return self.pieces[bisect_left(self.pieces, row, key=_row) : bisect_left(self.pieces, end, key=_row)]


def _row(piece: Piece) -> int:
    return piece.offsets[0]


def _ends(offsets: Sequence[int], shape: Sequence[int]) -> list[int]:
    return [start + size for start, size in zip(offsets, shape, strict=True)]


def _slices(starts: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """What lies between these, in a box that begins at `origin`."""
    return tuple(slice(start - zero, end - zero) for start, end, zero in zip(starts, ends, origin, strict=True))


def blobs_with(entry: IndexEntry, first: int, end: int) -> list[int]:
    """Numbers of the blobs that hold rows `first` to `end`."""
    row, found, at = entry.nbytes // entry.shape[0], [], 0
    for number, blob in enumerate(entry.blobs):
        if at < end * row and at + blob.raw > first * row:
            found.append(number)
        at += blob.raw
    return found


def _rows(reader: CheckpointReader, piece: Piece, first: int, end: int) -> np.ndarray[Any, Any]:
    """Rows `first` to `end` of a piece, the last dimension that of an item's bytes."""
    entry, numbers = piece.entry, blobs_with(piece.entry, first, end)
    row, before = entry.nbytes // entry.shape[0], sum(blob.raw for blob in entry.blobs[: numbers[0]])
    found = [np.frombuffer(reader.blob(entry, number, piece.rank), np.uint8) for number in numbers]
    data = found[0] if len(found) == 1 else np.concatenate(found)
    return data[first * row - before : end * row - before].reshape(end - first, *entry.shape[1:], ITEM_SIZES[entry.dtype])


def alone(rank: int, entry: IndexEntry) -> Whole:
    """A tensor that is not cut."""
    return Whole(entry.path, entry.dtype, entry.shape, (Piece(rank, entry, (0,) * len(entry.shape)),))


def wholes(reader: CheckpointReader) -> dict[str, Whole]:
    """Every tensor that is in pieces, by its path. Raises CheckpointDamaged where they do not tile it."""
    found: dict[str, dict[str, Piece]] = {}
    for rank in range(reader.ranks):
        for entry in reader.rank_entries(rank).values():
            path, mark, place = entry.path.partition(_MARK)
            pieces = found.setdefault(path, {}) if mark else {}
            if mark and place not in pieces:
                pieces[place] = Piece(rank, entry, _offsets(entry, place))
    return {path: _whole(path, [*pieces.values()]) for path, pieces in found.items()}


def _offsets(entry: IndexEntry, place: str) -> tuple[int, ...]:
    numbers = place.split(",") if place else []
    digits = "".join(numbers)
    if len(numbers) != len(entry.shape) or "" in numbers or (numbers and not (digits.isascii() and digits.isdigit())):
        raise CheckpointDamaged(f"{entry.path} is no name of a piece of {len(entry.shape)} dimensions", part=entry.path)
    return tuple(map(int, numbers))


def _whole(path: str, pieces: list[Piece]) -> Whole:
    kinds = {(entry.kind, entry.dtype, len(entry.shape)) for _, entry, _ in pieces}
    if len(kinds) != 1 or pieces[0].entry.kind != "tensor":
        raise CheckpointDamaged(f"pieces of {path} are of several types or numbers of dimensions", part=path)
    shape = _tiled([(offsets, entry.shape) for _, entry, offsets in pieces])
    if shape is None:
        raise CheckpointDamaged(f"pieces of {path} do not make up a tensor", part=path)
    return Whole(path, pieces[0].entry.dtype, shape, tuple(sorted(pieces, key=lambda piece: piece.offsets)))


def _tiled(pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, ...] | None:
    """Shape of what they tile as a grid: each dimension is cut at the same places everywhere. None where they do not."""
    edges = []
    for dimension in range(len(pieces[0][0])):
        starts = sorted({offsets[dimension] for offsets, _ in pieces})
        end = max(offsets[dimension] + shape[dimension] for offsets, shape in pieces)
        edges.append(dict(zip(starts, [*starts[1:], end], strict=True)))
    fits = all(edge[start] == start + size for one in pieces for edge, start, size in zip(edges, *one, strict=True))
    begins = all(0 in edge for edge in edges)
    whole = len({offsets for offsets, _ in pieces}) == len(pieces) == math.prod(map(len, edges))
    return tuple(max(edge.values()) for edge in edges) if fits and begins and whole else None
