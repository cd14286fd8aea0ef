"""Where nodes share no disk: bring a node's own run directory up to what the store knows. Launch records, milestones, and of
each checkpoint of the lineage its manifest: packs stay there, and are read in ranges."""

from collections.abc import Callable

import msgspec

from perdure.training import files
from perdure.training.checkpoint.lineage import create_launch, read_launches
from perdure.training.checkpoint.manifest import is_committed
from perdure.training.checkpoint.run_info import keep_in_parts, read_run_info
from perdure.training.checkpoint.shelf import Shelf
from perdure.training.config import RunConfig
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ObjectNotFound, StoreConflict
from perdure.training.run_dir import CheckpointName
from perdure.training.storage.parallel import in_order
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.contents import WIDTH
from perdure.training.travel.copies import Stored
from perdure.training.travel.pins import adopt_pins
from perdure.training.travel.sources import look

Report = Callable[[str], None]


def catch_up(config: RunConfig, store: ObjectStore, report: Report) -> bool:
    """False where the store has no run yet. Raises StoreConflict where it has another, StoreError."""
    run = config.directory
    ours = read_run_info(run).id if run.run_json.exists() else ""
    try:
        found = look([Stored(store)], report, ours=ours, called=config.run.name)
    except CheckpointNotFound:
        return False
    known = read_launches(run)
    for token, record in found.launches.items():
        if token not in known:
            create_launch(run, record)
        elif known[token].owner != record.owner:
            hint = "give this node a run.dir of its own, which is empty"
            raise StoreConflict(f"{run.root}: launch {token} is another one than in {store.url}", hint)
    files.make_dirs(run.checkpoints)
    lacking = [name for name in found.history if not is_committed(run, name)]

    def adopt(name: CheckpointName) -> str:
        try:
            Shelf(run, store, name).adopt(found.info.id)
        except (CheckpointDamaged, ObjectNotFound) as error:  # or deleted meanwhile
            return str(error)
        return ""

    for problem in filter(None, in_order(adopt, lacking, width=WIDTH)):
        report(f"passed over: {problem}")
    adopt_pins(run, found.there[0][1].pins[0])
    if not ours:
        files.create_exclusively(run.run_json, msgspec.json.encode(found.info))
    keep_in_parts(run, config)
    return True
