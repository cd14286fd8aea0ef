"""Pull: bring a run back from nothing but its store: run.json, launch records, the newest checkpoint that proves good.

Everything in a store may be damaged or hostile: names, sizes and counts are checked before a byte is fetched or a file made.
run.json is written last, so a pull that dies leaves no run that looks as if it had never been saved."""

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from perdure.training import events, files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch, follow, read_launches
from perdure.training.checkpoint.manifest import MAX_MANIFEST, Manifest
from perdure.training.checkpoint.pack import MAX_STORED_INDEX, IndexEntry
from perdure.training.checkpoint.reader import check_is_base, read_index
from perdure.training.checkpoint.run_info import RunInfo, read_run_info
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, DiskFull, ObjectNotFound, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.parallel import by_size
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.digest import Proof
from perdure.training.travel.fence import check_same_run, read_remote_launch, remote_run_info, remote_tokens
from perdure.training.travel.fetch import fetch

logger = logging.getLogger(__name__)
SPARE_BYTES = 64 << 20
_MANIFEST_KEY = re.compile(re.escape(RunDir.CHECKPOINTS_KEY) + r"([0-9]+-[0-9]+)/" + re.escape(MANIFEST))
PullProgress = Callable[[int, int], None]
_Ranks = list[Mapping[str, IndexEntry]]
"""The leaves of each rank."""


def remote_checkpoints(store: ObjectStore) -> list[CheckpointName]:
    """Every committed checkpoint in the store, by step and token; in the lineage or not."""
    matches = (_MANIFEST_KEY.fullmatch(item.key) for item in store.list(RunDir.CHECKPOINTS_KEY))
    names = (CheckpointName.parse(match[1]) for match in matches if match)
    return sorted(name for name in names if name is not None)


def pull(
    store: ObjectStore,
    run: RunDir,
    *,
    name: CheckpointName | None = None,
    place: str = facts.STORE,
    progress: PullProgress | None = None,
) -> CheckpointName:
    """Bring `name`, or the newest good checkpoint of the lineage, into `run`; returns which. `place`: what the store is to the
    run, `store` or the name of a tier.

    Damaged ones are reported and the one before is used. Raises CheckpointNotFound when the store has no run or the run no
    checkpoint yet (run.json and launch records are then in place), CheckpointDamaged when none is good, StoreConflict when
    `run` is another run, DiskFull before anything is fetched, StoreError."""
    return _Pull(store, run, place, progress).run(name)


