"""`perdure scrub`: read a share of everything stored again, longest-unchecked first; repair rot from the other copy."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from perdure.cli import render
from perdure.cli.target import Target, add_target, resolve
from perdure.training.errors import CheckpointDamaged, StoreError

if TYPE_CHECKING:
    from perdure.training.storage.store import ObjectStore
    from perdure.training.travel.scrub import Copy, Done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--budget", default="15%", metavar="SIZE", help="how much to read: 20GB, 512MiB, 15%% or 0.15; default 15%%"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be read, read nothing")


def run(args: argparse.Namespace) -> int:
    from perdure.training.travel import scrub

    target = resolve(args.target, args.set)
    target.started()
    store, problem = _store(target)
    copies, problem = _survey(target, store, problem)
    chosen = scrub.choose(copies, scrub.parse_budget(args.budget, sum(copy.bytes for copy in copies)))
    done = None
    if not args.dry_run:
        with render.Progress("scrub", sum(copy.bytes for copy in chosen), quiet=args.json) as progress:
            done = scrub.scrub(target.run, None if problem else store, copies, chosen, progress.at)
        problem = problem or done.store_problem
    _show(args, target, copies, chosen, done, problem)
    if done and done.count("damaged"):
        return CheckpointDamaged.exit_code
    return StoreError.exit_code if problem else 0


def _store(target: Target) -> "tuple[ObjectStore | None, str]":
    return (target.open_store(), "") if target.store_url else (None, "")


def _survey(target: Target, store: "ObjectStore | None", problem: str) -> "tuple[list[Copy], str]":
    """A store that cannot be reached leaves the copies here to be scrubbed."""
    from perdure.training.travel import scrub

    try:
        return scrub.survey(target.run, store), problem
    except StoreError as error:
        if not error.retryable:
            raise
        return scrub.survey(target.run, None), str(error)


def _show(
    args: argparse.Namespace, target: Target, copies: "list[Copy]", chosen: "list[Copy]", done: "Done | None", problem: str
) -> None:
    found = {one.copy.key: one for one in done.found} if done else {}
    if args.json:
        render.print_json(_json(target, copies, chosen, done, problem))
        return
    if not chosen:
        print(f"nothing to scrub: {target.run.root} has {len(copies)} copies of checkpoints" if copies else
              f"nothing to scrub: {target.run.root} has no checkpoint yet")  # fmt: skip
    else:
        rows: list[tuple[object, ...]] = []
        for copy in chosen:
            one = found.get(copy.key)
            outcome, reason = (one.outcome, one.reason) if one else ("would be read", "")
            rows.append((copy.name, copy.place, render.size(copy.bytes), _last(copy.checked_at), outcome, reason))
        render.table(("checkpoint", "copy", "size", "checked", "result", "reason"), rows)
        print(_summary(copies, chosen, done))
    if problem:
        print(render.visible(f"the store was left out: {problem}"))


def _last(moment: float) -> str:
    return f"{render.age(time.time() - moment)} ago" if moment else "never"


def _summary(copies: "list[Copy]", chosen: "list[Copy]", done: "Done | None") -> str:
    share = f"{len(chosen)} of {len(copies)} copies"
    if done is None:
        return f"would read {share}, {render.size(sum(copy.bytes for copy in chosen))}"
    counts = ", ".join(f"{done.count(word)} {word}" for word in ("good", "repaired", "damaged", "skipped") if done.count(word))
    return f"read {share}, {render.size(done.bytes_read)}: {counts}"


def _json(
    target: Target, copies: "list[Copy]", chosen: "list[Copy]", done: "Done | None", problem: str
) -> dict[str, Any]:  # Any: JSON values
    found = {one.copy.key: one for one in done.found} if done else {}
    rows = [
        {
            "name": str(copy.name), "step": copy.name.step, "copy": copy.place, "bytes": copy.bytes,
            "checked_at": copy.checked_at or None, "base": str(copy.base) if copy.base else None,
            "result": found[copy.key].outcome if copy.key in found else None,
            "reason": found[copy.key].reason if copy.key in found else "",
        }
        for copy in chosen
    ]  # fmt: skip
    return {
        "run_dir": str(target.run.root), "dry_run": done is None, "copies": len(copies), "chosen": rows,
        "bytes_read": done.bytes_read if done else 0, "store_problem": problem or None,
    }  # fmt: skip
