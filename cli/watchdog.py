"""`perdure watchdog`: find runs that died without a word, end what is left of them, have them go on."""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.cli import render
from perdure.cli.target import resolve
from perdure.deployments import server
from perdure.training import files
from perdure.training.errors import CheckpointNotFound, ConfigError
from perdure.training.run_dir import RunDir

if TYPE_CHECKING:
    from perdure.flows.attend import Attended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", nargs="+", metavar="RUN_OR_FOLDER", help="run directories, run.tomls, or folders of runs")
    parser.add_argument(
        "--patience", type=float, default=30.0, metavar="SECS", help="seconds between the two looks; default 30, at least 2"
    )
    parser.add_argument("--restart", action="store_true", help="start `perdure run` for a dead run that has no deployment")
    parser.add_argument("--dry-run", action="store_true", help="say what is dead and what would follow, do nothing")


def run(args: argparse.Namespace) -> int:
    from perdure.flows.attend import Means, watch

    if args.patience < 2:
        raise ConfigError(f"--patience {args.patience:g} is too short to tell a slow run from a dead one", "use 2 or more")
    runs = runs_of(args.targets)
    with _client() as client:
        means = Means(client=client, detach=_detach if args.restart else None, dry_run=args.dry_run)
        attended = watch(runs, args.patience, means)
    if args.json:
        render.print_json({"dry_run": args.dry_run, "runs": [_json(one) for one in attended]})
        return 0
    render.table(
        ("run", "state", "reason", "action"), [(o.run.root, o.verdict.state, o.verdict.reason, o.action) for o in attended]
    )
    if not any(one.verdict.needs_help for one in attended):
        print(f"nothing to do: {render.counted(len(attended), 'run')}, none dead")
    return 0


def runs_of(targets: Sequence[str]) -> list[RunDir]:
    """Every run that is named or lies in a named folder, once. Raises CheckpointNotFound when there is none."""
    from perdure.training.watchdog import find_runs

    found: dict[Path, RunDir] = {}
    for text in targets:
        path = Path(text).absolute()
        inside = find_runs(path) if text.strip() and path.is_dir() else []
        if not inside:
            target = resolve(text)
            target.started()
            inside = [target.run]
        found |= {run.root.resolve(): run for run in inside}
    if not found:
        raise CheckpointNotFound(f"no run in {', '.join(targets)}")
    return list(found.values())


@contextlib.contextmanager
def _client() -> Iterator[Any]:  # Any: Prefect's client, or None
    """Of the server the environment names; without one nothing in Prefect can be closed or started."""
    if not server.api_url_from_environment():
        yield None
        return
    from perdure.deployments import api

    api.prepare()
    with api.connected() as client:
        yield client


def _detach(config: Path) -> int:
    """`perdure run` in a session of its own; its output is in the run's logs/. Two at once are one: the other is refused."""
    from perdure.training.config import load_config

    log_path = load_config(config).directory.flow_log.with_name("run.log")
    files.make_dirs(log_path.parent)
    with files.open_private(log_path) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "perdure.cli", "run", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={name: value for name, value in os.environ.items() if not name.startswith("PERDURE_FAIL")},
            start_new_session=True,
        )
    process.returncode = 0  # it outlives this command, which does not wait for it
    return process.pid


def _json(one: "Attended") -> dict[str, Any]:  # Any: JSON values
    return {
        "run_dir": str(one.run.root), "state": one.verdict.state, "reason": one.verdict.reason, "action": one.action,
        "flow_run": one.flow_run or None,
    }  # fmt: skip
