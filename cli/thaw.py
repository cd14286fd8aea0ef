"""What the verbs say of copies that have to be thawed before they are read: asked for, waited for, shown."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.cli import render
from perdure.cli.target import Target
from perdure.training.checkpoint.thaws import Thaw, read_thaws
from perdure.training.errors import ConfigError, NeedsThaw
from perdure.training.run_dir import CheckpointName, RunDir

if TYPE_CHECKING:
    from perdure.training.travel.copies import Stored

Result = TypeVar("Result")
Told = dict[str, Any]  # Any: JSON values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a verb that reads."""
    parser.add_argument("--thaw", action="store_true", help="where it lies frozen: ask for it (billed, takes hours)")
    parser.add_argument("--wait", action="store_true", help="with --thaw: wait until it can be read")


def reading(args: argparse.Namespace, run: RunDir | None, places: "Sequence[Stored]", action: Callable[[], Result]) -> Result:
    """What `action` gives, with a thaw before it where that is needed and asked for."""
    from perdure.training.travel import thaw

    return thaw.reading(action, run, places, asks=args.thaw, waits=args.wait, say=render.say)


def of_tier(args: argparse.Namespace, target: Target) -> int:
    """`archive --thaw NAME`: ask once, say how far it is each time; 0 when it can be read."""
    from perdure.training.travel import thaw
    from perdure.training.travel.places import reading_order

    name = CheckpointName.parse(args.thaw)
    if target.config is None:
        raise ConfigError(f"--thaw: {target.run.root} does not say which tiers it has", "name its run.toml")
    if name is None:
        raise ConfigError(f"--thaw {args.thaw!r} is not the name of a checkpoint", "names look like 000000000200-0001")
    if args.days < 1:
        raise ConfigError(f"--days {args.days} is less than 1", "say for how many days it shall be readable")
    place = thaw.copy_of(reading_order(target.config), name)
    answer: Told = {"run_dir": str(target.run.root), "name": str(name), "place": place.word}
    if args.dry_run:
        answer |= {"state": thaw.look(place, name).state, "dry_run": True}
        render.print_json(answer) if args.json else print(line(answer))
        return 0
    found = thaw.ask(target.run, place, name, days=args.days, speed=args.speed)
    if found is not None and args.wait:
        found = thaw.wait(target.run, place, name, found)
    shown = describe(found) if found else {"state": "readable"}
    if args.json:
        render.print_json(answer | shown)
    else:
        print(line(shown) if found else f"checkpoint {name} can be read in {place.word}: nothing to thaw")
    return 0 if found is None or found.state == "thawed" else NeedsThaw.exit_code


def describe(thaw: Thaw) -> Told:
    """The JSON object of a thaw."""
    return {
        "name": thaw.checkpoint, "place": thaw.place, "state": thaw.state, "asked_at": thaw.asked_at,
        "checked_at": thaw.checked_at, "until": thaw.until or None,
    }  # fmt: skip


def line(told: Told) -> str:
    """What people read."""
    return f"checkpoint {told['name']} in {told['place']} is {state(told)}"


def state(told: Told) -> str:
    """`frozen`, `thawing, asked 3 h ago, looked at 5 min ago`, `thawed until 2026-12-09 10:00:00`."""
    if told["state"] != "thawing":
        return str(told["state"]) + (f" until {render.when(told['until'])}" if told.get("until") else "")
    asked, looked = (render.age(time.time() - told[moment]) for moment in ("asked_at", "checked_at"))
    return f"thawing, asked {asked} ago, looked at {looked} ago"


def states(run: RunDir) -> dict[tuple[str, str], Told]:
    """By place and name of the checkpoint: what was asked for and is not over."""
    return {(thaw.place, thaw.checkpoint): describe(thaw) for thaw in read_thaws(run)}
