"""`perdure pull`: bring a run back from its store to a machine that has nothing but the URL."""

import argparse
from pathlib import Path

from perdure.cli import render
from perdure.cli.target import open_store
from perdure.training.agent.lock import RunLock
from perdure.training.checkpoint import lineage
from perdure.training.errors import CheckpointNotFound, ConfigError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.store_settings import StoreSettings

_OF_A_PULL = ("lock", "events.jsonl", "launches", "checkpoints")
"""What a pull that died may have left."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the run's store: s3://bucket/prefix, or file:///folder")
    parser.add_argument("dir", metavar="DIR", help="run directory to fill; new, empty, or of the same run")
    parser.add_argument("--name", metavar="NAME", help="this checkpoint instead of the newest that verifies")
    parser.add_argument("--endpoint-url", default="", metavar="URL", help="S3 endpoint other than AWS")
    parser.add_argument("--region", default="", help="S3 region")
    parser.add_argument("--addressing", default="auto", choices=("auto", "path", "virtual"), help="as store.addressing")
    parser.add_argument("--dry-run", action="store_true", help="list what the store has")


def run(args: argparse.Namespace) -> int:
    from perdure.training.travel.pull import pull, remote_checkpoints

    for metavar, text in (("URL", args.url), ("DIR", args.dir)):
        if not text.strip():
            raise ConfigError(f"{metavar} is empty", "see `perdure pull --help`")
    store = open_store(
        _absolute(args.url),
        StoreSettings(endpoint_url=args.endpoint_url, region=args.region, addressing=args.addressing),
    )
    wanted = _parse(args.name)
    if args.dry_run:
        names = [str(name) for name in remote_checkpoints(store)]
        if args.json:
            render.print_json({"url": store.url, "checkpoints": names, "dry_run": True})
        else:
            print("\n".join(names) if names else f"{store.url} has no checkpoint")
        return 0
    run_dir = RunDir(Path(args.dir).absolute())
    _check_free(run_dir)
    with RunLock.acquire(run_dir, orphan_wait=0), render.Progress(store.url, 0, quiet=args.json) as progress:
        name = pull(store, run_dir, name=wanted, progress=progress.at)
    if args.json:
        render.print_json({"url": store.url, "run_dir": str(run_dir.root), "name": str(name), "step": name.step})
    else:
        print(
            f"pulled checkpoint {name} of {store.url} into {run_dir.root}, {len(lineage.read_launches(run_dir))} launch records"
        )
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
    foreign = [path.name for path in run.root.iterdir() if path.name not in _OF_A_PULL] if run.root.is_dir() else []
    if foreign and not run.run_json.exists():
        raise CheckpointNotFound(f"{run.root} is not empty and holds no run", "name a new folder")
