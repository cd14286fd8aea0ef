"""`perdure rollup`: make a full of an increment and its base, without the trainer; afterwards the base can be pruned."""

import argparse

from perdure.cli import render
from perdure.cli.target import Target, add_selection, add_target, resolve, select
from perdure.training.checkpoint import catalog, lineage
from perdure.training.checkpoint.catalog import manifest_of
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.errors import CheckpointNotFound
from perdure.training.run_dir import CheckpointName


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_selection(parser, "the checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="say what would be rolled up, change nothing")


def run(args: argparse.Namespace) -> int:
    from perdure.training.checkpoint.rollup import roll_up

    target = resolve(args.target, args.set)
    target.started()
    name = _chosen(target, args)
    if args.dry_run:
        return _dry_run(args, target, name)
    with upkeep(target.run):
        before = manifest_of(target.run, name)
        with render.Progress(f"roll up {name.step}", 2 * before.raw_bytes, quiet=args.json) as progress:
            after = roll_up(target.run, name, progress=progress.at)
    if args.json:
        base = str(before.base_name) if before.base_name else None
        told = {"name": str(name), "step": name.step, "base": base, "dry_run": False, "rolled_up": before.base is not None}
        sizes = {"stored_bytes_before": before.stored_bytes, "stored_bytes": after.stored_bytes}
        render.print_json({"run_dir": str(target.run.root), **told, **sizes, "state_digest": after.state_digest})
    else:
        print(_said(name, before, after))
    return 0


def _dry_run(args: argparse.Namespace, target: Target, name: CheckpointName) -> int:
    found = manifest_of(target.run, name)
    if args.json:
        base = str(found.base_name) if found.base_name else None
        told = {"name": str(name), "step": name.step, "base": base, "dry_run": True, "rolled_up": False}
        render.print_json({"run_dir": str(target.run.root), **told, "stored_bytes": found.stored_bytes})
    elif found.base_name is None:
        print(f"nothing to roll up: {name} is a full already")
    else:
        base_bytes = manifest_of(target.run, found.base_name).stored_bytes
        sizes = f"{render.size(found.stored_bytes)} and the {render.size(base_bytes)} of its base {found.base_name}"
        print(f"would roll up {name}: a full of its {sizes}, which it would no longer need")
    return 0


def _said(name: CheckpointName, before: Manifest, after: Manifest) -> str:
    if before.base is None:
        return f"{name} is a full already"
    sizes = f"{render.size(before.stored_bytes)} became {render.size(after.stored_bytes)}"
    return f"rolled up {name}: {sizes}, state digest {after.state_digest[:16]}; it no longer needs {before.base_name}"


def _chosen(target: Target, args: argparse.Namespace) -> CheckpointName:
    """By default the newest increment that is not known to be damaged; the newest checkpoint where there is none."""
    if args.step is not None or args.name is not None:
        return select(target.run.root, lineage.committed(target.run), lineage.lineage(target.run), args)
    good = [one for one in reversed(catalog.list_checkpoints(target.run)) if one.in_lineage and one.trust != "quarantined"]
    if not good:
        raise CheckpointNotFound(f"{target.run.root} has no checkpoint that could be rolled up", "see `perdure ls`")
    return next((one.name for one in good if one.base is not None), good[0].name)
