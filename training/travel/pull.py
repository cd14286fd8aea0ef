"""Pull: bring a run back from nothing but its store: run.json, launch records, the newest checkpoint that proves good.

Everything in a store may be damaged or hostile: names, sizes and counts are checked before a byte is fetched or a file made.
run.json is written last, so a pull that dies leaves no run that looks as if it had never been saved."""

import logging
import re
import shutil
import time
from collections.abc import Callable

import msgspec

from perdure.training import events, files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch, follow, read_launches
from perdure.training.checkpoint.manifest import MAX_MANIFEST, Manifest
from perdure.training.checkpoint.run_info import RunInfo, read_run_info
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, DiskFull, ObjectNotFound, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel import digest
from perdure.training.travel.fence import check_same_run, read_remote_launch, remote_run_info, remote_tokens

logger = logging.getLogger(__name__)
SPARE_BYTES = 64 << 20
_MANIFEST_KEY = re.compile(re.escape(RunDir.CHECKPOINTS_KEY) + r"([0-9]+-[0-9]+)/" + re.escape(MANIFEST))
PullProgress = Callable[[int, int], None]


def remote_checkpoints(store: ObjectStore) -> list[CheckpointName]:
    """Every committed checkpoint in the store, by step and token; in the lineage or not."""
    matches = (_MANIFEST_KEY.fullmatch(item.key) for item in store.list(RunDir.CHECKPOINTS_KEY))
    names = (CheckpointName.parse(match[1]) for match in matches if match)
    return sorted(name for name in names if name is not None)


def pull(
    store: ObjectStore, run: RunDir, *, name: CheckpointName | None = None, progress: PullProgress | None = None
) -> CheckpointName:
    """Bring `name`, or the newest good checkpoint of the lineage, into `run`; returns which.

    Damaged ones are reported and the one before is used. Raises CheckpointNotFound when the store has no run or the run no
    checkpoint yet (run.json and launch records are then in place), CheckpointDamaged when none is good, StoreConflict when
    `run` is another run, DiskFull before anything is fetched, StoreError."""
    return _Pull(store, run, progress).run(name)


class _Pull:
    def __init__(self, store: ObjectStore, run: RunDir, progress: PullProgress | None) -> None:
        self._store, self._run, self._progress = store, run, progress
        self._launches: dict[int, LaunchRecord] = {}
        self._unreadable: list[int] = []
        self._done = 0

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
        """Fetch and prove one candidate; what is damaged leaves nothing behind."""
        existed = self._run.checkpoint(name).exists()
        try:
            self._fetch(name, info)
            return True
        except (CheckpointDamaged, ObjectNotFound) as error:
            problem = str(error)
        except StoreError as error:
            if error.retryable or isinstance(error, StoreConflict) or error.hint:  # not about this one object
                raise
            problem = str(error)
        if not existed and self._run.checkpoint(name).exists():
            files.remove_tree(self._run.checkpoint(name))
        self._report(f"checkpoint {name} in {self._store.url} is damaged: {problem}; using the one before it")
        return False

    def _fetch(self, name: CheckpointName, info: RunInfo) -> None:
        key = RunDir.checkpoint_key(name, MANIFEST)
        data = self._store.get(key, limit=MAX_MANIFEST)
        found = manifest.parse(data, f"{self._store.url}/{key}")
        self._check(found, name, info)
        folder = self._run.checkpoint(name)
        files.make_dirs(folder)
        self._done, total = 0, sum(record.bytes for record in found.files)
        for record in found.files:
            path, key = folder / record.name, RunDir.checkpoint_key(name, record.name)
            if not digest.local_is(record, path):
                self._store.get_file(key, path, size=record.bytes, progress=lambda count: self._count(count, total))
                if not digest.local_is(record, path):
                    raise CheckpointDamaged(f"{self._store.url}/{key} is not what its manifest says", part="pack")
        files.write_atomically(folder / MANIFEST, data)
        files.remove(self._run.fact(name, "local"))  # of the copy that was here before
        fact = Fact(copy="store", checked_at=time.time(), result="good", location=self._store.url)
        facts.write_fact(self._run, name, fact)

    def _check(self, found: Manifest, name: CheckpointName, info: RunInfo) -> None:
        """Before anything is fetched: it is the one asked for, its files are there with these sizes, and there is room."""
        where = f"{self._store.url}/{RunDir.checkpoint_key(name, MANIFEST)}"
        if found.name != name or found.run != info.id:
            raise CheckpointDamaged(f"{where} is of checkpoint {found.name} of run {found.run[:100]}", part="manifest")
        there = {item.key: item.size for item in self._store.list(RunDir.checkpoint_key(name, ""))}
        for record in found.files:
            size = there.get(RunDir.checkpoint_key(name, record.name))
            if size != record.bytes:
                state = "missing" if size is None else f"{size} bytes long"
                raise CheckpointDamaged(f"{where}: {record.name} should have {record.bytes} bytes and is {state}", part="pack")
        self._check_room(sum(record.bytes for record in found.files))

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
        self._done += count
        if self._progress:
            self._progress(self._done, total)
