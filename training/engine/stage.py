"""Staging: one copy of every leaf of the state into a slot, at memory speed. The step pays for this copy and nothing else.

What does not change from save to save (paths, offsets, views into the slots) is made once."""

import math
import mmap
from bisect import bisect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import NamedTuple

import torch

from perdure.training import files
from perdure.training.engine import device, host_memory
from perdure.training.engine.leaves import Leaf
from perdure.training.slots import About, Entry, Header, SlotWriter, data_offset, encode_entries, slot_bytes

_ALIGN = 64
_PLAIN_ROOM = 1 << 20
"""Bytes by which plain leaves may grow without the slot growing."""
_BATCH = 1 << 15
"""Elements below which torch joins tensors in one go, where copying each would cost more for the call than for its bytes."""
_SMALL = _BATCH // 8
"""Elements up to which a tensor is copied along with others of its type and shape."""


@dataclass(eq=False)
class _Layout:
    """Where the tensors of one shape of state go; reused while nothing but values changes."""

    key: list[tuple[str, str, tuple[int, ...]]]
    entries: tuple[Entry, ...]
    data_bytes: int
    alike: list[list[int]]
    """Numbers of the tensors that lie side by side."""
    fixed: bytes = field(init=False)
    paths: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.fixed = encode_entries(self.entries)
        self.paths = [entry.path for entry in self.entries]


