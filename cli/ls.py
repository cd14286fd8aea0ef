"""`perdure ls`: every checkpoint of a run, with launch, trust, sizes and digest; then what a crash left."""

import argparse
from typing import Any

from perdure.cli import render, thaw
from perdure.cli.target import add_target, resolve
from perdure.training.checkpoint import catalog, pins
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.pins import Pins

_Thaws = dict[tuple[str, str], thaw.Told]
_FROZEN: thaw.Told = {"state": "frozen"}


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
    listed, pinned, thaws = found.listed, pins.read_pins(target.run, found.listed), thaw.states(target.run)
    leftovers = [str(path.relative_to(target.run.root)) for path in found.leftovers]
    if args.json:
        head = {"id": info.id, "name": info.name, "dir": str(target.run.root), "steps": target.steps}
        answer = {"run": head, "checkpoints": [_json(one, pinned, thaws) for one in listed], "leftovers": leftovers}
        render.print_json(answer | {"thaws": list(thaws.values())})
        return 0
    if not listed:
        print(f"run {info.id} in {target.run.root} has no checkpoint yet")
    else:
        columns = ("step", "launch", "trust", "good copies", "on disk", "raw", "created", "state digest", "note")
        render.table(columns, [_row(one, pinned, thaws) for one in listed])
    shown = {(place, str(one.name)) for one in listed for place in one.cold}
    for key, other in thaws.items():
        if key not in shown:
            print(thaw.line(other))
    left = [path for path in leftovers if not any(path == f"checkpoints/{one.name}" for one in listed)]
    if left:
        print(f"{render.counted(len(left), 'leftover')} of a crash, first {left[0]}")
    return 0


def _json(one: Listed, pinned: Pins, thaws: _Thaws) -> dict[str, Any]:  # Any: JSON values
    labels = pinned.names.get(one.name)
    cold = {place: thaws.get((place, str(one.name)), _FROZEN) for place in one.cold}
    return describe(one) | ({"milestones": list(labels)} if labels else {}) | ({"cold": cold} if cold else {})


def _place(one: Listed, place: str, thaws: _Thaws) -> str:
    if place not in one.cold:
        return place
    return f"{place} ({thaw.state(thaws.get((place, str(one.name)), _FROZEN))})"


def _row(one: Listed, pinned: Pins, thaws: _Thaws) -> tuple[object, ...]:
    manifest, labels = one.manifest, pinned.names.get(one.name, ())
    notes = [one.problem or ("" if one.in_lineage else "not in the present history")]
    notes += [f"milestone {', '.join(labels)}"] if labels else []
    note = "; ".join(filter(None, notes))
    sizes = (render.size(one.bytes_on_disk), render.size(manifest.raw_bytes) if manifest else "?")
    shown = (render.when(manifest.created), manifest.state_digest[:16]) if manifest else ("?", "?")
    return (
        one.name.step,
        one.name.token,
        one.trust,
        ", ".join(_place(one, place, thaws) for place in one.places),
        *sizes,
        *shown,
        note,
    )
