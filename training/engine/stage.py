"""Staging: one copy of every leaf of the state into a slot, at memory speed. The step pays for this copy and nothing else."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perdure.training.engine.leaves import Leaf
from perdure.training.slots import About, Entry, Header, SlotWriter

_ALIGN = 64


@dataclass
class _Layout:
    """Where the leaves of one shape of state go; reused while nothing but values changes."""

    entries: tuple[Entry, ...]
    data_bytes: int


def lay_out(leaves: Sequence[Leaf]) -> _Layout:
    """Assign offsets: tensors first (theirs never move from save to save), then plain leaves, whose sizes vary."""
    offset, entries = 0, []
    for leaf in leaves:
        nbytes = _nbytes(leaf)
        entries.append(
            Entry(path=leaf.path, kind=leaf.kind, dtype=leaf.dtype, shape=tuple(leaf.shape), offset=offset, nbytes=nbytes)
        )
        offset += -(-nbytes // _ALIGN) * _ALIGN
    return _Layout(tuple(entries), offset)


def _nbytes(leaf: Leaf) -> int:
    value = leaf.value
    return len(value) if isinstance(value, bytes) else value.nbytes


def needed_bytes(leaves: Sequence[Leaf]) -> int:
    """Upper bound of the slot size these leaves need, header included."""
    header = sum(200 + 4 * len(leaf.path) for leaf in leaves)
    return lay_out(leaves).data_bytes + header + (1 << 20)


class Stager:
    """Copies into slots. Keeps the destination views of each slot between saves."""

    def __init__(self, slots: Sequence[SlotWriter]) -> None:
        self._slots = slots
        self._views: dict[int, tuple[tuple[object, ...], list[torch.Tensor]]] = {}

    def prepare(self, leaves: Sequence[Leaf]) -> None:
        """Size and touch every slot ahead of the first save."""
        size = needed_bytes(leaves)
        for slot in self._slots:
            slot.reserve(size)

    def copy(self, number: int, leaves: Sequence[Leaf], about: About) -> None:
        """Fill slot `number` with a whole snapshot of `leaves`. Values are copied, never referenced."""
        ordered = sorted(leaves, key=lambda leaf: leaf.kind == "plain")
        layout = lay_out(ordered)
        slot = self._slots[number]
        space, base = slot.begin(Header(about=about, entries=layout.entries), layout.data_bytes)
        pairs = list(zip((leaf.value for leaf in ordered), layout.entries, strict=True))
        filled = [(value.detach(), entry) for value, entry in pairs if isinstance(value, torch.Tensor) and entry.nbytes]
        if filled:
            with torch.no_grad():
                torch._foreach_copy_(self._targets(number, space, base, [entry for _, entry in filled]), [v for v, _ in filled])
        for value, entry in pairs:
            if isinstance(value, bytes):
                space[base + entry.offset : base + entry.offset + entry.nbytes] = value
        if any(value.is_cuda for value, _ in filled):
            torch.cuda.synchronize()
        slot.finish()

    def _targets(self, number: int, space: mmap.mmap, base: int, entries: Sequence[Entry]) -> list[torch.Tensor]:
        key = (id(space), base, *((entry.dtype, entry.shape, entry.offset) for entry in entries))
        known = self._views.get(number)
        if known is not None and known[0] == key:
            return known[1]
        views = [
            torch.frombuffer(
                space,
                dtype=getattr(torch, entry.dtype),
                count=max(1, math.prod(entry.shape)),
                offset=base + entry.offset,
            ).view(entry.shape)
            for entry in entries
        ]
        self._views[number] = (key, views)
        return views
