"""One checkpoint from one place into the run directory: its base first, files proven as they arrive, the manifest last.

Everything there may be damaged or hostile: names, sizes and counts are checked before a byte is fetched or a file made."""

import shutil
import threading
import time
from collections.abc import Callable, Mapping

from perdure.training import files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.digest import Proof
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.indexes import check_is_base, check_state, read_index
from perdure.training.checkpoint.manifest import MAX_MANIFEST, Manifest
from perdure.training.checkpoint.pack import MAX_STORED_INDEX, IndexEntry
from perdure.training.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    DiskFull,
    ObjectNotFound,
    StoreConflict,
    StoreError,
)
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.parallel import by_size
from perdure.training.travel.contents import read_remote_fact
from perdure.training.travel.copies import Stored
from perdure.training.travel.fetch import fetch
from perdure.training.travel.thaw import needed

SPARE_BYTES = 64 << 20
PullProgress = Callable[[int, int], None]
_Ranks = list[Mapping[str, IndexEntry]]
"""The leaves of each rank."""


class CopyIn:
    """From one place; remembers what of it was found damaged."""

    def __init__(self, place: Stored, run: RunDir, run_id: str, progress: PullProgress | None) -> None:
        self._place, self._store, self._run, self._id, self._progress = place, place.store, run, run_id, progress
        self._damaged: set[CheckpointName] = set()
        self._done = 0
        self._counting = threading.Lock()

    def bring(self, name: CheckpointName) -> str:
        """Fetch and prove one checkpoint, its base first; "" or what is damaged of it. Raises StoreError, DiskFull."""
        try:
            with needed(self._place, name):
                self._bring(name)
            return ""
        except (CheckpointDamaged, ObjectNotFound) as error:
            return str(error)
        except StoreError as error:
            if error.retryable or isinstance(error, StoreConflict) or error.hint:  # not about this one object
                raise
            return str(error)

    def _bring(self, name: CheckpointName) -> None:
        wanted = [found := self._manifest(name)]
        if self._is_full_here(found):
            return
        if found.base_name is not None:
            wanted.insert(0, self._base(found, found.base_name))
        self._check_room(sum(record.bytes for one in wanted for record in one.files))
        self._done, total = 0, sum(record.bytes for one in wanted for record in one.files)
        base: _Ranks | None = None
        for one in wanted:
            base = self._fetch(one, total, base)

    def _is_full_here(self, increment: Manifest) -> bool:
        """Rolled up here since it was pushed: the increment must not take its place, others may be written against that."""
        from perdure.training.checkpoint.verify import verify_folder  # needs NumPy, and this is rare

        folder = self._run.checkpoint(increment.name)
        try:
            here = manifest.read(folder)
        except (CheckpointNotFound, CheckpointDamaged):
            return False
        return manifest.is_rolled_up(here, increment) and not verify_folder(folder, deep=False)

    def _base(self, increment: Manifest, name: CheckpointName) -> Manifest:
        if name in self._damaged:
            raise CheckpointDamaged(f"its base {name} is damaged, as was found before", part="base")
        try:
            found = self._manifest(name)
        except ObjectNotFound:
            raise CheckpointDamaged(f"its base {name} is missing", part="base") from None
        if problem := check_is_base(increment, found):
            raise CheckpointDamaged(f"its base {name} {problem}", part="base")
        return found

    def _fetch(self, found: Manifest, total: int, base: _Ranks | None) -> _Ranks:
        """Every file, proven; then the manifest. What turns out to be damaged leaves nothing behind."""
        name, folder = found.name, self._run.checkpoint(found.name)
        existed = folder.exists()
        try:
            files.make_dirs(folder)
            leaves = self._fetch_files(found, total, base)
        except (CheckpointDamaged, ObjectNotFound):
            self._damaged.add(name)
            if not existed:
                files.remove_tree(folder)
            raise
        files.write_atomically(folder / MANIFEST, manifest.seal(found))
        files.remove(self._run.fact(name, "local"))  # of the copy that was here before
        self._record(name)
        return leaves

    def _record(self, name: CheckpointName) -> None:
        """That place has a good copy: it was just read."""
        known = read_remote_fact(self._store, name) if self._store.cold is not None else None
        fact = Fact(
            copy=self._place.word,
            checked_at=time.time(),
            result="good",
            location=self._store.url,
            storage_class=known.storage_class if known else "",
        )
        facts.write_fact(self._run, name, fact)

    def _fetch_files(self, found: Manifest, total: int, base: _Ranks | None) -> _Ranks:
        """Indexes first: they say what the packs must hold."""
        folder, leaves = self._run.checkpoint(found.name), []
        packs, indexes = found.files[::2], found.files[1::2]
        for index in indexes:
            if index.bytes > MAX_STORED_INDEX:
                raise CheckpointDamaged(f"{found.name}: {index.name} has {index.bytes} bytes, too many", part="index")
        self._fetch_all(found.name, [Proof(index) for index in indexes], total)
        for rank, index in enumerate(indexes):
            known = base[rank] if base is not None and rank < len(base) else {} if base is not None else None
            leaves.append(read_index(found, rank, (folder / index.name).read_bytes(), str(folder), known))
        check_state(found, leaves, str(folder))
        self._fetch_all(found.name, [Proof(pack, known) for pack, known in zip(packs, leaves, strict=True)], total)
        files.fsync_dir(folder)
        return leaves

    def _fetch_all(self, name: CheckpointName, proofs: list[Proof], total: int) -> None:
        def fetch_one(proof: Proof) -> None:
            file = proof.record.name
            key = RunDir.checkpoint_key(name, file)
            fetch(self._store, key, self._run.checkpoint(name) / file, proof, lambda count: self._count(count, total))

        by_size(fetch_one, proofs, lambda proof: proof.record.bytes)

    def _manifest(self, name: CheckpointName) -> Manifest:
        """Before anything is fetched: it is the one asked for, and its files are there with these sizes."""
        key = RunDir.checkpoint_key(name, MANIFEST)
        where = f"{self._store.url}/{key}"
        found = manifest.parse(self._store.get(key, limit=MAX_MANIFEST), where)
        if found.name != name or found.run != self._id:
            raise CheckpointDamaged(f"{where} is of checkpoint {found.name} of run {found.run[:100]}", part="manifest")
        there = {item.key: item.size for item in self._store.list(RunDir.checkpoint_key(name, ""))}
        for record in found.files:
            size = there.get(RunDir.checkpoint_key(name, record.name))
            if size != record.bytes:
                state = "missing" if size is None else f"{size} bytes long"
                raise CheckpointDamaged(f"{where}: {record.name} should have {record.bytes} bytes and is {state}", part="pack")
        return found

    def _check_room(self, needed: int) -> None:
        at = self._run.root
        while not at.exists():
            at = at.parent
        free = shutil.disk_usage(at).free
        if needed + SPARE_BYTES > free:
            raise DiskFull(
                f"{self._run.root}: the checkpoint needs {needed} bytes, {free} are free", "make room, then pull again"
            )

    def _count(self, count: int, total: int) -> None:
        with self._counting:
            self._done += count
            if self._progress:
                self._progress(self._done, total)
