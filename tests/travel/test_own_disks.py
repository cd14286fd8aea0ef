"""Nodes with a disk each: what they tell each other goes through the store, and so does every byte of what the other wrote."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from own_disks import NAME, Machines
from snapshots import RUN_ID, random_bytes

from perdure.training import files
from perdure.training.agent import courier, roster
from perdure.training.agent.courier import Apart, Courier
from perdure.training.agent.roster import Beat, Held, Others
from perdure.training.checkpoint import catalog, facts
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.glance import glance
from perdure.training.checkpoint.nodes import clear_old
from perdure.training.checkpoint.parted import is_part
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.checkpoint.shelf import Shelf
from perdure.training.checkpoint.verify import check, look_through, verify_folder, verify_in_run
from perdure.training.errors import CheckpointDamaged, StoreConflict
from perdure.training.launch_settings import LaunchSection
from perdure.training.process import identify
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore
from perdure.training.travel import scrub_plan
from perdure.training.travel.copies import Stored
from perdure.training.travel.fence import record_launch
from perdure.training.travel.pull import pull


@pytest.fixture
def machines(tmp_path: Path, store: ObjectStore, s3_keys: Any) -> Machines:
    return Machines(tmp_path, store)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "POLL_SECS", 0.02)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_each_writes_its_own_packs_and_reads_those_of_the_other_from_the_store(machines: Machines) -> None:
    found = machines.commit(NAME)
    zero, one = machines.runs
    assert machines.files(0) == {"rank-00000.pack", "rank-00000.index", "rank-00001.index", MANIFEST, "check-store.json"}
    assert {"rank-00001.pack", "rank-00001.index"} <= machines.files(1)
    assert MANIFEST not in machines.files(1)
    assert [item.key for item in machines.store.list("nodes/")] == [], "what they told each other of it is gone"
    sizes = [record.bytes for record in found.files[::2]]
    with open_checkpoint(zero.checkpoint(NAME)) as reader:
        for number in (0, 1):
            assert bytes(reader.read(f"piece%at/{number}", number)) == random_bytes(number, 50_000)
        assert 50_000 <= reader.fetched < sizes[1], "the piece, not the pack"
    Shelf(one, machines.store, NAME).adopt(RUN_ID)
    with open_checkpoint(one.checkpoint(NAME)) as reader:
        assert bytes(reader.read("piece%at/1", 1)) == random_bytes(1, 50_000)
        assert reader.fetched == 0, "nothing of the other"
    for run in machines.runs:
        assert is_part(run, NAME)
        assert facts.trust(run, NAME) == "replicated"
        assert look_through(run, NAME) == verify_in_run(run, NAME) == glance(run, [NAME], RUN_ID)[NAME] == []
        assert check(run, NAME).result == "good"
        assert facts.read_fact(run, NAME, facts.LOCAL) is None, "there is no whole copy here"
        [listed] = catalog.list_checkpoints(run)
        assert (listed.is_here, listed.places) == (False, ("store",))
        assert catalog.leftovers(run) == []
        assert [copy.place for copy in scrub_plan.survey(run, [Stored(machines.store)]).copies] == ["store"]


def test_rot_of_what_is_here_is_read_past_and_rot_in_the_store_is_named(machines: Machines) -> None:
    machines.commit(NAME)
    zero = machines.runs[0]
    for file in ("rank-00000.pack", "rank-00000.index"):
        flip(zero.checkpoint(NAME) / file)
    assert verify_in_run(zero, NAME) == []
    with open_checkpoint(zero.checkpoint(NAME)) as reader:
        assert bytes(reader.read("piece%at/0", 0)) == random_bytes(0, 50_000)
    whole = msgspec.structs.replace(read_run_info(zero), in_parts=False)
    files.write_atomically(zero.run_json, msgspec.json.encode(whole))
    assert {damage.part for damage in verify_folder(zero.checkpoint(NAME))} >= {"index", "pack"}, "one disk: that is damage"
    files.write_atomically(zero.run_json, msgspec.json.encode(msgspec.structs.replace(whole, in_parts=True)))
    key = RunDir.checkpoint_key(NAME, "rank-00001.pack")
    data = bytearray(machines.store.get(key, limit=1 << 30))
    data[len(data) // 2] ^= 1
    machines.store.put(key, bytes(data))
    assert [damage.part for damage in verify_in_run(zero, NAME)], "read to the end"
    machines.store.put(key, bytes(data[:-1]))
    assert [damage.part for damage in look_through(zero, NAME)] == ["pack"]
    assert check(zero, NAME).result == "damaged"
    assert facts.trust(zero, NAME) == "quarantined"


def test_a_pull_makes_a_whole_copy_of_it(machines: Machines, tmp_path: Path) -> None:
    machines.commit(NAME)
    there = RunDir(tmp_path / "there")
    assert pull(machines.store, there) == NAME
    assert not read_run_info(there).in_parts
    assert verify_in_run(there, NAME) == []
    (there.checkpoint(NAME) / "rank-00001.pack").unlink()
    assert [damage.part for damage in verify_in_run(there, NAME)] == ["pack"]


def test_a_bare_node_writes_against_a_base_that_it_never_had(machines: Machines) -> None:
    full = machines.commit(NAME)
    shutil.rmtree(machines.runs[1].root)
    machines.runs[1] = machines.bare(1)
    increment = machines.commit(CheckpointName(4, 1), full=False)
    assert increment.base_name == NAME
    assert increment.stored_bytes < full.stored_bytes / 3
    assert machines.files(1) == {MANIFEST, "check-store.json"}, "of the base no pack was brought"
    assert verify_in_run(machines.runs[0], increment.name) == []


def test_a_node_keeps_the_base_and_the_newest(machines: Machines) -> None:
    for step in (2, 4, 6, 8):
        machines.commit(CheckpointName(step, 1), full=step == 2)
    names = [CheckpointName(step, 1) for step in (2, 6, 8)]
    assert sorted(path.name for path in machines.runs[1].checkpoints.iterdir()) == list(map(str, names))
    clear_old(machines.runs[1], {CheckpointName(10, 1)})
    assert sorted(path.name for path in machines.runs[1].checkpoints.iterdir()) == [str(CheckpointName(8, 1))]
    assert len(list(machines.runs[0].checkpoints.iterdir())) == 4, "node 0's go by its retention"


def test_of_two_that_commit_under_one_name_one_wins_and_the_same_may_try_again(machines: Machines, tmp_path: Path) -> None:
    found = machines.commit(NAME)
    again = msgspec.structs.replace(found, created=found.created + 1)
    shelf = Shelf(machines.runs[0], machines.store, NAME)
    assert shelf.commit(again) == found, "an earlier try had come through"
    other = msgspec.structs.replace(found, state_digest="0" * 64)
    with pytest.raises(StoreConflict, match="another checkpoint"):
        shelf.commit(other)
    assert manifests.parse(machines.store.get(RunDir.checkpoint_key(NAME, MANIFEST), limit=1 << 20), "there") == found

    for record in found.files:
        data = machines.store.get(RunDir.checkpoint_key(NAME, record.name), limit=1 << 30)
        machines.store.put(RunDir.checkpoint_key(CheckpointName(6, 1), record.name), data)

    def first(number: int) -> bool:
        name, run = CheckpointName(6, 1), RunDir(tmp_path / f"racer-{number}")
        files.make_dirs(run.checkpoint(name))
        ours = msgspec.structs.replace(found, step=6, state_digest=f"{number:064x}")
        try:
            Shelf(run, machines.store, name).commit(manifests.parse(manifests.seal(ours), "ours"))
        except StoreConflict:
            return False
        return True

    with ThreadPoolExecutor() as pool:
        assert sum(pool.map(first, range(4))) == 1


def test_a_part_that_the_store_does_not_have_is_never_committed(machines: Machines) -> None:
    zero = machines.runs[0]
    couriers = [Courier(run, 1, number, machines.store) for number, run in enumerate(machines.runs)]
    with ThreadPoolExecutor() as pool:
        one, failing = pool.submit(machines.share, 1, NAME), None
        while not machines.runs[1].offer(NAME, 1).exists():
            pass
        failing = pool.submit(machines.share, 0, NAME)
        arrived = (machines.runs[0].offer(NAME, 1), machines.runs[1].offer(NAME, 0))
        while not all(offer.exists() for offer in arrived):
            for each in couriers:
                each.exchange()
        assert one.result(60) is None  # stored and told, and node 0 has not heard of it yet
        machines.store.delete([RunDir.checkpoint_key(NAME, "rank-00001.pack")])
        while not failing.done():
            couriers[0].exchange()
            couriers[1].exchange()
        with pytest.raises(CheckpointDamaged, match=r"rank-00001\.pack is not what its node has stored"):
            failing.result()
    assert not manifests.is_committed(zero, NAME)
    assert machines.store.size(RunDir.checkpoint_key(NAME, MANIFEST)) is None


# the courier


@pytest.fixture
def folder_machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path, FolderStore(tmp_path / "store"))


def test_what_a_node_is_not_to_be_told_it_does_not_take(folder_machines: Machines) -> None:
    zero, one = folder_machines.runs
    before = set(zero.root.rglob("*"))
    for file in (
        "node-0.json",
        "call.json",
        "node-1.exe",
        f"{CheckpointName(2, 2)}/node-1.part",
        "x/node-1.offer",
        f"{NAME}/run.json",
    ):
        folder_machines.store.put(RunDir.node_key(1, file), b"{}")
    Courier(zero, 1, 0, folder_machines.store).exchange()
    assert set(zero.root.rglob("*")) == before
    folder_machines.store.put(RunDir.node_key(1, f"{NAME}/node-0.part"), b"{}")
    folder_machines.store.put(RunDir.node_key(1, f"{NAME}/node-0.offer"), b"{}")
    Courier(one, 1, 1, folder_machines.store).exchange()
    assert machine_files(one, NAME) == {"node-0.offer"}, "parts are for node 0"


def machine_files(run: RunDir, name: CheckpointName) -> set[str]:
    return {path.name for path in run.checkpoint(name).iterdir()}


def test_of_two_machines_one_becomes_the_node_and_a_launch_that_is_over_takes_none(folder_machines: Machines) -> None:
    zero, store = folder_machines.runs[0], folder_machines.store
    assert courier.open_call(store, 1) == 0
    files.make_dirs(zero.nodes(1))
    files.write_atomically(zero.call(1), b"{}")
    Courier(zero, 1, 0, store).exchange()
    assert courier.open_call(store, 1) == 1
    with ThreadPoolExecutor() as pool:
        assert sum(pool.map(lambda _: courier.take_place(store, 1, 1, identify()), range(8))) == 1
    assert courier.open_call(store, 1) == 0
    assert courier.open_call(store, 2) == 1
    files.write_atomically(zero.launch_end(1), b"{}")
    Courier(zero, 1, 0, store).exchange()
    assert courier.open_call(store, 2) == 0


def test_a_newer_launch_is_learned_of_and_what_was_said_in_old_ones_goes(folder_machines: Machines) -> None:
    zero, one = folder_machines.runs
    store = folder_machines.store
    for token in (1, 2, 3):
        record = msgspec.structs.replace(folder_machines.launch, token=token, owner=str(token))
        record_launch(store, record)
        store.put(RunDir.node_key(token, "call.json"), b"{}")
    Courier(one, 1, 1, store).exchange()
    assert {path.name for path in one.launches.glob("*.json")} == {"0001.json", "0002.json", "0003.json"}
    Courier(zero, 3, 0, store).exchange()
    assert [item.key for item in store.list("nodes/")] == ["nodes/0002/call.json", "nodes/0003/call.json"]


@pytest.fixture
def working(folder_machines: Machines) -> Iterator[Courier]:
    """Node 0's courier."""
    found = Courier(folder_machines.runs[0], 1, 0, folder_machines.store)
    found.start()
    yield found
    found.end(5.0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_while_the_store_is_away_nobody_is_held_to_be_silent(folder_machines: Machines, working: Courier) -> None:
    zero, store, root = folder_machines.runs[0], folder_machines.store, folder_machines.folder / "store"
    store.put(RunDir.node_key(1, "node-1.json"), msgspec.json.encode(Beat(process=identify(), counter=1)))
    until(lambda: roster.read_node(zero, 1, 1))
    away = root.rename(root.with_name("away"))
    root.write_bytes(b"no folder")
    until(lambda: working.trouble)
    heard = working.listened()
    others = Others(zero, 1, LaunchSection(nodes=2, node_timeout=1.0), working.listened)
    assert others.look() == ("", "")
    time.sleep(1.5)  # more than node_timeout
    assert working.listened() == heard
    assert others.look() == ("", "")
    root.unlink()
    away.rename(root)
    until(lambda: not working.trouble)
    files.write_atomically(root / RunDir.node_key(1, "node-1.held.json"), msgspec.json.encode(HELD))
    until(lambda: others.held())
    until(lambda: others.look()[0])
    assert "node 1" in others.look()[1]


HELD = Held(steps=(2,), error_class="", detail="")


def test_one_notice_when_the_nodes_are_apart_and_one_when_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = Apart()
    now = 100.0
    monkeypatch.setattr(courier.time, "monotonic", lambda: now)
    said = []
    for at, trouble in ((0, ""), (1, "x"), (3, "x"), (4, ""), (5, "y"), (11, "y"), (20, "y"), (21, ""), (22, "")):
        now = 100.0 + at
        said.append(apart.notice(trouble))
    assert [at for at, text in enumerate(said) if text] == [5, 7]
    assert "training goes on: y" in said[5]
    assert said[7] == "the nodes hear each other again"


def test_node_0_elsewhere_is_seen_by_its_beats(folder_machines: Machines) -> None:
    store, stop = folder_machines.store, threading.Event()
    assert not courier.beats(store, 1, 5.0), "it never gave one"
    store.put(RunDir.node_key(1, "progress.json"), b"0")
    assert not courier.beats(store, 1, 0.2)

    def beat() -> None:
        count = 0
        while not stop.wait(0.05):
            count += 1
            store.put(RunDir.node_key(1, "progress.json"), str(count).encode())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert courier.beats(store, 1, 10.0)
        store.put(RunDir.node_key(1, "node-0.end.json"), b"{}")
        assert not courier.beats(store, 1, 10.0), "it has ended"
    finally:
        stop.set()
        thread.join()
