"""`perdure drill`: rehearse the loss of this machine from the store alone, kill on the way, and measure what it costs."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from perdure.cli import render
from perdure.cli.target import Target, add_target, resolve
from perdure.training.config import RunConfig, load_config
from perdure.training.errors import ConfigError, DrillFailed
from perdure.training.run_dir import CheckpointName

if TYPE_CHECKING:
    from perdure.training.drill.plan import Plan
    from perdure.training.drill.record import Drill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--from", dest="wanted", metavar="CHECKPOINT", help="this one instead of the newest that is good")
    parser.add_argument("--steps", type=int, metavar="N", help="train so many, twice; default drill.steps of the run.toml")
    parser.add_argument("--dry-run", action="store_true", help="say what would be pulled, trained and killed; do nothing")


def run(args: argparse.Namespace) -> int:
    from perdure.tasks import background, drilled
    from perdure.training.drill.drill import drill
    from perdure.training.drill.plan import plan

    target = resolve(args.target, args.set)
    config = _config(target, args)
    store, wanted = target.open_store(), _name(args.wanted)
    planned = plan(config, store, wanted, _steps(args, config))
    if planned.nothing or args.dry_run:
        _show_plan(args, planned, store.url)
        return 0
    background.yield_to_training()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    held = drill(config, args.set, store, wanted, planned, lambda text: _say(args, text))
    drills = drilled.keep(config.directory, held)
    _show(args, config, drills)
    return 0 if held.passed else DrillFailed.exit_code


def _config(target: Target, args: argparse.Namespace) -> RunConfig:
    """Training needs the run's own code: a run directory's run.toml must lie in one of the usual places."""
    from perdure.flows.attend import config_of

    path: Path | None = Path(args.target).absolute()
    if path is not None and path.is_dir():
        path = config_of(target.run)
    if path is None:
        raise ConfigError(f"{target.run.root}: the run.toml that writes to it was not found", "name the run.toml instead")
    return load_config(path, args.set)


def _name(text: str | None) -> CheckpointName | None:
    name = CheckpointName.parse(text) if text is not None else None
    if text is not None and name is None:
        raise ConfigError(f"--from {text!r} is not the name of a checkpoint", "names look like 000000000200-0001")
    return name


def _steps(args: argparse.Namespace, config: RunConfig) -> int:
    steps = config.drill.steps if args.steps is None else int(args.steps)
    if not 1 <= steps < 10**6:
        raise ConfigError(f"--steps {steps} is out of range", "use a few steps, 10 say")
    return steps


def _leave(number: int, _: object) -> NoReturn:
    """The folder is removed on the way out."""
    sys.exit(128 + number)


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(render.visible(text), file=sys.stderr, flush=True)


def _show_plan(args: argparse.Namespace, planned: "Plan", url: str) -> None:
    kills = [f"{kill.victim} at step {kill.step}" for kill in planned.kills]
    if args.json:
        render.print_json({
            "dry_run": args.dry_run, "nothing": planned.nothing or None, "store": url, "newest": _text(planned.newest),
            "resumed": _text(planned.start), "steps": planned.steps, "bytes": planned.bytes, "needed_bytes": planned.needed,
            "free_bytes": planned.free, "folder": planned.folder, "kills": kills,
        })  # fmt: skip
    elif planned.nothing:
        print(f"nothing to drill: {planned.nothing}")
    elif planned.start is None:
        print(f"would fail: {url} has no checkpoint that can be read, and the run has trained")
    else:
        print(f"would pull {planned.newest} ({render.size(planned.bytes)}) from {url} and prove it")
        print(f"would train {planned.steps} steps from {planned.start}, twice; killed the second time: {', '.join(kills)}")
        room = "enough" if planned.needed <= planned.free else "TOO LITTLE"
        print(f"needs {render.size(planned.needed)} in {planned.folder}, {render.size(planned.free)} are free: {room}")


def _text(name: CheckpointName | None) -> str | None:
    return str(name) if name else None


def _show(args: argparse.Namespace, config: RunConfig, drills: "list[Drill]") -> None:
    from perdure.tasks import drilled

    if args.json:
        render.print_json(_json(config, drills[-1]))
        return
    print(render.visible("\n".join([drilled.title(drills[-1]), *drilled.lines(drills)])))


def _json(config: RunConfig, held: "Drill") -> dict[str, Any]:  # Any: JSON values
    import msgspec

    return {"run_dir": str(config.run_dir), "dry_run": False, "nothing": None, **msgspec.to_builtins(held)} | {
        "recovery_secs": held.recovery_secs
    }
