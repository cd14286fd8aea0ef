"""Node 0 without a shared disk: where it goes on, from what the store knows, and when it must not."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import copy_tiny
from own_disks import NAME, Machines

from perdure.flows.start import Start, next_token, open_run
from perdure.training.checkpoint import facts
from perdure.training.checkpoint.lineage import read_launches
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.config import RunConfig, load_config
from perdure.training.errors import RunBusy, StoreConflict, StoreError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore

NEWER = CheckpointName(4, 1)
OWN_DISKS = ["launch.nodes=2", "launch.shared_disk=false", "run.dir=bare"]


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    found = Machines(tmp_path, FolderStore(tmp_path / "store"), "tiny")
    found.commit(NAME)
    found.commit(NEWER)
    return found


@pytest.fixture
def config(tmp_path: Path, machines: Machines) -> RunConfig:
    """Of a node 0 whose directory is not there."""
    return load_config(copy_tiny(tmp_path / "tiny"), [f"store.url={machines.store.url}", *OWN_DISKS, "launch.node_timeout=1"])


def start(config: RunConfig, machines: Machines) -> Start:
    return open_run(config, machines.store, replan=True)


def test_a_bare_node_0_goes_on_from_the_newest_and_brings_no_pack(config: RunConfig, machines: Machines) -> None:
    run = config.directory
    assert start(config, machines).resume == NEWER
    assert read_run_info(run).in_parts
    assert [path.name for path in run.checkpoint(NEWER).iterdir() if "rank" in path.name] == []
    assert {facts.trust(run, name) for name in (NAME, NEWER)} == {"replicated"}
    assert next_token(config, machines.store, Start(run_id="gpt-1234", resume=NEWER)).token == 2
    assert start(config, machines).resume == NEWER, "its own launch, which nobody has to wait for"


def test_one_that_lost_a_pack_in_the_store_is_quarantined_and_the_one_before_it_used(
    config: RunConfig, machines: Machines
) -> None:
    machines.store.delete([RunDir.checkpoint_key(NEWER, "rank-00001.pack")])
    assert start(config, machines).resume == NAME
    assert facts.trust(config.directory, NEWER) == "quarantined"


@pytest.fixture
def living(machines: Machines) -> Iterator[None]:
    """Node 0 of launch 1 trains on another machine."""
    over = threading.Event()

    def beat() -> None:
        count = 0
        while not over.wait(0.05):
            count += 1
            machines.store.put(RunDir.node_key(1, "progress.json"), str(count).encode())

    thread = threading.Thread(target=beat)
    machines.store.put(RunDir.node_key(1, "progress.json"), b"0")
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("living")
def test_while_node_0_lives_on_another_machine_there_is_no_second_one(config: RunConfig, machines: Machines) -> None:
    patient = load_config(config.path, [f"store.url={machines.store.url}", *OWN_DISKS, "launch.node_timeout=60"])
    with pytest.raises(RunBusy, match="node 0 of launch 1 is alive on a"):
        start(patient, machines)


def test_a_directory_of_another_history_is_refused(config: RunConfig, machines: Machines) -> None:
    start(config, machines)
    record = config.directory.launch_record(1)
    record.write_text(record.read_text().replace('"owner":"o"', '"owner":"x"'))
    with pytest.raises(StoreConflict, match="launch 1 is another one"):
        start(config, machines)


def test_no_launch_begins_without_the_store(config: RunConfig, machines: Machines) -> None:
    begun = start(config, machines)
    root = machines.folder / "store"
    shutil.rmtree(root)
    root.write_bytes(b"no folder")
    with pytest.raises(StoreError):
        next_token(config, machines.store, begun)
    with pytest.raises(StoreError):
        start(config, machines)
    assert set(read_launches(config.directory)) == {1}
