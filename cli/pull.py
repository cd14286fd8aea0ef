"""`perdure pull`: bring a run back from its store, or the other places of its run.toml, to a machine that has nothing else."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.cli import render, thaw
from perdure.cli.target import add_endpoint, store_at
from perdure.training.agent.lock import RunLock
from perdure.training.checkpoint import facts, lineage
from perdure.training.checkpoint.upkeep import await_upkeep
from perdure.training.config import load_config
from perdure.training.errors import CheckpointNotFound, ConfigError
from perdure.training.run_dir import CheckpointName, RunDir

if TYPE_CHECKING:
    from perdure.training.travel.copies import Stored
    from perdure.training.travel.pull import Pulled

_OF_A_START = (
    *("lock", "upkeep.lock", "slack.lock", "slack.json", "events.jsonl", "flow-runs", "logs"),
    *("launches", "checkpoints", "pins", "thaws"),
)
"""What a pull that died may have left, or a `perdure run` that could not bring the run back."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="URL", help="the run's store: s3://bucket/prefix, or file:///folder; or a run.toml: its tiers and store"
    )
    parser.add_argument("dir", metavar="DIR", nargs="?", help="run directory to fill; new, empty, or of the same run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of the run.toml")
    parser.add_argument("--name", metavar="NAME", help="this checkpoint instead of the newest that verifies")
    add_endpoint(parser)
    thaw.add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="list what the store has")


def run(args: argparse.Namespace) -> int:
    from perdure.training.travel.pull import pull_from

    for metavar, text in (("URL", args.url), ("DIR", args.dir)):
        if text is not None and not text.strip():
            raise ConfigError(f"{metavar} is empty", "see `perdure pull --help`")
    places, run_dir = _places(args)
    wanted = _parse(args.name)
    if args.dry_run:
        return _list(args, places)
    _check_free(run_dir)
    with RunLock.acquire(run_dir, orphan_wait=0), render.Progress("pull", 0, quiet=args.json) as progress:

        def bring() -> "Pulled":
            with await_upkeep(run_dir):
                return pull_from(places, run_dir, name=wanted, progress=progress.at)

        name, place = thaw.reading(args, run_dir, places, bring)
    launches = len(lineage.read_launches(run_dir))
    if args.json:
        answer = {"url": place.store.url, "place": place.word, "run_dir": str(run_dir.root), "name": str(name)}
        render.print_json({**answer, "step": name.step})
    else:
        print(f"pulled checkpoint {name} of {place.store.url} into {run_dir.root}, {launches} launch records")
    return 0


def _places(args: argparse.Namespace) -> "tuple[list[Stored], RunDir]":
    """Where to read, in order, and what to fill."""
    from perdure.training.travel.copies import Stored
    from perdure.training.travel.places import reading_order

    if args.url.endswith(".toml") and "://" not in args.url:
        config = load_config(Path(args.url).absolute(), args.set)
        places = reading_order(config)
        if not places:
            raise ConfigError(f"{config.path} names no store and no tier", "set store.url, or name a URL")
        return places, RunDir(Path(args.dir).absolute() if args.dir else config.run_dir)
    if args.dir is None:
        raise ConfigError("DIR is missing", "a URL needs the folder that is to be filled: `perdure pull URL DIR`")
    if args.set:
        raise ConfigError(f"--set {args.set[0]}: {args.url} is no run.toml", "--set needs a run.toml")
    return [Stored(store_at(_absolute(args.url), args), facts.STORE)], RunDir(Path(args.dir).absolute())


def _list(args: argparse.Namespace, places: "list[Stored]") -> int:
    from perdure.training.travel.contents import remote_checkpoints

    held = [(place, [str(name) for name in remote_checkpoints(place.store)]) for place in places]
    if args.json:
        every = sorted({name for _, names in held for name in names})
        by_place = {place.word: names for place, names in held}
        render.print_json({"url": places[0].store.url, "checkpoints": every, "places": by_place, "dry_run": True})
        return 0
    for place, names in held:
        if len(held) > 1:
            print(f"{place.word} ({place.store.url}):")
        print("\n".join(names) if names else f"{place.store.url} has no checkpoint")
    return 0


def _absolute(url: str) -> str:
    return url if "://" in url else Path(url).absolute().as_uri()


def _parse(text: str | None) -> CheckpointName | None:
    name = CheckpointName.parse(text) if text is not None else None
    if text is not None and name is None:
        raise ConfigError(f"--name {text!r} is not the name of a checkpoint", "names look like 000000000200-0001")
    return name


def _check_free(run: RunDir) -> None:
    if run.root.exists() and not run.root.is_dir():
        raise ConfigError(f"{run.root} is not a folder", "name a new one")
    foreign = [path.name for path in run.root.iterdir() if path.name not in _OF_A_START] if run.root.is_dir() else []
    if foreign and not run.run_json.exists():
        raise CheckpointNotFound(f"{run.root} is not empty and holds no run", "name a new folder")
