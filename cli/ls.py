"""`perdure ls`: every checkpoint of a run, with launch, trust, sizes and digest; then what a crash left."""

import argparse
from typing import Any

from perdure.cli import render
from perdure.cli.target import add_target, resolve
from perdure.training.checkpoint import catalog, pins
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.pins import Pins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)


def describe(listed: Listed) -> dict[str, Any]:  # Any: JSON values
    """The JSON object of one checkpoint."""
    manifest = listed.manifest
    known: dict[str, Any] = {
        "name": str(listed.name), "step": listed.name.step, "token": listed.name.token, "trust": listed.trust,
        "places": list(listed.places),
        "in_lineage": listed.in_lineage, "bytes_on_disk": listed.bytes_on_disk,
        "raw_bytes": manifest.raw_bytes if manifest else None, "state_digest": manifest.state_digest if manifest else None,
        "created": manifest.created if manifest else None,
    }  # fmt: skip
    return known | ({"problem": listed.problem} if listed.problem else {})


def run(args: argparse.Namespace) -> int:
    target = resolve(args.target, args.set)
    info = target.started()
    found = catalog.read_catalog(target.run)
    listed, pinned = found.listed, pins.read_pins(target.run, found.listed)
    leftovers = [str(path.relative_to(target.run.root)) for path in found.leftovers]
    if args.json:
        head = {"id": info.id, "name": info.name, "dir": str(target.run.root), "steps": target.steps}
        render.print_json({"run": head, "checkpoints": [_json(one, pinned) for one in listed], "leftovers": leftovers})
        return 0
    if not listed:
        print(f"run {info.id} in {target.run.root} has no checkpoint yet")
    else:
        columns = ("step", "launch", "trust", "good copies", "on disk", "raw", "created", "state digest", "note")
        render.table(columns, [_row(one, pinned) for one in listed])
    other = [path for path in leftovers if not any(path == f"checkpoints/{one.name}" for one in listed)]
    if other:
        print(f"{len(other)} leftovers of a crash, first {other[0]}")
    return 0


def _json(one: Listed, pinned: Pins) -> dict[str, Any]:  # Any: JSON values
    labels = pinned.names.get(one.name)
    return describe(one) | ({"milestones": list(labels)} if labels else {})


def _row(one: Listed, pinned: Pins) -> tuple[object, ...]:
    manifest, labels = one.manifest, pinned.names.get(one.name, ())
    notes = [one.problem or ("" if one.in_lineage else "not in the present history")]
    notes += [f"milestone {', '.join(labels)}"] if labels else []
    note = "; ".join(filter(None, notes))
    sizes = (render.size(one.bytes_on_disk), render.size(manifest.raw_bytes) if manifest else "?")
    shown = (render.when(manifest.created), manifest.state_digest[:16]) if manifest else ("?", "?")
    return (one.name.step, one.name.token, one.trust, ", ".join(one.places), *sizes, *shown, note)
