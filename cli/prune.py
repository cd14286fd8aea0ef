"""`perdure prune`: show what retention lets go, with a reason for every checkpoint, then delete it and sweep leftovers."""

import argparse
from typing import Any

from perdure.cli import render
from perdure.cli.target import Target, add_target, resolve
from perdure.training.agent import lock
from perdure.training.checkpoint import prune
from perdure.training.checkpoint.prune import Done, Survey
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--keep-last",
        type=int,
        metavar="N",
        help="keep the newest N verified checkpoints (with a store: the newest N in it); default: retention.keep_last",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan, delete nothing")


def run(args: argparse.Namespace) -> int:
    target = resolve(args.target, args.set)
    target.started()
    keep_last = _keep_last(target, args.keep_last)
    if args.dry_run:
        found = _survey(target, keep_last)
        _show(args, target, found, keep_last)
        _finish(args, target, found, None, keep_last)
        return 0
    with upkeep(target.run):
        found = _survey(target, keep_last)
        _show(args, target, found, keep_last)
        done = prune.execute(target.run, found)
    _finish(args, target, found, done, keep_last)
    return 0


def _keep_last(target: Target, given: int | None) -> int:
    number = target.keep_last if given is None else given
    if number is None:
        raise ConfigError(f"{target.run.root} does not say how many checkpoints to keep", "name its run.toml, or --keep-last N")
    if number < 0:
        raise ConfigError(f"--keep-last {number} is negative", "use 0 to keep all")
    return number


def _survey(target: Target, keep_last: int) -> Survey:
    stored = bool(target.store_url)
    return prune.survey(target.run, keep_last, stored=stored, is_idle=lambda: not lock.is_held(target.run))


def _show(args: argparse.Namespace, target: Target, found: Survey, keep_last: int) -> None:
    if args.json or (not found.plan.verdicts and not found.leftovers):
        return
    rows: list[tuple[object, ...]] = [
        (verdict.name, "keep" if verdict.keep else "remove", render.size(verdict.bytes), "; ".join(verdict.reasons))
        for verdict in found.plan.verdicts
    ]
    for one in found.leftovers:
        path = one.path.relative_to(target.run.root)
        rows.append((path, "remove" if one.goes else "keep", render.size(one.bytes), f"leftover: {one.reason}"))
    render.table(("checkpoint", "action", "on disk", "reason"), rows)


def _finish(args: argparse.Namespace, target: Target, found: Survey, done: Done | None, keep_last: int) -> None:
    if args.json:
        render.print_json(_json(target, found, done, keep_last))
        return
    if found.empty:
        print(f"nothing to prune in {target.run.root} with keep_last = {keep_last}")
        return
    if done is None:
        count = (len(found.plan.remove), sum(one.goes for one in found.leftovers))
        print(f"would delete {count[0]} checkpoints and {count[1]} leftovers, {render.size(found.freed)}")
        return
    for name, why in done.spared.items():
        print(render.visible(f"left {name}: {why}"))
    print(f"deleted {len(done.removed)} checkpoints and {len(done.swept)} leftovers, {render.size(done.freed)} freed")


def _json(target: Target, found: Survey, done: Done | None, keep_last: int) -> dict[str, Any]:  # Any: JSON values
    checkpoints = [
        {
            "name": str(one.name), "step": one.name.step, "token": one.name.token, "action": "keep" if one.keep else "remove",
            "reasons": list(one.reasons), "bytes": one.bytes, "base": str(one.base) if one.base else None,
        }
        for one in found.plan.verdicts
    ]  # fmt: skip
    leftovers = [
        {
            "path": str(one.path.relative_to(target.run.root)), "action": "remove" if one.goes else "keep",
            "reason": one.reason, "bytes": one.bytes,
        }
        for one in found.leftovers
    ]  # fmt: skip
    return {
        "run_dir": str(target.run.root), "keep_last": keep_last, "dry_run": done is None, "checkpoints": checkpoints,
        "leftovers": leftovers, "removed": [str(one.name) for one in done.removed] if done else [],
        "spared": {str(name): why for name, why in done.spared.items()} if done else {},
        "freed_bytes": done.freed if done else found.freed,
    }  # fmt: skip
