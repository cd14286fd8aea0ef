"""`perdure verify`: read checkpoints back, decode them, compare every digest; name damaged tensors; record the facts."""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perdure.cli import render
from perdure.cli.target import Target, add_selection, add_target, resolve, select
from perdure.training import events
from perdure.training.checkpoint import facts, lineage
from perdure.training.checkpoint.catalog import sizes_in
from perdure.training.checkpoint.facts import Fact
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir

if TYPE_CHECKING:
    from perdure.training.checkpoint.verify import Damage

SHOWN = 20
"""Lines of damage printed for one checkpoint; --json has all."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    name: CheckpointName
    damage: "list[Damage]"
    seconds: float
    bytes: int
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_selection(parser, "only the checkpoint")
    parser.add_argument(
        "--manifests", action="store_true", help="manifests, bases and sizes only, of thousands in a second; reads no pack"
    )
    parser.add_argument(
        "--quick", action="store_true", help="stored bytes only, without decoding; proves less, records only damage"
    )


def run(args: argparse.Namespace) -> int:
    target = resolve(args.target, args.set)
    target.started()
    names = _chosen(target, args)
    checked = _glance(target, names, quiet=args.json) if args.manifests else _check_all(target, names, args)
    damaged = [one for one in checked if one.damage]
    if args.json:
        render.print_json(
            {
                "run_dir": str(target.run.root),
                "deep": not (args.quick or args.manifests),
                "checkpoints": [_json(one) for one in checked],
            }
        )
    else:
        print(f"{len(checked)} checked, {len(damaged)} damaged")
    return CheckpointDamaged.exit_code if damaged else 0


def _check_all(target: Target, names: list[CheckpointName], args: argparse.Namespace) -> list[Checked]:
    checked = []
    for name in names:
        with render.Progress(f"step {name.step}", 0, quiet=args.json) as progress:
            try:
                one = check(target.run, name, quick=args.quick, progress=progress)
            except CheckpointNotFound:
                if names == [name]:
                    raise
                continue  # pruned since it was listed
        checked.append(one)
        if not args.json:
            _print(one)
    return checked


def _glance(target: Target, names: list[CheckpointName], *, quiet: bool) -> list[Checked]:
    """Damage is recorded; that nothing was seen proves too little. Only the damaged ones are printed."""
    from perdure.training.checkpoint.glance import glance

    checked = []
    for name, damage in glance(target.run, names, target.started().id).items():
        note = _record(target.run, name, damage) if damage else ""
        checked.append(Checked(name=name, damage=damage, seconds=0.0, bytes=0, note=note))
        if damage and not quiet:
            _print(checked[-1])
    return checked


def _chosen(target: Target, args: argparse.Namespace) -> list[CheckpointName]:
    everything = lineage.committed(target.run)
    if args.step is not None or args.name is not None:
        return [select(target.run.root, everything, lineage.lineage(target.run), args)]
    if not everything:
        raise CheckpointNotFound(f"{target.run.root} has no checkpoint yet", "see `perdure status`")
    return everything


def check(run: RunDir, name: CheckpointName, *, quick: bool, progress: render.Progress) -> Checked:
    """Look for all damage of one checkpoint and record what was found. A quick look that finds nothing proves too little."""
    from perdure.training.checkpoint.parted import is_part
    from perdure.training.checkpoint.verify import verify_in_run

    started = time.monotonic()
    folder = run.checkpoint(name)
    threads = len(os.sched_getaffinity(0))
    damage, part = verify_in_run(run, name, deep=not quick, progress=progress.at, threads=threads), is_part(run, name)
    seconds = time.monotonic() - started
    note = _record(run, name, damage) if damage or not (quick or part) else "read here and from the store" * part
    return Checked(name=name, damage=damage, seconds=seconds, bytes=sum(sizes_in(folder).values()), note=note)


def _record(run: RunDir, name: CheckpointName, damage: "list[Damage]") -> str:
    """The fact, and an event when the checkpoint is quarantined by it. A folder we may not write to is still worth checking."""
    from perdure.training.checkpoint.verify import told

    before, lines = facts.trust(run, name), told(damage)
    result = "damaged" if damage else "good"
    fact = Fact(copy="local", checked_at=time.time(), result=result, damage=lines, location=str(name))
    try:
        facts.write_fact(run, name, fact)
        if damage and before != "quarantined":
            events.record(run, "quarantined", step=name.step, name=str(name), reason="; ".join(lines[:5])[:2000])
    except OSError as error:
        return f"not recorded: {error.strerror}"
    return ""


def _print(one: Checked) -> None:
    word = "DAMAGED" if one.damage else "good"
    rate = f"  {render.size(one.bytes)} in {one.seconds:.2f} s" if one.bytes else ""
    print(f"{one.name}  {word}{rate}" + (f"  ({one.note})" if one.note else ""))
    for damage in one.damage[:SHOWN]:
        print(render.visible(f"    {damage.part}: {damage.detail}"))
    if len(one.damage) > SHOWN:
        print(f"    and {len(one.damage) - SHOWN} more; --json lists all")
    sys.stdout.flush()


def _json(one: Checked) -> dict[str, object]:
    return {
        "name": str(one.name), "step": one.name.step, "token": one.name.token, "result": "damaged" if one.damage else "good",
        "damage": [{"part": damage.part, "detail": damage.detail} for damage in one.damage],
        "seconds": round(one.seconds, 3), "bytes": one.bytes, "note": one.note,
    }  # fmt: skip
