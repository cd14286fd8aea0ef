"""`perdure pin`: give a checkpoint a name as a milestone; it is never deleted until `--remove` takes the name away."""

import argparse
from pathlib import Path

from perdure.cli import render
from perdure.cli.target import Target, resolve
from perdure.training.checkpoint import catalog, facts, lineage, pins
from perdure.training.errors import CheckpointNotFound, ConfigError
from perdure.training.run_dir import CheckpointName


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="RUN[@STEP]", help="a run directory or its run.toml; by default its newest verified checkpoint"
    )
    parser.add_argument("name", metavar="NAME", help="the milestone: letters, digits, `.`, `_`, `-`")
    parser.add_argument("--remove", action="store_true", help="take the milestone NAME away; its checkpoint may go then")


def run(args: argparse.Namespace) -> int:
    text, wanted = _split(args.target)
    target = resolve(text)
    target.started()
    if args.remove:
        if wanted:
            raise ConfigError(f"@{wanted}: a milestone is removed by its name alone", f"perdure pin --remove {text} NAME")
        pins.unpin(target.run, args.name)
        return _say(args, target, None, f"{args.name} is no milestone any more")
    name = _chosen(target, wanted)
    new = pins.pin(target.run, args.name, name)
    return _say(args, target, name, f"{'pinned' if new else 'already pinned:'} {name} as {args.name}")


def _say(args: argparse.Namespace, target: Target, name: CheckpointName | None, text: str) -> int:
    if args.json:
        told = {"checkpoint": str(name) if name else None, "step": name.step if name else None}
        render.print_json({"run_dir": str(target.run.root), "milestone": args.name, **told, "removed": name is None})
    else:
        print(text)
    return 0


def _split(text: str) -> tuple[str, str]:
    if Path(text).exists() or "@" not in text:
        return text, ""
    path, _, wanted = text.rpartition("@")
    return path, wanted


def _chosen(target: Target, wanted: str) -> CheckpointName:
    """Of the present history for a step; any of this name."""
    if not wanted:
        newest = catalog.newest_with(target.run, facts.GOOD)
        if newest is None:
            raise CheckpointNotFound(f"{target.run.root} has no verified checkpoint", "name one: RUN@STEP; see `perdure ls`")
        return newest
    if named := CheckpointName.parse(wanted):
        return named
    if not wanted.isascii() or not wanted.isdigit():
        raise ConfigError(
            f"@{wanted} is neither a step nor the name of a checkpoint", "write RUN@200, or RUN@000000000200-0001"
        )
    found = next((name for name in lineage.lineage(target.run) if name.step == int(wanted)), None)
    if found is None:
        raise CheckpointNotFound(f"{target.run.root} has no checkpoint of step {wanted}", "see `perdure ls`")
    return found
