"""The state digest (docs/format.md) of what is not a checkpoint: live leaves, or a snapshot in a slot."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, cast

import blake3

from perdure.training.checkpoint.derive import Leaves
from perdure.training.checkpoint.pack import BLOB_BYTES, leaf_digest, state_digest

if TYPE_CHECKING:
    from perdure.training.checkpoint.pack import IndexEntry


class Digested(NamedTuple):
    """A leaf as far as the digest goes."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def digest_of(leaves: Iterable[Digested]) -> str:
    return state_digest(cast("Iterable[IndexEntry]", leaves))  # the other fields of an index entry are not in the digest


def bytes_digest(data: bytes | memoryview) -> bytes:
    """Of one leaf."""
    return leaf_digest(blake3.blake3(data[start : start + BLOB_BYTES]).digest() for start in range(0, len(data), BLOB_BYTES))


def snapshots_digest(snapshots: Iterable[Leaves]) -> str:
    """Of a checkpoint that holds these, rank after rank."""
    return digest_of(
        Digested(entry.path, entry.kind, entry.dtype, entry.shape, bytes_digest(snapshot.data(entry)))
        for snapshot in snapshots
        for entry in snapshot.entries
    )
