"""What several ranks have in common is stored once: a leaf that is bit for bit the same in every rank that has it goes into one
rank's pack. Content decides, never a rank's number. Who stores what is balanced, and stays the same from save to save."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from perdure.training.checkpoint import derive
from perdure.training.slots import About, Entry, Snapshot

SMALL = 1 << 12
"""Bytes up to which a leaf goes to the lowest rank that has it: one that resumes finds all of those in the same index."""
_Holders = dict[int, Entry]
"""Rank -> its leaf of one path."""


@dataclass(frozen=True)
class Part:
    """What one rank is to store of its snapshot; a `writer.SnapshotSource`."""

    snapshot: Snapshot
    entries: tuple[Entry, ...]
    about: About

    def data(self, entry: Entry) -> memoryview:
        return self.snapshot.data(entry)


def parts(snapshots: Sequence[Snapshot], threads: int) -> list[Part]:
    """One for each rank, in their order. All must be whole snapshots of one step."""
    left_out: list[set[str]] = [set() for _ in snapshots]
    for path, holders, owner in _owned(snapshots, threads):
        if _is_same(snapshots, holders, owner):
            for rank in holders:
                if rank != owner:
                    left_out[rank].add(path)
    about = merged([snapshot.about for snapshot in snapshots])
    return [
        Part(snapshot, tuple(entry for entry in snapshot.entries if entry.path not in left_out[rank]), about)
        for rank, snapshot in enumerate(snapshots)
    ]


def _owned(snapshots: Sequence[Snapshot], threads: int) -> Iterator[tuple[str, _Holders, int]]:
    """Paths that several ranks have with one type and shape, and who is to store them if their bytes are equal too. That goes
    by shapes alone, so an increment finds a leaf where its base has it; what is derived from another stays with that one."""
    by_path: dict[str, _Holders] = {}
    for rank, snapshot in enumerate(snapshots):
        for entry in snapshot.entries:
            by_path.setdefault(entry.path, {})[rank] = entry
    derived = derive.find(snapshots[0], threads) if len(snapshots) > 1 else {}
    owners: dict[str, int] = {}
    load = [0] * len(snapshots)
    for path, holders in by_path.items():
        if len(holders) > 1 and len({(one.kind, one.dtype, one.shape) for one in holders.values()}) == 1:
            source = derived[path].source if path in derived else path
            one = holders[min(holders)]
            chosen = owners.setdefault(source, choose(holders, load, one.kind, one.nbytes))
            owner = chosen if chosen in holders else min(holders)
            if holders[owner].kind == "tensor":  # plain ones change their size
                load[owner] += holders[owner].nbytes
            yield path, holders, owner


def choose(holders: Collection[int], load: Sequence[int], kind: str, nbytes: int) -> int:
    """Who of those that have a leaf stores it: the one with the least so far; what is small or plain, the first."""
    is_small = kind == "plain" or nbytes <= SMALL
    return min(holders, key=lambda one: (0 if is_small else load[one], one))


def _is_same(snapshots: Sequence[Snapshot], holders: _Holders, owner: int) -> bool:
    mine = snapshots[owner].data(holders[owner])
    return all(
        derive.equal(mine, snapshots[rank].data(entry)) for rank, entry in holders.items() if rank != owner and entry.nbytes
    )


def merged(told: Sequence[About]) -> About:
    """What rank 0 says; tokens are added up, and positions in the data that differ are listed rank by rank."""
    if len(told) == 1:
        return told[0]
    data: dict[str, Any] = {**told[0].data, "tokens": sum(int(one.data.get("tokens", 0)) for one in told)}  # Any: JSON values
    positions = [{key: value for key, value in one.data.items() if key != "tokens"} for one in told]
    if any(position != positions[0] for position in positions):
        data["ranks"] = positions
    reasons = dict.fromkeys(reason for one in told for reason in one.exact_reasons)
    name = next((one.milestone for one in told if one.milestone), msgspec.UNSET)
    return msgspec.structs.replace(
        told[0], data=data, exact=all(one.exact for one in told), exact_reasons=tuple(reasons), milestone=name
    )
