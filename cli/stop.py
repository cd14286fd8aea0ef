"""`perdure stop`: ask whoever runs a run to save and stop, and wait until it is gone. The same `perdure run` goes on later."""

import argparse
import getpass
import time

from perdure.cli import render
from perdure.cli.target import add_target, resolve
from perdure.training import files
from perdure.training.agent import lock
from perdure.training.checkpoint import catalog
from perdure.training.errors import ConfigError, PerdureError, RunBusy
from perdure.training.run_dir import RunDir

POLL_SECS = 0.1


class NotRunning(PerdureError):
    """There is nothing to stop."""

    exit_code = 4
    hint = "see `perdure status RUN`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--reason", default="", help="shown in the log and in Slack")
    parser.add_argument("--no-wait", action="store_true", help="return when it is asked, not when it has stopped")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="how long to wait (default 120)")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.timeout < float("inf"):
        raise ConfigError(f"--timeout {args.timeout:g} is no waiting time", "give seconds")
    target = resolve(args.target, args.set)
    target.started()
    if not lock.is_held(target.run):
        raise NotRunning(f"{target.run.root} is not running")
    reason = args.reason or f"asked to stop by {getpass.getuser()}"
    files.write_atomically(target.run.stop_request, reason.encode("utf-8", "replace")[:500])
    if not args.no_wait:
        _wait(target.run, args.timeout)
    names = catalog.candidates(target.run)
    step = names[0].step if names else 0
    if args.json:
        render.print_json({"stopped": not args.no_wait, "step": step, "reason": reason})
    else:
        print(
            f"asked {target.run.root} to stop" if args.no_wait else f"{target.run.root} stopped; newest checkpoint: step {step}"
        )
    return 0


def _wait(run: RunDir, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while lock.is_held(run):
        if time.monotonic() > deadline:
            raise RunBusy(
                f"{run.root} still runs after {timeout:g} s; it stays asked to stop", "look again with `perdure status`"
            )
        time.sleep(POLL_SECS)
    files.remove(run.stop_request)  # or it would stop the next start
