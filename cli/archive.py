"""`perdure archive`: show what the tiers lack, with a reason for every copy, then make the copies and read them back."""

import argparse
from typing import TYPE_CHECKING, Any

from perdure.cli import render, thaw
from perdure.cli.target import Target, add_target, resolve
from perdure.training.errors import CheckpointDamaged, ConfigError, NeedsThaw, StoreError

if TYPE_CHECKING:
    from perdure.training.travel.archive import Done, Step, Survey


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the plan, copy nothing")
    parser.add_argument("--thaw", metavar="NAME", help="ask for this checkpoint out of a class that cannot be read as it is")
    parser.add_argument("--days", type=int, default=7, metavar="N", help="how long it can be read once it is thawed; default 7")
    parser.add_argument(
        "--speed", default="Standard", choices=("Bulk", "Standard", "Expedited"), help="of the thaw, as S3 has it"
    )
    parser.add_argument("--wait", action="store_true", help="wait until it is thawed")


def run(args: argparse.Namespace) -> int:
    from perdure.training.travel import archive
    from perdure.training.travel.places import remotes_of

    target = resolve(args.target, args.set)
    if args.thaw is not None:
        return thaw.of_tier(args, target)
    target.started()
    if target.config is None:
        raise ConfigError(f"{target.run.root} does not say which tiers it has", "name its run.toml")
    remotes = remotes_of(target.config)
    found = archive.survey(target.run, remotes)
    if not args.json:
        _show(target, found)
    if args.dry_run:
        return _finish(args, target, found, None)
    with render.Progress("archive", 0, quiet=args.json) as progress:
        done = archive.execute(target.run, remotes, found, lambda _step, at, total: progress.at(at, total))
    return _finish(args, target, found, done)


def _show(target: Target, found: "Survey") -> None:
    columns = ("checkpoint", "to", "size", "from", "reason")
    rows: list[tuple[object, ...]] = [
        (step.name, step.tier, render.size(step.bytes), step.source, "; ".join(step.reasons)) for step in found.steps
    ]
    if rows:
        render.table(columns, rows)
    if found.unproven and target.config is not None and target.config.tiers:
        count = render.counted(len(found.unproven), "checkpoint")
        print(f"not verified yet, so not counted: {count}; `perdure verify {target.run.root}`")


def _finish(args: argparse.Namespace, target: Target, found: "Survey", done: "Done | None") -> int:
    problems = done.problems if done else found.problems
    if args.json:
        render.print_json(_json(target, found, done))
    else:
        print(_summary(target, found, done))
        for step, error in done.skipped.items() if done else ():
            print(render.visible(f"left {step.name} out of {step.tier}: {error}"))
        for place, why in problems.items():
            print(render.visible(f"{place} was left: {why}"))
    if problems:
        return StoreError.exit_code
    codes = {error.exit_code for error in done.skipped.values()} if done else set()
    return NeedsThaw.exit_code if codes == {NeedsThaw.exit_code} else CheckpointDamaged.exit_code if codes else 0


def _summary(target: Target, found: "Survey", done: "Done | None") -> str:
    if target.config is not None and not target.config.tiers:
        return f"nothing to archive: {target.config.path} has no [tiers.NAME]"
    if not found.steps:
        return f"nothing to archive: the tiers of {target.run.root} have what they are to have"
    steps = found.steps if done is None else tuple(done.copied)
    verb = "would make" if done is None else "made"
    return f"{verb} {render.counted(len(steps), 'copy', 'copies')}, {render.size(sum(step.bytes for step in steps))}"


def _json(target: Target, found: "Survey", done: "Done | None") -> dict[str, Any]:  # Any: JSON values
    def result(step: "Step") -> str | None:
        if done is None:
            return None
        return "copied" if step in done.copied else "skipped" if step in done.skipped else "left"

    rows = [
        {
            "name": str(step.name), "step": step.name.step, "tier": step.tier, "bytes": step.bytes, "source": step.source,
            "reasons": list(step.reasons), "result": result(step),
        }
        for step in found.steps
    ]  # fmt: skip
    return {
        "run_dir": str(target.run.root), "dry_run": done is None, "copies": rows,
        "unproven": [str(name) for name in found.unproven], "problems": dict(done.problems if done else found.problems),
    }  # fmt: skip
