"""Checkpoint format 2 (1 is still read): the manifest. Canonical JSON with its own digest, so every flipped bit in it is found.

docs/format.md describes every field. Decoding is strict (types, sizes, names): a hostile manifest is refused."""

import errno
import os
from pathlib import Path
from typing import Any

import blake3
import msgspec

from perdure.training import files
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir, is_label, rank_index, rank_pack

FORMAT = "perdure-checkpoint"
VERSION = 2
MAX_MANIFEST = 16 << 20
"""Bytes: room for fifty thousand ranks."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pack or index the checkpoint needs. `digest` is `blobs:<hex>` (pack.blobs_digest) for packs, in version 1
    `xxh3-128:<hex>` of the whole file, and `blake3:<hex>` for indexes."""

    name: str
    bytes: int
    digest: str


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The full that an increment differs from: its name, and the `digest` of its manifest."""

    name: str
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
    milestone: str | msgspec.UnsetType = msgspec.UNSET
    """The name that the training code gave it (pins.py); there is no such field where it gave none."""
    metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """The newest value of each name that it logged beside loss and tokens; there is no such field where it logged none."""
    base: Base | None = None
    """None for a full."""
    digest: str = ""
    """BLAKE3 (hex) of the canonical JSON with this field empty."""

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(self.step, self.token)

    @property
    def base_name(self) -> CheckpointName | None:
        return CheckpointName.parse(self.base.name) if self.base else None


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
    if manifest.format != FORMAT or manifest.version not in (1, VERSION):
        raise damaged(f"is of format {manifest.format!r} version {manifest.version}, not {FORMAT!r} version 1 to {VERSION}")
    if canonical != data:
        raise damaged("does not match its own digest")
    problem = _inconsistency(manifest)
    if problem:
        raise damaged(problem)
    return manifest


def _inconsistency(manifest: Manifest) -> str:
    """What is wrong with a well-formed manifest; "" for nothing. Names are compared with the only ones there can be."""
    ranks = max(len(manifest.files) // 2, 1)
    names = tuple(record.name for record in manifest.files)
    full = manifest.version > 1 and manifest.base is None
    if names != _file_names(ranks, rolled_up=False) and not (full and names == _file_names(ranks, rolled_up=True)):
        return "names files that are not the packs and indexes of ranks 0, 1, 2, ..."
    if min(manifest.step, manifest.token, manifest.raw_bytes, manifest.leaves, *(file.bytes for file in manifest.files)) < 0:
        return "holds a negative number"
    if sum(file.bytes for file in manifest.files) != manifest.stored_bytes:
        return f"says {manifest.stored_bytes} stored bytes, which its files do not add up to"
    if manifest.milestone is not msgspec.UNSET and not is_label(manifest.milestone):
        return f"names itself {manifest.milestone!r:.80}, which is no milestone's name"
    if manifest.base is None:
        return ""
    name = manifest.base_name
    if manifest.version == 1 or name is None or name.step >= manifest.step:
        return f"names {manifest.base.name!r:.80} as its base: an increment (of version 2) has a base of a lower step"
    return ""


def _file_names(ranks: int, *, rolled_up: bool) -> tuple[str, ...]:
    return tuple(file(rank, rolled_up=rolled_up) for rank in range(ranks) for file in (rank_pack, rank_index))


def read(folder: Path) -> Manifest:
    """The manifest of a local checkpoint folder, which must be named after it. Raises CheckpointNotFound, CheckpointDamaged."""
    path = folder / MANIFEST
    try:
        if not path.is_file() and os.path.lexists(path):
            raise ValueError(f"{MANIFEST} is not a regular file")
        data = files.read_limited(path, MAX_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"{folder} holds no {MANIFEST}: there is no checkpoint of this name") from None
    except (ValueError, OSError) as error:
        raise _refused(error, folder) from None
    return _of_folder(data, folder)


def read_held(fd: int, folder: Path) -> Manifest:
    """As `read`, from the descriptor of the manifest that is held (hold.open_held). Raises CheckpointDamaged."""
    try:
        data = os.pread(fd, MAX_MANIFEST + 1, 0)
        if len(data) > MAX_MANIFEST:
            raise ValueError(f"larger than {MAX_MANIFEST} bytes")
    except (ValueError, OSError) as error:
        raise _refused(error, folder) from None
    return _of_folder(data, folder)


def _refused(error: ValueError | OSError, folder: Path) -> Exception:
    """A bad sector is damage; no right to read says nothing about what lies there."""
    if isinstance(error, OSError) and error.errno != errno.EIO:
        return error
    return CheckpointDamaged(f"{folder}: manifest refused: {error}", part="manifest")


def _of_folder(data: bytes, folder: Path) -> Manifest:
    manifest = parse(data, str(folder))
    if CheckpointName.parse(folder.name) not in (None, manifest.name):
        raise CheckpointDamaged(f"{folder}: manifest is that of {manifest.name}", part="manifest")
    return manifest


def is_rolled_up(full: Manifest, increment: Manifest) -> bool:
    """Whether one is the full that was made of the other in its place: the same state, without the base."""
    same = (full.run, full.name, full.state_digest) == (increment.run, increment.name, increment.state_digest)
    return same and full.base is None and increment.base is not None


def is_committed(run: RunDir, name: CheckpointName) -> bool:
    return run.manifest(name).exists()
