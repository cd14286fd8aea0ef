"""What a verb is pointed at: a run directory, or the run.toml that describes it. Everything else is refused with a sentence."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.training.checkpoint import facts
from perdure.training.checkpoint.run_info import RunInfo, read_run_info
from perdure.training.config import RunConfig, load_config
from perdure.training.errors import CheckpointNotFound, ConfigError
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.store_settings import StoreSettings

if TYPE_CHECKING:
    from perdure.training.storage.store import ObjectStore
    from perdure.training.travel.copies import Stored


@dataclass(frozen=True, kw_only=True)
class Target:
    run: RunDir
    info: RunInfo | None
    """None: the run of this run.toml has not started."""
    steps: int
    name: str
    store_url: str
    store: StoreSettings
    retention: RetentionSection | None = None
    """Of the run.toml; None: the target is a run directory, which does not say."""
    config: RunConfig | None = None
    """The run.toml; None: the target is a run directory."""

    @property
    def places(self) -> list[str]:
        """Where copies go besides the run directory, as far as the target says."""
        return [*([facts.STORE] if self.store_url else []), *(self.config.tiers if self.config else ())]

    def started(self) -> RunInfo:
        """The run's info. Raises CheckpointNotFound when it has none yet."""
        if self.info is None:
            raise CheckpointNotFound(
                f"{self.run.root} holds no run: it has not started", "start it with `perdure run RUN.TOML`"
            )
        return self.info

    def open_store(self) -> "ObjectStore":
        """The run's store. Raises ConfigError when it has none."""
        if not self.store_url:
            raise ConfigError(
                f"the run in {self.run.root} has no store", "set store.url in its run.toml, or --set store.url=..."
            )
        if self.store_url == self.run.root.resolve().as_uri():
            raise ConfigError(
                f"{self.run.root} is the store of run {self.name}, not its directory", "bring the run back with `perdure pull`"
            )
        return open_store(self.store_url, self.store)

    def reading_order(self) -> "list[Stored]":
        """The places besides the run directory, as far as the target says, in the order in which they are read."""
        from perdure.training.travel.copies import Stored
        from perdure.training.travel.places import reading_order

        if self.config is not None:
            return reading_order(self.config)
        return [Stored(self.open_store(), facts.STORE)] if self.store_url else []


def open_store(url: str, settings: StoreSettings) -> "ObjectStore":
    from perdure.training.storage import store

    return store.open_store(url, settings)


def add_target(parser: argparse.ArgumentParser, what: str = "a run directory, or its run.toml") -> None:
    parser.add_argument("target", metavar="RUN", help=what)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting of the run.toml, e.g. store.url=s3://b/p",
    )


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """How a store is reached that is named by its URL alone."""
    parser.add_argument("--endpoint-url", default="", metavar="URL", help="S3 endpoint other than AWS")
    parser.add_argument("--region", default="", help="S3 region")
    parser.add_argument("--addressing", default="auto", choices=("auto", "path", "virtual"), help="as store.addressing")


def store_at(url: str, args: argparse.Namespace) -> "ObjectStore":
    return open_store(url, StoreSettings(endpoint_url=args.endpoint_url, region=args.region, addressing=args.addressing))


def add_selection(parser: argparse.ArgumentParser, what: str) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, metavar="N", help=f"{what} of this step (of the present history)")
    group.add_argument("--name", metavar="NAME", help=f"{what} of this name, e.g. 000000000200-0001")


def resolve(text: str, overrides: Sequence[str] = ()) -> Target:
    """The run that `text` names. Raises CheckpointNotFound or ConfigError."""
    if not text.strip():
        raise ConfigError("RUN is empty", "name a run directory or a run.toml")
    if "://" in text:
        raise ConfigError(f"{text} is a store, not a run directory", "bring the run here with `perdure pull URL DIR`")
    path = Path(text).absolute()
    if path.is_dir():
        return _of_directory(path, overrides)
    if not path.exists() and path.suffix != ".toml":
        raise CheckpointNotFound(f"{path} does not exist", "name a run directory or a run.toml")
    if path.suffix != ".toml":
        inside = " (name its folder instead)" if path.name in ("run.json", "events.jsonl", "progress.json") else ""
        raise ConfigError(f"{path} is neither a run directory nor a run.toml{inside}", "name a run directory or a run.toml")
    return _of_config(path, overrides)


def _of_directory(path: Path, overrides: Sequence[str]) -> Target:
    if overrides:
        raise ConfigError(f"--set {overrides[0]}: {path} is a run directory", "--set needs a run.toml as target")
    run = RunDir(path)
    if not run.run_json.exists():
        raise CheckpointNotFound(f"{path} holds no run (no run.json)", _better(path))
    info = read_run_info(run)
    run = RunDir(path, info.store_url)
    return Target(run=run, info=info, steps=info.steps, name=info.name, store_url=info.store_url, store=info.store)


def _better(path: Path) -> str:
    """What may have been meant by a folder that holds no run."""
    if (path / "run.toml").is_file():
        return f"name {path / 'run.toml'}, or the run directory it writes to"
    if path.name == "checkpoints" or CheckpointName.parse(path.name):
        return "name the run directory, the folder with run.json in it"
    runs = sorted(child.name for child in path.iterdir() if (child / "run.json").is_file())
    return f"runs in it: {', '.join(runs[:10])}" if runs else "name a run directory or a run.toml"


def _of_config(path: Path, overrides: Sequence[str]) -> Target:
    config = load_config(path, overrides)
    run = config.directory
    info = read_run_info(run) if run.run_json.exists() else None
    return Target(
        run=run, info=info, steps=config.run.steps, name=config.run.name, store_url=config.store_url, store=config.store,
        retention=config.retention, config=config,
    )  # fmt: skip


def select(
    where: object, names: Sequence[CheckpointName], lineage: Sequence[CheckpointName], args: argparse.Namespace
) -> CheckpointName:
    """The checkpoint that --step or --name asks for. Raises CheckpointNotFound, listing what there is at `where`."""
    if args.name is not None:
        found = next((name for name in names if str(name) == args.name), None)
        wanted = f"checkpoint {args.name}"
    else:
        found = next((name for name in lineage if name.step == args.step), None)
        wanted = f"checkpoint of step {args.step}"
    if found is None:
        steps = [str(name.step) for name in reversed(lineage)]
        shown = ", ".join(steps if len(steps) <= 8 else [*steps[:3], "...", *steps[-4:]])
        raise CheckpointNotFound(f"{where} has no {wanted}", f"steps it has: {shown}" if steps else "it has no checkpoint yet")
    return found
