"""What differs between two checkpoints, leaf by leaf and blob by blob: in memory are a few pieces of one blob at a time.

Leaves and blobs with equal digests are not read. Works on any two checkpoints: of one run, or of two."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from perdure.training.checkpoint.pack import IndexEntry
from perdure.training.checkpoint.plain import unpack_plain
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.checkpoint.restore import tensor_name
from perdure.training.checkpoint.widen import Values, distance, values_per_item, words_of

PIECE = 1 << 17
"""Numbers compared at once: what is made of them stays in the processor's cache."""
_SHOWN = 200
"""Characters of a plain value."""
Progress = Callable[[int, int], None]
"""Bytes compared, and bytes to compare."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value inside a plain leaf. None: not there."""

    key: str
    old: str | None
    new: str | None


@dataclass(frozen=True, kw_only=True)
class LeafDiff:
    path: str
    rank: int
    what: str
    """added, removed, retyped (another type or shape), changed (numbers of a tensor), values (of a plain leaf)."""
    old: str
    """Type and shape; empty where it was added."""
    new: str
    elements: int = 0
    differing: int = 0
    """Elements of other bits: -0.0 differs from 0.0, a NaN not from itself."""
    max_abs: float = 0.0
    """Over the elements that are finite in both."""
    rms: float = 0.0
    """Of the difference over all elements, those that are not finite left out."""
    not_finite: int = 0
    """Differing elements whose distance is none: a NaN or an infinity on one side or both."""
    values: tuple[Change, ...] = ()

    @property
    def share(self) -> float:
        return self.differing / self.elements if self.elements else 0.0


