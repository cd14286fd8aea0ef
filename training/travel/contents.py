"""What a place holds, from its listing and its small objects: the run it belongs to, launches, checkpoints. No pack is read."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.facts import MAX_FACT, Fact
from perdure.training.checkpoint.lineage import LaunchRecord
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.pins import ByHand
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.checkpoint.shelf import CHECK_KEY
from perdure.training.errors import CheckpointDamaged, ObjectNotFound, ObjectTooLarge
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.parallel import in_order
from perdure.training.storage.store import ObjectInfo, ObjectStore
from perdure.training.travel.copies import Stored, read_manifest
from perdure.training.travel.fence import read_remote_launch, remote_run_info, remote_tokens
from perdure.training.travel.pins import remote_pins

WIDTH = 4
_MANIFEST_KEY = re.compile(re.escape(RunDir.CHECKPOINTS_KEY) + r"([0-9]+-[0-9]+)/" + re.escape(MANIFEST))


@dataclass(frozen=True, kw_only=True)
class Contents:
    info: RunInfo | None
    """None: no run was ever pushed there."""
    launches: dict[int, LaunchRecord]
    checkpoints: tuple[CheckpointName, ...]
    """Committed ones, by step and token."""
    objects: tuple[ObjectInfo, ...] = ()
    """All that lies among the checkpoints."""
    pins: ByHand = field(default_factory=lambda: ({}, ""))
    unreadable: tuple[int, ...] = ()
    """Tokens whose launch records are damaged."""


def remote_checkpoints(store: ObjectStore) -> list[CheckpointName]:
    """Every committed checkpoint in the store, by step and token; in the lineage or not."""
    return committed_among(store.list(RunDir.CHECKPOINTS_KEY))


def committed_among(objects: Iterable[ObjectInfo]) -> list[CheckpointName]:
    """As `remote_checkpoints`, of what was listed already."""
    matches = (_MANIFEST_KEY.fullmatch(item.key) for item in objects)
    names = (CheckpointName.parse(match[1]) for match in matches if match)
    return sorted(name for name in names if name is not None)


def contents(store: ObjectStore) -> Contents:
    """Raises StoreError, StoreConflict when its run.json is none of ours."""
    try:
        info = remote_run_info(store)
    except ObjectNotFound:
        return Contents(info=None, launches={}, checkpoints=())
    tokens = remote_tokens(store)
    records = dict(zip(tokens, in_order(lambda token: read_remote_launch(store, token), tokens, width=WIDTH), strict=True))
    known = {token: record for token, record in records.items() if record is not None and record.run == info.id}
    objects = tuple(store.list(RunDir.CHECKPOINTS_KEY))
    return Contents(
        info=info,
        launches=known,
        checkpoints=tuple(committed_among(objects)),
        objects=objects,
        pins=remote_pins(store),
        unreadable=tuple(token for token in records if token not in known),
    )


def read_remote_fact(store: ObjectStore, name: CheckpointName) -> Fact | None:
    """What the checker found of this copy; None where nobody looked, or nobody can tell."""
    try:
        return msgspec.json.decode(store.get(RunDir.checkpoint_key(name, CHECK_KEY), limit=MAX_FACT), type=Fact)
    except (ObjectNotFound, ObjectTooLarge, ValueError, RecursionError):
        return None


def list_remote(
    store: ObjectStore, place: str, names: Sequence[CheckpointName], history: Collection[CheckpointName], run_id: str
) -> list[Listed]:
    """Each of these checkpoints of a place, as if it were listed here. What a place has was read back when it got there."""

    def manifest(name: CheckpointName) -> Manifest | str:
        try:
            return read_manifest(Stored(store, place), name, run_id)
        except CheckpointDamaged as error:
            return str(error)

    return [
        _listed(name, place, found, name in history)
        for name, found in zip(names, in_order(manifest, iter(names), width=WIDTH), strict=True)
    ]


def _listed(name: CheckpointName, place: str, found: Manifest | str, in_lineage: bool) -> Listed:
    if isinstance(found, str):
        return Listed(
            name=name, in_lineage=in_lineage, trust="quarantined", manifest=None, problem=found, bytes_on_disk=0, is_here=False
        )
    return Listed(
        name=name, in_lineage=in_lineage, trust="replicated", manifest=found, problem="", bytes_on_disk=found.stored_bytes,
        base=found.base_name, places=(place,), is_here=False,
    )  # fmt: skip
