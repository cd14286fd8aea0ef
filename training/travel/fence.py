"""Fencing on the store's side: a store belongs to one run, and a launch token to one launch, by conditional writes."""

import re
import secrets
from collections.abc import Iterator

import msgspec

from perdure.training.checkpoint.lineage import MAX_RECORD, LaunchRecord, create_launch, read_launches
from perdure.training.checkpoint.run_info import MAX_RUN_INFO, RunInfo, read_run_info
from perdure.training.errors import ObjectTooLarge, StoreConflict, StoreError
from perdure.training.run_dir import RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.store_settings import wrong_store

MAX_LAUNCHES = 100_000
"""A year of launches every five minutes; each is read by a pull."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def remote_run_info(store: ObjectStore) -> RunInfo:
    """The store's run.json. Raises ObjectNotFound, StoreConflict when it is none of ours."""
    try:
        info = msgspec.json.decode(store.get(RunDir.RUN_KEY, limit=MAX_RUN_INFO), type=RunInfo)
        if not _RUN_ID.fullmatch(info.id) or info.format != 1:
            raise msgspec.ValidationError(f"id {info.id[:100]!r}, format {info.format}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ObjectTooLarge) as error:
        raise StoreConflict(
            f"{store.url}/{RunDir.RUN_KEY} is not a run's: {str(error)[:200]}", "name an empty prefix in store.url"
        ) from None
    for problem, hint in _wrong(info):
        raise StoreConflict(f"{store.url}/{RunDir.RUN_KEY}: {problem[:300]}", hint)
    return info


def _wrong(info: RunInfo) -> Iterator[tuple[str, str]]:
    """Settings that no run.toml could have set, so that somebody else did; they come here with a pull."""
    if not 1 <= info.steps < 10**12 or info.chunk < 1:
        yield f"steps = {info.steps}, chunk = {info.chunk}: out of range", "steps are 1 to 10^12, a chunk has at least one"
    yield from wrong_store(info.store, "", "store")


def check_same_run(store: ObjectStore, ours: str, theirs: str) -> None:
    if ours != theirs:
        raise StoreConflict(
            f"{store.url} holds run {theirs}, not this run {ours}",
            "give each run its own prefix in store.url, or pull that run",
        )


def claim_run(run: RunDir, store: ObjectStore) -> None:
    """Make the store this run's, or see that it is. Raises StoreConflict naming both ids when it holds another."""
    info = read_run_info(run)
    if not store.put(RunDir.RUN_KEY, run.run_json.read_bytes(), if_absent=True):
        check_same_run(store, info.id, remote_run_info(store).id)


def remote_tokens(store: ObjectStore) -> list[int]:
    """Tokens taken in the store, ascending; whether their records can be read is not asked."""
    found = set()
    for item in store.list(RunDir.LAUNCHES_KEY):
        stem = item.key.removeprefix(RunDir.LAUNCHES_KEY).removesuffix(".json")
        if stem.isascii() and stem.isdecimal() and len(stem) <= 18 and RunDir.launch_key(int(stem)) == item.key:
            found.add(int(stem))
    if len(found) > MAX_LAUNCHES:
        raise StoreConflict(f"{store.url} holds {len(found)} launch records: that is no run of ours", "correct store.url")
    return sorted(found)


def read_remote_launch(store: ObjectStore, token: int) -> LaunchRecord | None:
    """None where the object is no launch record of that token."""
    try:
        record = msgspec.json.decode(store.get(RunDir.launch_key(token), limit=MAX_RECORD), type=LaunchRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ObjectTooLarge):
        return None
    return record if record.token == token else None


def record_launch(store: ObjectStore, record: LaunchRecord) -> bool:
    """Put the record under its token; True also when it is there already, from an earlier try of ours."""
    if store.put(RunDir.launch_key(record.token), msgspec.json.encode(record), if_absent=True):
        return True
    there = read_remote_launch(store, record.token)
    return there is not None and there.owner == record.owner


def take_token(
    run: RunDir,
    store: ObjectStore | None,
    *,
    run_id: str,
    resumed_from: str | None,
    created: float,
    host: str,
    pid: int,
    store_needed: bool = False,
) -> LaunchRecord:
    """The next token, ours alone here and in the store, which becomes this run's if it is new. A store that cannot be reached
    is left out, and the notes say so; where it is needed, StoreError is raised."""
    record = LaunchRecord(
        token=max(read_launches(run), default=0) + 1,
        resumed_from=resumed_from,
        created=created,
        host=host,
        pid=pid,
        run=run_id,
        owner=secrets.token_hex(16),
    )
    while True:
        if store is not None:
            try:
                claim_run(run, store)
                record = _take_remote(store, record)
            except StoreError as error:
                if not error.retryable or store_needed:
                    raise
                store = None
                record = msgspec.structs.replace(record, notes={"store": f"not reached: {str(error)[:500]}"})
        if create_launch(run, record):
            return record
        record = msgspec.structs.replace(record, token=record.token + 1)


def _take_remote(store: ObjectStore, record: LaunchRecord) -> LaunchRecord:
    """The store first: a token burnt there by a crash is harmless, one that only exists here may collide."""
    record = msgspec.structs.replace(record, token=max([record.token - 1, *remote_tokens(store)]) + 1)
    while not record_launch(store, record):
        record = msgspec.structs.replace(record, token=record.token + 1)
    return record