class _Pull:
    def __init__(self, store: ObjectStore, run: RunDir, place: str, progress: PullProgress | None) -> None:
        self._store, self._run, self._place, self._progress = store, run, place, progress
        self._launches: dict[int, LaunchRecord] = {}
        self._unreadable: list[int] = []
        self._damaged: set[CheckpointName] = set()
        self._done = 0
        self._counting = threading.Lock()

    def run(self, name: CheckpointName | None) -> CheckpointName:
        info = self._identify()
        self._read_launches(info)
        committed = remote_checkpoints(self._store)
        candidates = follow(self._launches, committed) if name is None else [one for one in committed if one == name]
        if not candidates:
            self._nothing(info, name)
        for candidate in candidates:
            if self._good(candidate, info):
                self._write_run(info)
                return candidate
        tried = ", ".join(str(candidate) for candidate in candidates[:10])
        raise CheckpointDamaged(
            f"{self._store.url}: no checkpoint is good (tried {tried})",
            part="pack",
            hint="run `perdure push` where the run directory still exists",
        )

    def _identify(self) -> RunInfo:
        try:
            info = remote_run_info(self._store)
        except ObjectNotFound:
            raise CheckpointNotFound(
                f"{self._store.url} holds no run (no {RunDir.RUN_KEY})", "check store.url; nothing was pushed there yet"
            ) from None
        if self._run.run_json.exists():
            check_same_run(self._store, read_run_info(self._run).id, info.id)
        return info

    def _read_launches(self, info: RunInfo) -> None:
        for token in remote_tokens(self._store):
            record = read_remote_launch(self._store, token)
            if record is not None and record.run == info.id:
                self._launches[token] = record
            else:
                self._unreadable.append(token)
                self._report(f"launch record {token} in {self._store.url} is damaged and was passed over")

    def _nothing(self, info: RunInfo, name: CheckpointName | None) -> None:
        if name is not None:
            raise CheckpointNotFound(f"{self._store.url} holds no checkpoint {name}", "see `perdure ls`")
        if self._unreadable:
            raise CheckpointDamaged(f"{self._store.url}: launch records {self._unreadable[:10]} are damaged", part="launches")
        self._write_run(info)
        raise CheckpointNotFound(f"{self._store.url} holds run {info.id}, but no checkpoint of it yet")

    def _good(self, name: CheckpointName, info: RunInfo) -> bool:
        """Fetch and prove one candidate, its base first."""
        try:
            wanted = [found := self._manifest(name, info)]
            if self._is_full_here(found):
                return True
            if found.base_name is not None:
                wanted.insert(0, self._base(found, found.base_name, info))
            self._check_room(sum(record.bytes for one in wanted for record in one.files))
            self._done, total = 0, sum(record.bytes for one in wanted for record in one.files)
            base: _Ranks | None = None
            for one in wanted:
                base = self._fetch(one, total, base)
            return True
        except (CheckpointDamaged, ObjectNotFound) as error:
            problem = str(error)
        except StoreError as error:
            if error.retryable or isinstance(error, StoreConflict) or error.hint:  # not about this one object
                raise
            problem = str(error)
        self._report(f"checkpoint {name} in {self._store.url} is damaged: {problem}; using the one before it")
        return False

    def _is_full_here(self, increment: Manifest) -> bool:
        """Rolled up here since it was pushed: the increment must not take its place, others may be written against that."""
        folder = self._run.checkpoint(increment.name)
        try:
            here = manifest.read(folder)
        except (CheckpointNotFound, CheckpointDamaged):
            return False
        return manifest.is_rolled_up(here, increment) and not verify_folder(folder, deep=False)

    def _base(self, increment: Manifest, name: CheckpointName, info: RunInfo) -> Manifest:
        if name in self._damaged:
            raise CheckpointDamaged(f"its base {name} is damaged, as was found before", part="base")
        try:
            found = self._manifest(name, info)
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
        fact = Fact(copy=self._place, checked_at=time.time(), result="good", location=self._store.url)
        facts.write_fact(self._run, name, fact)
        return leaves

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
        self._fetch_all(found.name, [Proof(pack, known) for pack, known in zip(packs, leaves, strict=True)], total)
        files.fsync_dir(folder)
        return leaves

    def _fetch_all(self, name: CheckpointName, proofs: list[Proof], total: int) -> None:
        def fetch_one(proof: Proof) -> None:
            file = proof.record.name
            key = RunDir.checkpoint_key(name, file)
            fetch(self._store, key, self._run.checkpoint(name) / file, proof, lambda count: self._count(count, total))

        by_size(fetch_one, proofs, lambda proof: proof.record.bytes)

    def _manifest(self, name: CheckpointName, info: RunInfo) -> Manifest:
        """Before anything is fetched: it is the one asked for, and its files are there with these sizes."""
        key = RunDir.checkpoint_key(name, MANIFEST)
        where = f"{self._store.url}/{key}"
        found = manifest.parse(self._store.get(key, limit=MAX_MANIFEST), where)
        if found.name != name or found.run != info.id:
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

    def _write_run(self, info: RunInfo) -> None:
        """Launch records, then run.json; from here on this is the run."""
        files.make_dirs(self._run.checkpoints)
        ours = read_launches(self._run)
        for token, record in self._launches.items():
            if token not in ours:
                create_launch(self._run, record)
            elif ours[token].owner != record.owner:
                raise StoreConflict(
                    f"{self._run.root}: launch {token} is {ours[token].host}'s here and {record.host}'s in {self._store.url}",
                    "pull into a new directory",
                )
        files.create_exclusively(self._run.run_json, msgspec.json.encode(info))

    def _report(self, text: str) -> None:
        logger.warning("%s", text)
        files.make_dirs(self._run.root)
        events.record(self._run, "notice", text=text[:2000])

    def _count(self, count: int, total: int) -> None:
        with self._counting:
            self._done += count
            if self._progress:
                self._progress(self._done, total)
