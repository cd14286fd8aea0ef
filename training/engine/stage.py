"""Staging: one copy of every leaf of the state into a slot, at memory speed. The step pays for this copy and nothing else.

What does not change from save to save (paths, offsets, views into the slots) is made once."""

import math
import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import is_

import torch

from perdure.training import files
from perdure.training.engine import device, host_memory
from perdure.training.engine.leaves import Leaf
from perdure.training.slots import About, Entry, Header, SlotWriter, data_offset, encode_entries, slot_bytes

_ALIGN = 64
_PLAIN_ROOM = 1 << 20
"""Bytes by which plain leaves may grow without the slot growing."""


@dataclass(eq=False)
class _Layout:
    """Where the tensors of one shape of state go; reused while nothing but values changes."""

    key: list[tuple[str, str, tuple[int, ...]]]
    entries: tuple[Entry, ...]
    data_bytes: int
    fixed: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.fixed = encode_entries(self.entries)


def _lay_out(leaves: Sequence[Leaf], start: int) -> tuple[tuple[Entry, ...], int]:
    """Entries with their offsets, from `start`; and where they end."""
    offset, entries = start, []
    for leaf in leaves:
        size = leaf.value.nbytes if isinstance(leaf.value, torch.Tensor) else len(leaf.value)
        entries.append(Entry(path=leaf.path, kind=leaf.kind, dtype=leaf.dtype, shape=leaf.shape, offset=offset, nbytes=size))
        offset += -(-size // _ALIGN) * _ALIGN
    return tuple(entries), offset


@dataclass(eq=False)
class Staging:
    """A snapshot under way: its slot is marked, its tensors are yet to be copied."""

    slot: SlotWriter
    paths: list[str]
    values: list[torch.Tensor]
    targets: list[torch.Tensor]

    def copy(self, chosen: Collection[int] | None = None) -> device.Copies:
        """Copy these tensors (all by default); on a device it only begins, until `wait` of what is returned."""
        files.fail_point("copy", self.paths[0] if self.paths else "")
        if chosen is None:
            return device.copy(self.targets, self.values)
        return device.copy([self.targets[index] for index in chosen], [self.values[index] for index in chosen])

    def finish(self) -> None:
        """Everything is there: the snapshot is whole."""
        self.slot.finish()


class Stager:
    """Copies into slots. Keeps the layout, and the destination views of each slot, between saves."""

    def __init__(self, slots: Sequence[SlotWriter]) -> None:
        self._slots = slots
        self._layout: _Layout | None = None
        self._leaves: list[Leaf] = []
        """Those of the layout, when they were last looked at."""
        self._views: dict[int, tuple[_Layout, mmap.mmap, int, list[torch.Tensor]]] = {}

    def prepare(self, leaves: Sequence[Leaf]) -> int:
        """Size and touch every slot ahead of a save; how many bytes the state has. Raises ConfigError without the memory."""
        layout = self._lay_out_tensors([leaf for leaf in leaves if leaf.kind == "tensor"])
        _, end = _lay_out([leaf for leaf in leaves if leaf.kind == "plain"], layout.data_bytes)
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
        tensors, plain = [leaf for leaf in leaves if leaf.kind == "tensor"], [leaf for leaf in leaves if leaf.kind == "plain"]
        layout, slot = self._lay_out_tensors(tensors), self._slots[number]
        entries, end = _lay_out(plain, layout.data_bytes)
        self._reserve([number], slot_bytes(layout.fixed, end))  # before the mark: refused, the old snapshot stays whole
        header = Header(about=about, entries=entries, state_digest=state_digest)
        space, base = slot.begin(header, end, layout.fixed)
        for leaf, entry in zip(plain, entries, strict=True):
            if isinstance(leaf.value, bytes):
                space[base + entry.offset : base + entry.offset + entry.nbytes] = leaf.value
        values = [leaf.value for leaf in tensors if isinstance(leaf.value, torch.Tensor)]
        return Staging(slot, [path for path, _, _ in layout.key], values, self._targets(number, layout, space, base))

    def _reserve(self, numbers: Collection[int], size: int) -> None:
        growing = [self._slots[number] for number in numbers if len(self._slots[number].map) < size]
        if growing:
            host_memory.require(sum(size - len(slot.map) for slot in growing), size)
        for slot in growing:
            device.release(slot.map)
            slot.reserve(size)
            device.pin(slot.map)

    def _lay_out_tensors(self, tensors: list[Leaf]) -> _Layout:
        if len(tensors) == len(self._leaves) and all(map(is_, tensors, self._leaves)) and self._layout is not None:
            return self._layout
        self._leaves = tensors
        key = [(leaf.path, leaf.dtype, leaf.shape) for leaf in tensors]
        if self._layout is None or self._layout.key != key:
            self._layout = _Layout(key, *_lay_out(tensors, 0))
        return self._layout

    def _targets(self, number: int, layout: _Layout, space: mmap.mmap, base: int) -> list[torch.Tensor]:
        known = self._views.get(number)
        if known is not None and known[0] is layout and known[1] is space and known[2] == base:
            return known[3]
        views = [_view(space, base, entry) for entry in layout.entries]
        self._views[number] = (layout, space, base, views)
        return views


def _view(space: mmap.mmap, base: int, entry: Entry) -> torch.Tensor:
    dtype, count = getattr(torch, entry.dtype), math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(space, dtype=dtype, count=count, offset=base + entry.offset).view(entry.shape)
