"""Checkpoint format 1: the manifest. Canonical JSON with its own digest, so that every flipped bit in it is found.

docs/format.md describes every field. Decoding is strict (types, sizes, names): a hostile manifest is refused."""

import errno
import os
from pathlib import Path
from typing import Any

import blake3
import msgspec

from perdure.training import files
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir, rank_index, rank_pack

FORMAT = "perdure-checkpoint"
VERSION = 1
MAX_MANIFEST = 16 << 20
"""Bytes: room for fifty thousand ranks."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pack or index the checkpoint needs. `digest` is `xxh3-128:<hex>` for packs and `blake3:<hex>` for indexes."""

    name: str
    bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    run: str
    step: int
    token: int
    created: float
    """Unix seconds; information only, nothing is ordered by it."""
    state_digest: str
    """BLAKE3 (hex) over the sorted content digests of all leaves."""
    raw_bytes: int
    stored_bytes: int
    """Packs and indexes."""
    leaves: int
    files: tuple[FileRecord, ...]
    world: dict[str, Any]  # Any in this class: plain JSON values
    data: dict[str, Any]
    environment: dict[str, Any]
    code: dict[str, Any]
    config: dict[str, Any]
    loss: dict[str, Any]
    exact: bool
    exact_reasons: tuple[str, ...]
    base: str | None = None
    """Name of the full this one is an increment of."""
    digest: str = ""
    """BLAKE3 (hex) of the canonical JSON with this field empty."""

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(self.step, self.token)


def _canonical(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="sorted") + b"\n"


def seal(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, digest filled in."""
    bare = msgspec.structs.replace(manifest, digest="")
    return _canonical(msgspec.structs.replace(bare, digest=blake3.blake3(_canonical(bare)).hexdigest()))


def parse(data: bytes, where: str) -> Manifest:
    """Decode and check manifest bytes from anywhere. Raises CheckpointDamaged (part "manifest")."""

    def damaged(problem: str, hint: str = "") -> CheckpointDamaged:
        return CheckpointDamaged(f"{where}: manifest {problem}", part="manifest", hint=hint)

    try:
        head = msgspec.json.decode(data)
        version = head.get("version") if isinstance(head, dict) and head.get("format") == FORMAT else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise damaged("is not JSON" if data else "is empty") from None
    if isinstance(version, int) and version > VERSION:
        raise damaged(f"was written by a newer version (format {version}, this one reads {VERSION})", "upgrade perdure")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        canonical = seal(manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(f"is malformed: {error}") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise damaged(f"is of format {manifest.format!r} version {manifest.version}, not {FORMAT!r} version {VERSION}")
    if canonical != data:
        raise damaged("does not match its own digest")
    problem = _inconsistency(manifest)
    if problem:
        raise damaged(problem)
    return manifest


def _inconsistency(manifest: Manifest) -> str:
    """What is wrong with a well-formed manifest; "" for nothing. Names are compared with the only ones there can be."""
    ranks = max(len(manifest.files) // 2, 1)
    names = [file(rank) for rank in range(ranks) for file in (rank_pack, rank_index)]
    if [record.name for record in manifest.files] != names:
        return "names files that are not the packs and indexes of ranks 0, 1, 2, ..."
    if min(manifest.step, manifest.token, manifest.raw_bytes, manifest.leaves, *(file.bytes for file in manifest.files)) < 0:
        return "holds a negative number"
    if sum(file.bytes for file in manifest.files) != manifest.stored_bytes:
        return f"says {manifest.stored_bytes} stored bytes, which its files do not add up to"
    if manifest.base is not None:
        return f"is an increment against {manifest.base!r:.80}; this version reads fulls only"
    return ""


def read(folder: Path) -> Manifest:
    """The manifest of a local checkpoint folder, which must be named after it. Raises CheckpointNotFound, CheckpointDamaged."""
    try:
        if not (folder / MANIFEST).is_file() and os.path.lexists(folder / MANIFEST):
            raise ValueError(f"{MANIFEST} is not a regular file")
        data = files.read_limited(folder / MANIFEST, MAX_MANIFEST)
    except FileNotFoundError:
        raise CheckpointNotFound(f"{folder} holds no {MANIFEST}: there is no checkpoint of this name") from None
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EIO:  # a bad sector is damage; no right to read says nothing
            raise
        raise CheckpointDamaged(f"{folder}: manifest refused: {error}", part="manifest") from None
    manifest = parse(data, str(folder))
    if CheckpointName.parse(folder.name) not in (None, manifest.name):
        raise CheckpointDamaged(f"{folder}: manifest is that of {manifest.name}", part="manifest")
    return manifest


def is_committed(run: RunDir, name: CheckpointName) -> bool:
    return run.manifest(name).exists()