def diff(
    a: CheckpointReader, b: CheckpointReader, *, only: str | None = None, progress: Progress | None = None
) -> Iterator[LeafDiff]:
    """Every leaf that differs, by path and rank (0 for what all ranks have in common); `only` is a glob over dotted names or
    paths. Raises CheckpointDamaged where something that has to be read is damaged."""
    pairs = [pair for pair in _pairs(a, b, only) if pair.old is None or pair.new is None or not _same(pair.old, pair.new)]
    total, done = sum(_to_compare(pair) for pair in pairs), 0
    for pair in pairs:
        x, y = pair.old, pair.new
        told: dict[str, Any] = {"path": pair.path, "rank": pair.rank, "old": _type(x), "new": _type(y)}  # Any: of two types
        if x is None or y is None:
            yield LeafDiff(what="added" if x is None else "removed", **told)
        elif x.kind == y.kind == "plain":
            old, new = unpack_plain(a.read(x.path, pair.old_pack)), unpack_plain(b.read(y.path, pair.new_pack))
            yield LeafDiff(what="values", values=tuple(_changes(old, new, "")), **told)
        elif not _alike(x, y):
            yield LeafDiff(what="retyped", **told)
        else:
            yield _compare(a, b, pair, lambda count, done=done: _tell(progress, done + count, total))  # type: ignore[misc]  # a default binds `done`
            done += x.nbytes


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A leaf in both checkpoints, as far as it is there, and in which packs."""

    path: str
    rank: int
    old: IndexEntry | None
    old_pack: int
    new: IndexEntry | None
    new_pack: int


def _pairs(a: CheckpointReader, b: CheckpointReader, only: str | None) -> Iterator[_Pair]:
    """A leaf that is in one pack only is that of every rank, whichever pack it is."""
    old, new = _by_path(a, only), _by_path(b, only)
    for path in sorted(old.keys() | new.keys()):
        ours, theirs = old.get(path, {}), new.get(path, {})
        single = len(ours) <= 1 and len(theirs) <= 1
        for rank in (0,) if single else sorted(ours.keys() | theirs.keys()):
            (old_pack, x), (new_pack, y) = _of_rank(ours, rank), _of_rank(theirs, rank)
            yield _Pair(path=path, rank=rank, old=x, old_pack=old_pack, new=y, new_pack=new_pack)


def _by_path(reader: CheckpointReader, only: str | None) -> dict[str, dict[int, IndexEntry]]:
    found: dict[str, dict[int, IndexEntry]] = {}
    for rank in range(reader.ranks):
        for path, entry in reader.rank_entries(rank).items():
            if only is None or fnmatchcase(tensor_name(path), only) or fnmatchcase(path, only):
                found.setdefault(path, {})[rank] = entry
    return found


def _of_rank(packs: Mapping[int, IndexEntry], rank: int) -> tuple[int, IndexEntry | None]:
    pack = next(iter(packs)) if len(packs) == 1 else rank
    return pack, packs.get(pack)


def _to_compare(pair: _Pair) -> int:
    return pair.old.nbytes if pair.old is not None and pair.new is not None and _alike(pair.old, pair.new) else 0


def _same(x: IndexEntry, y: IndexEntry) -> bool:
    return _alike(x, y) and x.digest == y.digest


def _alike(x: IndexEntry, y: IndexEntry) -> bool:
    return (x.kind, x.dtype, x.shape) == (y.kind, y.dtype, y.shape)


def _type(entry: IndexEntry | None) -> str:
    if entry is None:
        return ""
    return "plain" if entry.kind == "plain" else f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"


# tensors


class _Sum:
    """Gathers distances: the largest, and the root of the mean square, scaled so that no square overflows."""

    def __init__(self) -> None:
        self.differing = self.not_finite = 0
        self.largest = self._squares = 0.0

    def add(self, found: Values, bits_differ: Any) -> None:  # Any: an array of bool
        self.differing += int(np.count_nonzero(bits_differ))
        finite = found[np.isfinite(found)]
        self.not_finite += len(found) - len(finite)
        largest = float(finite.max(initial=0.0))
        if largest > self.largest:
            self._squares *= (self.largest / largest) ** 2
            self.largest = largest
        if self.largest:
            self._squares += float(np.sum((finite / self.largest) ** 2))

    def rms(self, elements: int) -> float:
        return self.largest * math.sqrt(self._squares / elements) if elements else 0.0


def _compare(a: CheckpointReader, b: CheckpointReader, pair: _Pair, progress: Callable[[int], None]) -> LeafDiff:
    entry, new, gathered, done = pair.old, pair.new, _Sum(), 0
    assert entry is not None
    assert new is not None
    for number, (x, y) in enumerate(zip(entry.blobs, new.blobs, strict=True)):
        if x.digest != y.digest:
            one, other = a.blob(entry, number, pair.old_pack), b.blob(new, number, pair.new_pack)
            _add_blob(gathered, words_of(one, entry.dtype), words_of(other, entry.dtype), entry.dtype)
        done += x.raw
        progress(done)
    elements = math.prod(entry.shape) * values_per_item(entry.dtype)
    return LeafDiff(
        path=entry.path, rank=pair.rank, what="changed", old=_type(entry), new=_type(new), elements=elements,
        differing=gathered.differing, max_abs=gathered.largest, rms=gathered.rms(elements - gathered.not_finite),
        not_finite=gathered.not_finite,
    )  # fmt: skip


def _add_blob(gathered: _Sum, old: Any, new: Any, dtype: str) -> None:  # Any: words of the type's width
    for start in range(0, len(old), PIECE):
        x, y = old[start : start + PIECE], new[start : start + PIECE]
        bits = x != y
        if bits.ndim > 1:
            bits = bits.any(axis=1)
        if bits.any():  # where the bits are equal there is no distance, NaN or not
            gathered.add(distance(x[bits], y[bits], dtype), bits)


# plain leaves


def _changes(old: Any, new: Any, key: str) -> Iterator[Change]:  # Any: plain values
    """Where two plain values differ, by the path of keys that leads there."""
    if type(old) is type(new) and isinstance(old, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _member(old.get(name, _ABSENT), new.get(name, _ABSENT), f"{key}/{name}" if key else f"{name}")
        if list(old) != list(new) and set(old) == set(new):
            yield Change(key=f"{key} (order of keys)", old=_shown(list(old)), new=_shown(list(new)))
    elif type(old) is type(new) and isinstance(old, list | tuple):
        for number in range(max(len(old), len(new))):
            x, y = (value[number] if number < len(value) else _ABSENT for value in (old, new))
            yield from _member(x, y, f"{key}/{number}" if key else f"{number}")
    elif type(old) is not type(new) or _text(old) != _text(new):
        yield Change(key=key, old=_shown(old), new=_shown(new))


_ABSENT = object()


def _member(old: Any, new: Any, key: str) -> Iterator[Change]:  # Any: plain values, or _ABSENT
    if old is _ABSENT or new is _ABSENT:
        yield Change(key=key, old=None if old is _ABSENT else _shown(old), new=None if new is _ABSENT else _shown(new))
    else:
        yield from _changes(old, new, key)


def _text(value: Any) -> str:  # Any: plain values
    """As Python writes it, sets in a fixed order."""
    return f"{type(value).__name__}({sorted(map(repr, value))})" if isinstance(value, set | frozenset) else repr(value)


def _shown(value: Any) -> str:  # Any: plain values
    text = _text(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
