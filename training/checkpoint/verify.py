"""Prove a checkpoint: read every stored byte back, decode it, compare every digest; all damage is named, not just the first."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.checkpoint.reader import CheckpointReader, check_blob, decode_checked, open_checkpoint
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir, rank_pack

Progress = Callable[[int, int], None]
"""Called with stored bytes done and in all."""


@dataclass(frozen=True)
class Damage:
    """`part` is "manifest", "index", "pack", or the path of a leaf."""

    part: str
    detail: str


def verify_folder(folder: Path, *, deep: bool = True, progress: Progress | None = None) -> list[Damage]:
    """All damage of a local checkpoint; empty when it is good. Not deep: stored bytes against their digests, undecoded.

    Raises CheckpointNotFound where there is no manifest, OSError where a file cannot be read at all."""
    try:
        reader = open_checkpoint(folder)
    except CheckpointDamaged as error:
        return [Damage(error.part, str(error))]
    with reader:
        found: list[Damage] = []
        done = 0
        for rank in range(reader.ranks):
            done = _verify_rank(reader, rank, deep, found, done, progress)
        if not found:
            _note(found, reader.check_state_digest)
        return found


def _note(found: list[Damage], check: Callable[[], object]) -> None:
    try:
        check()
    except CheckpointDamaged as error:
        found.append(Damage(error.part, str(error)))


def _verify_rank(
    reader: CheckpointReader, rank: int, deep: bool, found: list[Damage], done: int, progress: Progress | None
) -> int:
    before = len(found)
    _note(found, lambda: reader.rank_entries(rank))
    if len(found) > before:
        return done
    whole, total = xxhash.xxh3_128(), reader.manifest.stored_bytes
    for entry in reader.rank_entries(rank).values():
        for blob in entry.blobs:
            stored = reader.source.read(rank_pack(rank), blob.offset, blob.stored)
            whole.update(stored)
            check = decode_checked if deep else check_blob
            damaged = len(found)
            _note(found, lambda check=check, entry=entry, blob=blob, stored=stored: check(entry, blob, stored, reader.where))  # type: ignore[misc]
            done += blob.stored
            if progress is not None:
                progress(done, total)
            if len(found) > damaged:
                break  # one line per leaf is enough
    record = next(record for record in reader.manifest.files if record.name == rank_pack(rank))
    if len(found) == before and f"xxh3-128:{whole.hexdigest()}" != record.digest:
        found.append(Damage("pack", f"{reader.where}: {record.name} does not match the manifest's digest"))
    return done


def check(run: RunDir, name: CheckpointName, *, deep: bool = True) -> Fact:
    """Verify the local copy and record the fact beside it. Raises CheckpointNotFound when it is gone."""
    folder = run.checkpoint(name)
    damage = verify_folder(folder, deep=deep)
    fact = Fact(
        copy="local",
        checked_at=time.time(),
        result="damaged" if damage else "good",
        damage=tuple(f"{item.part}: {item.detail}" for item in damage),
        location=folder.name,
    )
    if not folder.is_dir():
        raise CheckpointNotFound(f"{folder} was removed while it was checked")
    write_fact(run, name, fact)
    return fact
