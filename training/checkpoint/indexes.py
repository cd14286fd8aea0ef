"""What an index, and the base of an increment, must be for their manifest. Without NumPy: whoever only moves files needs this
much of reading."""

from collections.abc import Iterable, Mapping

import blake3

from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.pack import IndexEntry, blobs_digest, check_base, decode_index, state_digest
from perdure.training.errors import CheckpointDamaged


def read_index(
    manifest: Manifest, rank: int, data: bytes, where: str, base: Mapping[str, IndexEntry] | None
) -> Mapping[str, IndexEntry]:
    """The leaves of a rank by path, from the bytes of its index, which are checked first; of an increment against those of its
    base. Raises CheckpointDamaged (part "index")."""
    pack, index = manifest.files[2 * rank : 2 * rank + 2]
    place = f"{where}/{index.name}"
    if f"blake3:{blake3.blake3(data).hexdigest()}" != index.digest:
        raise CheckpointDamaged(f"{where}: {index.name} does not match its digest", part="index")
    entries = decode_index(data, pack.bytes, place, version=manifest.version, increment=manifest.base is not None)
    if manifest.version > 1 and blobs_digest(entries) != pack.digest:
        raise CheckpointDamaged(f"{place}: {pack.name} of the manifest has other blobs than the index", part="index")
    if base is not None:
        check_base(entries, base, place)
    return {entry.path: entry for entry in entries}


def check_state(manifest: Manifest, ranks: Iterable[Mapping[str, IndexEntry]], where: str) -> None:
    """The indexes together are the state the manifest names. Raises CheckpointDamaged (part "index")."""
    entries = [entry for leaves in ranks for entry in leaves.values()]
    found = (state_digest(entries), len(entries), sum(entry.nbytes for entry in entries))
    if found != (manifest.state_digest, manifest.leaves, manifest.raw_bytes):
        raise CheckpointDamaged(f"{where}: indexes do not add up to the manifest's state digest", part="index")


def check_is_base(manifest: Manifest, found: Manifest) -> str:
    """Why a manifest is not that of an increment's base; "" when it is."""
    assert manifest.base is not None
    if found.run != manifest.run:
        return f"is of run {found.run:.100}, not of {manifest.run:.100}"
    if found.base is not None:
        return "is itself an increment"
    if found.digest != manifest.base.digest:
        return "is another one than it was written against (its digest differs)"
    return ""
