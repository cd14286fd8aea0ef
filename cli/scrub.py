"""`perdure scrub`: read a share of everything stored again, longest-unchecked first; repair rot from another copy."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from perdure.cli import render
from perdure.cli.target import Target, add_target, resolve
from perdure.training.errors import CheckpointDamaged, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.training.travel.scrub import Done
    from perdure.training.travel.scrub_plan import Copy, Survey


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--budget", default="15%", metavar="SIZE", help="how much to read: 20GB, 512MiB, 15%% or 0.15; default 15%%"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be read, read nothing")


def run(args: argparse.Namespace) -> int:
    from perdure.training.travel import scrub
    from perdure.training.travel.scrub_plan import choose, parse_budget, survey

    target = resolve(args.target, args.set)
    target.started()
    places = target.reading_order()
    found = survey(target.run, places)
    chosen, problems, done = choose(found.copies, parse_budget(args.budget, found.readable_bytes)), dict(found.problems), None
    if not args.dry_run:
        places = [place for place in places if place.word not in problems]
        with render.Progress("scrub", sum(copy.bytes for copy in chosen), quiet=args.json) as progress:
            done = scrub.scrub(target.run, places, found.copies, chosen, progress.at)
        problems |= done.problems
    if args.json:
        render.print_json(_json(target, found, chosen, done, problems))
    else:
        _show(target, found, chosen, done, problems)
    if done and done.count("damaged"):
        return CheckpointDamaged.exit_code
    return StoreError.exit_code if problems else 0


def _show(target: Target, found: "Survey", chosen: "list[Copy]", done: "Done | None", problems: "Mapping[str, str]") -> None:
    results = {one.copy.key: one for one in done.found} if done else {}
    if not chosen:
        many = len(found.copies)
        print(
            f"nothing to scrub: {target.run.root} has "
            + (f"{render.counted(many, 'copy', 'copies')} of checkpoints" if many else "no checkpoint yet")
        )
    else:
        rows: list[tuple[object, ...]] = []
        for copy in chosen:
            one = results.get(copy.key)
            outcome, reason = (one.outcome, one.reason) if one else ("would be read", "")
            rows.append((copy.name, copy.place, render.size(copy.bytes), _last(copy.checked_at), outcome, reason))
        render.table(("checkpoint", "copy", "size", "checked", "result", "reason"), rows)
        print(_summary(found, chosen, done))
    if found.frozen:
        print(f"left out until thawed: {render.counted(found.frozen, 'copy', 'copies')}")
    for place, why in problems.items():
        print(render.visible(f"{place} was left out: {why}"))


def _last(moment: float) -> str:
    return f"{render.age(time.time() - moment)} ago" if moment else "never"


def _summary(found: "Survey", chosen: "list[Copy]", done: "Done | None") -> str:
    share = f"{len(chosen)} of {render.counted(len(found.copies), 'copy', 'copies')}"
    if done is None:
        return f"would read {share}, {render.size(sum(copy.bytes for copy in chosen))}"
    counts = ", ".join(f"{done.count(word)} {word}" for word in ("good", "repaired", "damaged", "skipped") if done.count(word))
    return f"read {share}, {render.size(done.bytes_read)}: {counts}"


def _json(
    target: Target, found: "Survey", chosen: "list[Copy]", done: "Done | None", problems: "Mapping[str, str]"
) -> dict[str, Any]:  # Any: JSON values
    results = {one.copy.key: one for one in done.found} if done else {}
    rows = [
        {
            "name": str(copy.name), "step": copy.name.step, "copy": copy.place, "bytes": copy.bytes,
            "checked_at": copy.checked_at or None, "base": str(copy.base) if copy.base else None,
            "result": results[copy.key].outcome if copy.key in results else None,
            "reason": results[copy.key].reason if copy.key in results else "",
        }
        for copy in chosen
    ]  # fmt: skip
    return {
        "run_dir": str(target.run.root), "dry_run": done is None, "copies": len(found.copies), "frozen": found.frozen,
        "chosen": rows, "bytes_read": done.bytes_read if done else 0, "problems": dict(problems),
    }  # fmt: skip
