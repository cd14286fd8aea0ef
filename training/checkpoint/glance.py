"""What can be told of a checkpoint without reading a pack or an index: its manifest, its base, and the sizes of its files."""

from collections.abc import Callable, Mapping
from pathlib import Path

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.catalog import sizes_in
from perdure.training.checkpoint.hold import hold
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.parted import is_part
from perdure.training.checkpoint.verify import Damage
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir

_Find = Callable[[CheckpointName], Manifest | None]


def glance(run: RunDir, names: list[CheckpointName], run_id: str) -> Mapping[CheckpointName, list[Damage]]:
    """Damage of each of these checkpoints, as far as it can be seen from outside; each manifest is read once.

    One being rolled up or deleted can look damaged: what does, is held and looked at again; what is gone is left out."""
    known: dict[CheckpointName, Manifest | None] = {}

    def find(name: CheckpointName) -> Manifest | None:
        if name not in known:
            try:
                known[name] = manifests.read(run.checkpoint(name))
            except (CheckpointDamaged, CheckpointNotFound):
                known[name] = None
        return known[name]

    found = {}
    for name in names:
        damage = _look(run.checkpoint(name), find(name), run_id, find)
        if damage:
            known.clear()
            again = _look_held(run.checkpoint(name), run_id, find)
            if again is None:
                continue
            damage = again
        found[name] = damage
    return found


def _look_held(folder: Path, run_id: str, find: _Find) -> list[Damage] | None:
    """None where it is gone."""
    try:
        with hold(folder):
            return _look(folder, manifests.read(folder), run_id, find)
    except CheckpointDamaged as error:
        return [Damage(error.part, str(error))]
    except CheckpointNotFound:
        return None


def _look(folder: Path, found: Manifest | None, run_id: str, find: _Find) -> list[Damage]:
    if found is None:
        return [Damage("manifest", f"{folder}: manifest cannot be read")]
    if found.run != run_id:
        return [Damage("manifest", f"{folder}: belongs to run {found.run:.100}, not to {run_id}")]
    sizes, damage = sizes_in(folder), []
    for record in () if is_part(RunDir(folder.parent.parent), found.name) else found.files:
        size = sizes.get(record.name)
        if size != record.bytes:
            part = "pack" if record.name.endswith(".pack") else "index"
            said = "is missing" if size is None else f"has {size} bytes"
            damage.append(Damage(part, f"{folder}: {record.name} {said}, the manifest says {record.bytes}"))
    return damage + _look_at_base(folder, found, find)


def _look_at_base(folder: Path, found: Manifest, find: _Find) -> list[Damage]:
    name = found.base_name
    if found.base is None or name is None:
        return []
    base = find(name)
    if base is None:
        return [Damage("base", f"{folder}: its base {name} is missing or has no readable manifest")]
    if base.digest != found.base.digest or base.base is not None:
        return [Damage("base", f"{folder}: its base {name} is another one than it was written against")]
    return []
