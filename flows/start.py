"""Where a run goes on: its identity (local, or adopted from the store), the newest checkpoint that verifies, the next token."""

import os
import socket
import time
from dataclasses import dataclass

from perdure.tasks.verify import prove
from perdure.training import events, files
from perdure.training.agent.courier import beats
from perdure.training.checkpoint import catalog, facts, manifest
from perdure.training.checkpoint.lineage import LaunchRecord, read_launches
from perdure.training.checkpoint.run_info import create_run_info, follow_store, keep_in_parts, read_run_info
from perdure.training.config import RunConfig, changed_settings
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, RunBusy, StoreError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.catch_up import catch_up
from perdure.training.travel.fence import claim_run, take_token
from perdure.training.travel.places import reading_order
from perdure.training.travel.pull import pull_from


@dataclass(frozen=True, kw_only=True)
class Start:
    run_id: str
    resume: CheckpointName | None

    @property
    def step(self) -> int:
        return self.resume.step if self.resume else 0


def open_run(config: RunConfig, store: ObjectStore | None, *, replan: bool) -> Start:
    """Open the run directory (or bring the run back from its store) and choose where to resume.

    Raises CheckpointDamaged when there are checkpoints and none is good; ConfigError when trajectory settings differ."""
    run = config.directory
    files.make_dirs(run.checkpoints)
    files.make_dirs(run.launches)
    if store is not None and not config.launch.shared_disk:
        _open_in_parts(config, run, store)
    elif not run.run_json.exists():
        _adopt_or_create(config, run, store)
    if before := follow_store(run, config):
        events.record(
            run, "notice", text=f"copies go to {config.store_url or 'no store'} from now on; those in {before} stay there"
        )
    resume = _newest_good(run)
    if resume is not None:
        _check_settings(config, run, resume, replan)
    return Start(run_id=read_run_info(run).id, resume=resume)


def _open_in_parts(config: RunConfig, run: RunDir, store: ObjectStore) -> None:
    """The store has the last word of everything. Raises StoreError, RunBusy where node 0 lives on another machine."""
    ours = max(read_launches(run), default=0)
    if catch_up(config, store, lambda text: events.record(run, "notice", text=text[:2000])):
        newest = max(read_launches(run), default=0)
        if newest > ours and beats(store, newest, config.launch.node_timeout):
            host = read_launches(run)[newest].host
            raise RunBusy(f"{store.url}: node 0 of launch {newest} is alive on {host}", "stop it there first")
        return
    if not run.run_json.exists():
        _create(config, run)
    claim_run(run, store)
    keep_in_parts(run, config)


def _adopt_or_create(config: RunConfig, run: RunDir, store: ObjectStore | None) -> None:
    """A missing run directory with a place that knows the run is a lost node: bring back the newest there is."""
    places = [place for place in reading_order(config) if store is not None or place.word != facts.STORE]
    if places:
        try:
            name, place = pull_from(places, run, called=config.run.name)
            text = f"run directory was empty: brought back checkpoint {name} from {place.store.url}"
            events.record(run, "notice", text=text)
            return
        except CheckpointNotFound:
            if run.run_json.exists():
                return
    _create(config, run)
    if store is not None:
        try:
            claim_run(run, store)
        except StoreError as error:
            if not error.retryable:
                run.run_json.unlink()
                raise
            events.record(run, "push_failed", step=0, error=error.in_one_line()[:1000], retryable=True)


def _create(config: RunConfig, run: RunDir) -> None:
    info = create_run_info(run, config)
    events.record(run, "run_created", id=info.id, name=info.name, steps=info.steps, chunk=info.chunk)


def _newest_good(run: RunDir) -> CheckpointName | None:
    """The newest candidate that verifies now; damaged ones are quarantined on the way."""
    candidates = catalog.candidates(run)
    for name in candidates:
        if prove(run, name, threads=len(os.sched_getaffinity(0))):  # nothing trains yet
            return name
    if catalog.has_checkpoints(run):
        raise CheckpointDamaged(
            f"{run.root}: no checkpoint of this run verifies (see `perdure verify {run.root}`)",
            hint="bring one back with `perdure pull URL NEW_DIR`, or start anew with another run.dir",
        )
    return None


def _check_settings(config: RunConfig, run: RunDir, resume: CheckpointName, replan: bool) -> None:
    if replan:
        return
    old, new = dict(manifest.read(run.checkpoint(resume)).config), config.trajectory()
    if resume.step >= config.run.steps:  # complete under fewer steps as well
        old.pop("steps", None)
        new.pop("steps")
    changed = changed_settings(old, new)
    if changed:
        raise ConfigError(
            f"{config.path}: settings that decide the weights differ from checkpoint {resume}: {'; '.join(changed)}",
            "put them back, or accept and record the change with --replan",
        )


def next_token(config: RunConfig, store: ObjectStore | None, start: Start) -> LaunchRecord:
    """Take the next launch token, here and in the store."""
    return take_token(
        config.directory,
        store,
        run_id=start.run_id,
        resumed_from=str(start.resume) if start.resume else None,
        created=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        store_needed=not config.launch.shared_disk,
    )