def _lay_out(leaves: Sequence[Leaf], start: int) -> tuple[tuple[Entry, ...], int, list[list[int]]]:
    """Entries with their offsets, from `start`; where they end; and which were put side by side, with nothing between them:
    small tensors of one type and shape."""
    sizes = [leaf.value.nbytes if isinstance(leaf.value, torch.Tensor) else len(leaf.value) for leaf in leaves]
    alike: dict[object, list[int]] = {}
    for at, leaf in enumerate(leaves):
        small = isinstance(leaf.value, torch.Tensor) and 0 < leaf.value.numel() <= _SMALL
        alike.setdefault((leaf.dtype, leaf.shape) if small else at, []).append(at)
    offsets, end = [0] * len(leaves), start
    for together in alike.values():
        for at in together:
            offsets[at] = end
            end += sizes[at]
        end = -(-end // _ALIGN) * _ALIGN
    entries = tuple(
        Entry(path=leaf.path, kind=leaf.kind, dtype=leaf.dtype, shape=leaf.shape, offset=offset, nbytes=size)
        for leaf, offset, size in zip(leaves, offsets, sizes, strict=True)
    )
    return entries, end, list(alike.values())


class _Target(NamedTuple):
    """Where a tensor goes; or several small ones of one type and shape, one after the other."""

    numbers: list[int]
    space: torch.Tensor
    """Of several, it has one more dimension than they."""


@dataclass(eq=False)
class Staging:
    """A snapshot under way: its slot is marked, its tensors are yet to be copied."""

    slot: SlotWriter
    paths: list[str]
    values: list[torch.Tensor]
    targets: list[_Target]

    def copy(self, chosen: Collection[int] | None = None) -> device.Copies:
        """Copy these tensors (all by default); on a device it only begins, until `wait` of what is returned."""
        return device.copy(*self._pairs(chosen))

    def copy_quietly(self, chosen: Collection[int]) -> None:
        """Copy these tensors, which are on the CPU, in another thread than the trainer's."""
        device.copy_quietly(*self._pairs(chosen))

    def _pairs(self, chosen: Collection[int] | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where to copy what; small ones are copied already."""
        files.fail_point("copy", self.paths[0] if self.paths else "")
        wanted = None if chosen is None else set(chosen)
        spaces, sources = [], []
        for numbers, space in self.targets:
            if wanted is not None and wanted.isdisjoint(numbers):
                continue
            values = [self.values[number] for number in numbers]
            several = len(numbers) > 1
            if several and (wanted is None or wanted.issuperset(numbers)) and device.join(space, values):
                continue
            for number, value, part in zip(numbers, values, space if several else [space], strict=True):
                if wanted is None or number in wanted:
                    spaces.append(part)
                    sources.append(value)
        return spaces, sources

    def finish(self) -> None:
        """Everything is there: the snapshot is whole."""
        self.slot.finish()


class Stager:
    """Copies into slots. Keeps the layout, and the destination views of each slot, between saves."""

    def __init__(self, slots: Sequence[SlotWriter]) -> None:
        self._slots = slots
        self._layout: _Layout | None = None
        self._seen: list[Leaf] = []
        """All that were last looked at; the tensors among them, and where the others stand."""
        self._values: list[torch.Tensor] = []
        self._plain_at: list[int] = []
        self._views: dict[int, tuple[_Layout, mmap.mmap, int, list[_Target]]] = {}

    def prepare(self, leaves: Sequence[Leaf]) -> int:
        """Size and touch every slot ahead of a save; how many bytes the state has. Raises ConfigError without the memory."""
        layout, plain = self._look_at(leaves)
        _, end, _ = _lay_out(plain, layout.data_bytes)
        self._reserve(range(len(self._slots)), slot_bytes(layout.fixed, end + _PLAIN_ROOM))
        for number, slot in enumerate(self._slots):
            self._targets(number, layout, slot.map, data_offset(layout.fixed))
        return end

    def copy(self, number: int, leaves: Sequence[Leaf], about: About, state_digest: str = "") -> None:
        """Fill slot `number` with a whole snapshot of `leaves`. Values are copied, never referenced."""
        staging = self.begin(number, leaves, about, state_digest)
        staging.copy().wait()
        staging.finish()

    def begin(self, number: int, leaves: Sequence[Leaf], about: About, state_digest: str = "") -> Staging:
        """Mark slot `number` and write all but the tensors into it; the caller copies them, then finishes."""
        (layout, plain), slot = self._look_at(leaves), self._slots[number]
        entries, end, _ = _lay_out(plain, layout.data_bytes)
        self._reserve([number], slot_bytes(layout.fixed, end))  # before the mark: refused, the old snapshot stays whole
        header = Header(about=about, entries=entries, state_digest=state_digest)
        space, base = slot.begin(header, end, layout.fixed)
        for leaf, entry in zip(plain, entries, strict=True):
            if isinstance(leaf.value, bytes):
                space[base + entry.offset : base + entry.offset + entry.nbytes] = leaf.value
        return Staging(slot, layout.paths, list(self._values), self._targets(number, layout, space, base))

    def _reserve(self, numbers: Collection[int], size: int) -> None:
        growing = [self._slots[number] for number in numbers if len(self._slots[number].map) < size]
        if growing:
            host_memory.require(sum(size - len(slot.map) for slot in growing), size)
        for slot in growing:
            device.release(slot.map)
            slot.reserve(size)
            device.pin(slot.map)

    def _look_at(self, leaves: Sequence[Leaf]) -> tuple[_Layout, list[Leaf]]:
        """The layout of the tensors among them, and those that are plain. The very leaves of last time are not looked into."""
        if self._layout is None or not self._take_over(leaves):
            tensors = [leaf for leaf in leaves if leaf.kind == "tensor"]
            self._values = [leaf.value for leaf in tensors if isinstance(leaf.value, torch.Tensor)]
            self._plain_at = [at for at, leaf in enumerate(leaves) if leaf.kind == "plain"]
            key = [(leaf.path, leaf.dtype, leaf.shape) for leaf in tensors]
            if self._layout is None or self._layout.key != key:
                self._layout = _Layout(key, *_lay_out(tensors, 0))
        self._seen = list(leaves)
        return self._layout, [leaves[at] for at in self._plain_at]

    def _take_over(self, leaves: Sequence[Leaf]) -> bool:
        """Use these where nothing but values differs from last time; else False."""
        if len(leaves) != len(self._seen):
            return False
        for at in [at for at, same in enumerate(map(is_, leaves, self._seen)) if not same]:
            new, old = leaves[at], self._seen[at]
            if isinstance(new.value, torch.Tensor) and (new.path, new.dtype, new.shape) == (old.path, old.dtype, old.shape):
                self._values[at - bisect(self._plain_at, at)] = new.value
            elif not new.kind == old.kind == "plain":
                return False
        return True

    def _targets(self, number: int, layout: _Layout, space: mmap.mmap, base: int) -> list[_Target]:
        known = self._views.get(number)
        if known is not None and known[0] is layout and known[1] is space and known[2] == base:
            return known[3]
        views = list(_views(space, base, layout))
        self._views[number] = (layout, space, base, views)
        return views


def _views(space: mmap.mmap, base: int, layout: _Layout) -> Iterator[_Target]:
    """Where the tensors go. All of a type have one storage, which copies find in the processor's cache."""
    whole: dict[str, torch.Tensor] = {}
    for together in layout.alike:
        entry = layout.entries[together[0]]
        dtype, count = getattr(torch, entry.dtype), math.prod(entry.shape)
        if entry.dtype not in whole:
            whole[entry.dtype] = torch.frombuffer(space, dtype=dtype, count=(len(space) - base) // dtype.itemsize, offset=base)
        first, step = entry.offset // dtype.itemsize, max(1, (_BATCH - 1) // max(1, count))
        for start in range(0, len(together), step):
            numbers = together[start : start + step]
            at = first + start * count
            shape = entry.shape if len(numbers) == 1 else (len(numbers), *entry.shape)
            yield _Target(numbers, whole[entry.dtype][at : at + len(numbers) * count].view(shape))
