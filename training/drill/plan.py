"""What a drill would do, from a look at the store and at the room there is; nothing is fetched and nothing changed."""

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perdure.training.checkpoint import catalog, lineage
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.config import RunConfig
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ObjectNotFound
from perdure.training.run_dir import CheckpointName
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.contents import remote_checkpoints
from perdure.training.travel.copies import Stored, read_manifest
from perdure.training.travel.copy_in import SPARE_BYTES
from perdure.training.travel.fence import check_same_run, read_remote_launch, remote_run_info, remote_tokens

_SAVES = 5
"""Checkpoints that both continuations together leave in the folder, each at most as large as the state."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    victim: str
    """rank or agent."""
    step: int
    """It dies when this one is made, or a few steps later."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    run_id: str = ""
    newest: CheckpointName | None = None
    """What would be pulled."""
    start: CheckpointName | None = None
    """What would be trained from: the newest with a step left to train."""
    steps: int = 0
    bytes: int = 0
    """To be pulled."""
    needed: int = 0
    """Bytes of room for all of it."""
    folder: str = ""
    free: int = 0
    """Bytes in it."""
    nothing: str = ""
    """Why there is nothing to rehearse; empty when there is."""

    @property
    def kills(self) -> tuple[Kill, ...]:
        return kills_between(self.start.step, self.start.step + self.steps) if self.start else ()


def kills_between(start: int, end: int) -> tuple[Kill, Kill]:
    """A rank before the first save of the continuation, an agent after it."""
    steps = end - start
    return (
        Kill(victim="rank", step=start + max(1, steps // 3)),
        Kill(victim="agent", step=start + max(1, 2 * steps // 3)),
    )


def plan(config: RunConfig, store: ObjectStore, wanted: CheckpointName | None, steps: int) -> Plan:
    """For `wanted`, or the newest whose manifest can be read.

    Raises CheckpointNotFound where the store lacks `wanted`, StoreConflict where it holds another run, StoreError."""
    run = config.directory
    has_trained = catalog.has_checkpoints(run)
    try:
        run_id = remote_run_info(store).id
    except ObjectNotFound:
        return Plan(nothing="" if has_trained else f"{store.url} holds no run, and this one has no checkpoint yet")
    if run.run_json.exists():
        check_same_run(store, read_run_info(run).id, run_id)
    names = history(store, run_id) if wanted is None else [name for name in remote_checkpoints(store) if name == wanted]
    if wanted is not None and not names:
        raise CheckpointNotFound(f"{store.url} holds no checkpoint {wanted}", f"see `perdure pull {store.url} DIR --dry-run`")
    if not names and not has_trained:
        return Plan(run_id=run_id, nothing=f"run {run_id} has no checkpoint yet")
    return _of(config, store, run_id, names, steps)


def _of(config: RunConfig, store: ObjectStore, run_id: str, names: Sequence[CheckpointName], steps: int) -> Plan:
    readable = _readable(store, run_id, names)
    newest = next(readable, None)
    if newest is None:
        return Plan(run_id=run_id)
    start = next((one for one in itertools.chain([newest], readable) if one.step < config.run.steps), None)
    if start is None:
        text = f"{newest.name} is of the last step, and no other can be used in {store.url}: no step is left to train"
        return Plan(run_id=run_id, newest=newest.name, nothing=text)
    size = sum(_size(store, run_id, one) for one in {newest.name: newest, start.name: start}.values())
    folder = tempfile.gettempdir()
    return Plan(
        run_id=run_id, newest=newest.name, start=start.name, steps=min(steps, config.run.steps - start.step), bytes=size,
        needed=size + _SAVES * start.raw_bytes + SPARE_BYTES, folder=folder, free=shutil.disk_usage(folder).free,
    )  # fmt: skip


def history(store: ObjectStore, run_id: str) -> list[CheckpointName]:
    """The checkpoints of the present history in the store, newest first, as a pull sees them."""
    records = [read_remote_launch(store, token) for token in remote_tokens(store)]
    ours = {record.token: record for record in records if record is not None and record.run == run_id}
    return lineage.follow(ours, remote_checkpoints(store))


def _readable(store: ObjectStore, run_id: str, names: Sequence[CheckpointName]) -> Iterator[Manifest]:
    for name in names:
        try:
            yield read_manifest(Stored(store), name, run_id)
        except CheckpointDamaged:
            continue


def _size(store: ObjectStore, run_id: str, found: Manifest) -> int:
    bases = _readable(store, run_id, [found.base_name] if found.base_name else [])
    return found.stored_bytes + sum(base.stored_bytes for base in bases)
