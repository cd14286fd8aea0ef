"""Fetch one file of a checkpoint from a store: spans of it at once, each to its place, digests taken as they arrive.

A fetch that was cut off is gone on with: what lies there counts piece by piece, by digest."""

from collections.abc import Callable
from pathlib import Path

from perdure.training import files
from perdure.training.checkpoint.digest import Check, Piece, Proof, spans
from perdure.training.errors import CheckpointDamaged, StoreError
from perdure.training.storage.parallel import PARTS, SMALL, in_order, ranges
from perdure.training.storage.store import ObjectStore

Count = Callable[[int], None]
"""Called with the number of bytes that were fetched, or found."""


def fetch(store: ObjectStore, key: str, path: Path, proof: Proof, count: Count = lambda _: None) -> None:
    """`path` appears whole and proven, or not at all; it is durable once its folder is synced. One that is good stays.

    Raises CheckpointDamaged when the object is not what it must be, StoreError (what arrived is kept for the next try)."""
    if proof.local(path):
        count(proof.record.bytes)
    elif proof.record.bytes <= SMALL:
        _at_once(store, key, path, proof)
        count(proof.record.bytes)
    else:
        _in_parts(store, key, path, proof, count)


def _at_once(store: ObjectStore, key: str, path: Path, proof: Proof) -> None:
    data, check = store.get(key, limit=proof.record.bytes), Check(proof.hasher, proof.pieces)
    if not (check.update(data) and check.complete):
        raise _damaged(store, key)
    with files.NewFile(path) as new:
        new.write(data)
        new.commit(sync_folder=False)


def _in_parts(store: ObjectStore, key: str, path: Path, proof: Proof, count: Count) -> None:
    with files.PartFile(path, proof.record.bytes) as part:
        missing = _missing(part, proof) if part.found else proof.pieces
        count(proof.record.bytes - sum(piece.length for piece in missing))
        part.kept = True  # whoever kills us from here on

        def take(offset: int, data: memoryview) -> None:
            part.write_at(offset, data)
            count(len(data))

        try:
            if not all(in_order(lambda span: proof.read(store, key, span, take), spans(missing), width=PARTS)):
                raise _damaged(store, key)
        except StoreError:
            raise
        except BaseException as error:
            part.kept = not isinstance(error, (CheckpointDamaged, OSError))  # a full disk is not kept full
            raise
        part.commit(sync_folder=False)


def _missing(part: files.PartFile, proof: Proof) -> list[Piece]:
    return [piece for piece in proof.pieces if not _is_there(part, proof, piece)]


def _is_there(part: files.PartFile, proof: Proof, piece: Piece) -> bool:
    """Read in steps: of format 1, the whole file is one piece."""
    check = Check(proof.hasher, [piece])
    return (
        all(check.update(part.read_at(piece.offset + at, length)) for at, length in ranges(piece.length, SMALL))
        and check.complete
    )


def _damaged(store: ObjectStore, key: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{store.url}/{key} is not what its manifest says", part="pack")
