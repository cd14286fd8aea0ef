"""A checkpoint of several nodes. Each offers what it has, all decide alike who stores what they have in common, each writes its
packs and a record of them, and node 0 commits once the records of all are there. Without a shared disk each stores its packs
before it says so, and node 0 commits in the store.

All of it lies in the checkpoint's folder, whose name has the launch's token: what an older launch left is never taken in. The
agent ends the saver where it waits for a node that is gone."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import blake3
import msgspec

from perdure.training import files
from perdure.training.checkpoint import derive
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.audit import bytes_digest
from perdure.training.checkpoint.hold import try_hold_alone
from perdure.training.checkpoint.increment import choose_base, opened_base
from perdure.training.checkpoint.manifest import FileRecord, Manifest
from perdure.training.checkpoint.pack import IndexEntry, decode_index
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.checkpoint.shared import Part, choose, merged
from perdure.training.checkpoint.shelf import Shelf, patiently
from perdure.training.checkpoint.writer import Way, make_manifest, write_part
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import About
from perdure.training.storage.store import ObjectStore

POLL_SECS = 0.02
_MOST_BYTES = 1 << 30
"""Of a file that nodes tell each other something by."""
_Told = TypeVar("_Told")


class Node(NamedTuple):
    """Which one of how many; each has as many ranks as this one."""

    number: int
    nodes: int


class Offered(msgspec.Struct, frozen=True, array_like=True):
    """A leaf that a node would store."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: bytes
    source: str
    """The leaf it is derived from, or itself: the two stay together."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has; of node 0 also the base that all are to write against."""

    abouts: tuple[About, ...]
    """Of each rank."""
    leaves: tuple[Offered, ...]
    """Of all its ranks. What differs among them is there several times."""
    base: str


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a node, durable."""

    name: str
    files: tuple[FileRecord, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What one node does for a checkpoint."""

    run: RunDir
    run_id: str
    name: CheckpointName
    node: Node
    stored: Sequence[Part]
    """Of each rank of this node."""
    full: bool
    encoding: str
    threads: int
    store: ObjectStore | None = None
    """Where the nodes share no disk."""

    def write(self) -> Manifest | None:
        """Write this node's part, and on node 0 commit the whole: its manifest, else None. What a saver that died has written
        is written again, or kept where it is whole. Raises OSError, CheckpointDamaged."""
        run, name, number = self.run, self.name, self.node.number
        files.make_dirs(run.checkpoint(name))
        told = number > 0 and run.part(name, number).exists()  # looked at first: node 0 commits, then removes it
        if manifests.is_committed(run, name):
            return self._committed() if number == 0 else None
        if told:
            return None
        with self._agreed_base() as base:
            offers = [_await(run.offer(name, other), Offer) for other in range(self.node.nodes)]
            if number and self.store is not None:
                clear_old(run, {name, base.manifest.name} if base else {name})
            records = self._write_packs(offers, base)
            if shelf := self._shelf(name):
                patiently(lambda: shelf.send(records))
            _tell(run.part(name, number), Written(name=str(name), files=records))
            return self._commit(offers, base) if number == 0 else None

    @contextlib.contextmanager
    def _agreed_base(self) -> Iterator[CheckpointReader | None]:
        """Offer what this node has; the base that node 0 has offered, open. An offer stands: others may have read it."""
        run, name = self.run, self.name
        mine = run.offer(name, self.node.number)
        if self.node.number == 0 and not mine.exists():
            with opened_base(run, self.run_id, name, None if self.full else choose_base(run)) as chosen:
                _tell(mine, self._offer(str(chosen.manifest.name) if chosen else ""))
                yield chosen
            return
        if not mine.exists():
            _tell(mine, self._offer(""))
        base = _await(run.offer(name, 0), Offer).base
        self._take_in(CheckpointName.parse(base))
        with opened_base(run, self.run_id, name, CheckpointName.parse(base)) as opened:
            if base and opened is None:
                raise CheckpointDamaged(f"{name}: the base {base}, which all nodes write against, cannot be read here")
            yield opened

    def _shelf(self, name: CheckpointName) -> Shelf | None:
        return Shelf(self.run, self.store, name) if self.store is not None else None

    def _take_in(self, base: CheckpointName | None) -> None:
        """Where node 0's disk is not ours: its manifest; what it holds is read from the store."""
        if base is not None and (shelf := self._shelf(base)) and not manifests.is_committed(self.run, base):
            patiently(lambda: shelf.adopt(self.run_id))

    def _offer(self, base: str) -> Offer:
        with ThreadPoolExecutor(self.threads) as pool:
            leaves = [leaf for part in self.stored for leaf in _offered(part, self.threads, pool)]
        return Offer(abouts=tuple(part.snapshot.about for part in self.stored), leaves=tuple(leaves), base=base)

    def _write_packs(self, offers: Sequence[Offer], base: CheckpointReader | None) -> tuple[FileRecord, ...]:
        elsewhere, differing = compared(offers, self.node.number)
        folder, first = self.run.checkpoint(self.name), self.node.number * len(self.stored)
        self._clear(folder, range(first, first + len(self.stored)))
        records: list[FileRecord] = []
        for rank, part in enumerate(self.stored, first):
            paths = {entry.path for entry in part.entries} - elsewhere | differing
            entries = tuple(entry for entry in part.snapshot.entries if entry.path in paths)
            records += write_part(folder, rank, dataclasses.replace(part, entries=entries), self._way(base)).files
        return tuple(records)

    def _clear(self, folder: Path, ranks: Iterable[int]) -> None:
        """What a saver of this node that was killed has left there; what it has told the others stands."""
        run, name, number = self.run, self.name, self.node.number
        told = [run.offer(name, number), run.part(name, number), *([run.manifest(name)] if number == 0 else [])]
        packs = tuple(f"rank-{rank:05d}." for rank in ranks)
        torn = (*(f".{path.name}." for path in told), *(f".{pack}" for pack in packs))
        for path in folder.iterdir():
            if path.name.startswith(packs) or (files.is_temporary(path.name) and path.name.startswith(torn)):
                files.remove(path)

    def _way(self, base: CheckpointReader | None) -> Way:
        return Way(self.encoding, self.threads, base)

    def _commit(self, offers: Sequence[Offer], base: CheckpointReader | None) -> Manifest:
        run, name = self.run, self.name
        records: list[FileRecord] = []
        entries: list[IndexEntry] = []
        for number in range(self.node.nodes):
            written = _await(run.part(name, number), Written)
            if written.name != str(name):
                raise CheckpointDamaged(f"{run.part(name, number)} is of checkpoint {written.name}", part="manifest")
            records += written.files
            for pack, index in zip(written.files[::2], written.files[1::2], strict=True):
                entries += self._entries(pack, index, afar=number > 0)
        about = merged([about for offer in offers for about in offer.abouts])
        manifest = make_manifest(self.run_id, name, about, records, entries, base)
        if shelf := self._shelf(name):
            manifest = patiently(functools.partial(shelf.commit, manifest))
        files.write_atomically(run.manifest(name), manifests.seal(manifest))
        return self._committed()

    def _committed(self) -> Manifest:
        """What is there now. What the nodes have told each other has served."""
        for number in range(self.node.nodes):
            files.remove(self.run.offer(self.name, number), durable=False)
            files.remove(self.run.part(self.name, number), durable=False)
        return manifests.read(self.run.checkpoint(self.name))

    def _entries(self, pack: FileRecord, index: FileRecord, *, afar: bool) -> tuple[IndexEntry, ...]:
        """What a part holds, as it has arrived. Raises CheckpointDamaged where that is not what was written."""
        folder, shelf = self.run.checkpoint(self.name), self._shelf(self.name) if afar else None
        if shelf:
            patiently(lambda: shelf.fetch_index(pack, index))
        data = files.read_limited(folder / index.name, _MOST_BYTES)
        whole = shelf or (folder / pack.name).stat().st_size == pack.bytes
        if f"blake3:{blake3.blake3(data).hexdigest()}" != index.digest or not whole:
            raise CheckpointDamaged(f"{folder / pack.name} is not what its node has written", part="pack")
        return decode_index(data, pack.bytes, str(folder / index.name), increment=True)


def clear_old(run: RunDir, needed: Collection[CheckpointName]) -> None:
    """On a node other than 0, whose checkpoints are all in the store: in its directory stay those that are `needed`, the newest
    beside them, and its base."""
    there = sorted(name for path in run.checkpoints.iterdir() if (name := CheckpointName.parse(path.name)))
    kept = {*needed, *[name for name in there if name not in needed][-1:]}
    for name in list(kept):
        with contextlib.suppress(CheckpointNotFound, CheckpointDamaged):
            if (base := manifests.read(run.checkpoint(name)).base_name) is not None:
                kept.add(base)
    for name in set(there) - kept:
        with try_hold_alone(run.checkpoint(name)) as alone:
            if alone or not manifests.is_committed(run, name):
                files.remove_tree(run.checkpoint(name))


def _offered(part: Part, threads: int, pool: ThreadPoolExecutor) -> Iterator[Offered]:
    derived = derive.find(part, threads)
    digests = pool.map(lambda entry: bytes_digest(part.data(entry)), part.entries)
    for entry, digest in zip(part.entries, digests, strict=True):
        source = derived[entry.path].source if entry.path in derived else entry.path
        yield Offered(entry.path, entry.kind, entry.dtype, entry.shape, entry.nbytes, digest, source)


def compared(offers: Sequence[Offer], node: int) -> tuple[set[str], set[str]]:
    """Paths of what this node has and leaves to another: what is bit for bit the same in all ranks that have it. And of what
    several nodes have that is not: each rank stores its own of that, also where it is the same in all ranks of this node.

    Who stores what is balanced, and goes by shapes alone: an increment finds a leaf where its base has it."""
    by_path: dict[str, dict[int, list[Offered]]] = {}
    for number, offer in enumerate(offers):
        for leaf in offer.leaves:
            by_path.setdefault(leaf.path, {}).setdefault(number, []).append(leaf)
    owners: dict[str, int] = {}
    load = [0] * len(offers)
    elsewhere: set[str] = set()
    differing: set[str] = set()
    for path, holders in by_path.items():
        leaves = [leaf for own in holders.values() for leaf in own]
        if len(holders) < 2:
            continue
        if len({(leaf.kind, leaf.dtype, leaf.shape) for leaf in leaves}) > 1:
            differing.add(path)
            continue
        chosen = owners.setdefault(leaves[0].source, choose(holders, load, leaves[0].kind, leaves[0].nbytes))
        owner = chosen if chosen in holders else min(holders)
        if leaves[0].kind == "tensor":  # plain ones change their size
            load[owner] += leaves[0].nbytes
        if len({leaf.digest for leaf in leaves}) > 1:
            differing.add(path)
        elif node in holders and node != owner:
            elsewhere.add(path)
    return elsewhere, differing


def _tell(path: Path, told: Offer | Written) -> None:
    files.write_atomically(path, msgspec.msgpack.encode(told))


def _await(path: Path, kind: type[_Told]) -> _Told:
    while True:
        try:
            return msgspec.msgpack.decode(files.read_limited(path, _MOST_BYTES), type=kind)
        except FileNotFoundError:
            time.sleep(POLL_SECS)
