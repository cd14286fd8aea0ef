"""Snapshots in memory: however a rank dies, at most `snapshot_every` steps are lost, and the finished weights are the same."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import PATIENCE, Direct, Run, copy_tiny, freeze, kill, wait_until

from perdure.training.checkpoint import catalog
from perdure.training.checkpoint.plain import unpack_plain
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.slots import Snapshot

EACH = "checkpoint.snapshot_every=1"
SELDOM = "checkpoint.every=10"
RARE = ("run.chunk=40", "checkpoint.every=40")
"""No checkpoint before the end: the saver needs no slot."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """State digest of a run nobody disturbed, without any snapshot in between."""
    run = Run(copy_tiny(tmp_path_factory.mktemp("reference") / "tiny"), "store.url=''")
    assert Direct(run).train_to_end().reason == "complete"
    return run.digest()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(copy_tiny(tmp_path / "tiny"), "store.url=''", SELDOM)


def go_on(run: Run, *settings: str) -> str:
    end = Direct(run).train_to_end(settings)
    assert end.reason == "complete", end
    assert all(verify_folder(run.dir.checkpoint(name)) == [] for name in run.committed())
    return run.digest()


def steps(run: Run) -> list[int]:
    return [name.step for name in run.committed()]


@pytest.mark.parametrize(
    ("how", "error_class"),
    [
        ("kill", "infrastructure"),
        ("abort", "infrastructure"),
        ("segfault", "infrastructure"),
        ("memory", "oom"),
        ("raise", "user"),
    ],
)
def test_dying_rank_loses_no_finished_step_when_each_is_kept(run: Run, reference: str, how: str, error_class: str) -> None:
    end = Direct(run).train_to_end([EACH, "launch.env.TINY_die_at=17", f"launch.env.TINY_die_how={how}"])
    assert (end.reason, end.error_class) == ("failed", error_class)
    assert steps(run) == [10, 17], "17 steps were finished; the next one died"
    assert any("of step 17" in str(event.get("text")) for event in run.events())
    assert go_on(run) == reference


def test_dying_rank_loses_at_most_snapshot_every_steps(run: Run, reference: str) -> None:
    Direct(run).train_to_end(["checkpoint.snapshot_every=4", "launch.env.TINY_die_at=19", "launch.env.TINY_die_how=kill"])
    assert steps(run) == [10, 16]
    assert go_on(run, "checkpoint.snapshot_every=4") == reference
    assert steps(run) == [10, 16, 20, 30, 40], "snapshots of a rank that lives stay in memory"


def test_hang_loses_no_kept_step(run: Run, reference: str) -> None:
    hang = [
        "launch.env.TINY_sleep_in=batch",
        "launch.env.TINY_sleep_secs=600",
        "launch.env.TINY_slow_batch_at=17",
    ]
    for seconds in (5, 20, 80):  # on a busy machine the rank may not have come to its sleep when the shortest is over
        assert Direct(run).train_to_end([EACH, *hang, f"launch.step_timeout={seconds}"]).error_class == "hang"
        if (run.toml.parent / "in-batch").exists():
            break
    assert steps(run)[-1] == 17
    assert 10 in steps(run)
    assert go_on(run) == reference


@pytest.mark.parametrize("lazy", [False, True])
def test_snapshot_torn_by_the_kill_is_passed_over_and_the_other_slot_is_saved(
    run: Run, reference: str, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 4 if lazy else 2  # per step: a line of metrics, and the copy (three where it is split)
    monkeypatch.setenv("PERDURE_FAIL", f"rank:kill:{17 * calls - calls + 2}")
    direct = Direct(run)
    direct.launch([EACH, *RARE, f"checkpoint.lazy={str(lazy).lower()}"]).process.wait(PATIENCE)
    end = direct.end()
    monkeypatch.delenv("PERDURE_FAIL")
    assert "SIGKILL" in end.detail
    assert steps(run) == [16], "killed while step 17 was copied"
    assert go_on(run) == reference


@pytest.mark.parametrize("lazy", [False, True])
def test_state_that_is_not_finite_is_never_saved_from_memory_either(run: Run, reference: str, lazy: bool) -> None:
    settings = [EACH, f"checkpoint.lazy={str(lazy).lower()}", "launch.env.TINY_nan_at=12"]
    end = Direct(run).train_to_end(settings)
    assert (end.reason, end.error_class) == ("failed", "nan")
    assert steps(run) == [10, 12]
    assert go_on(run) == reference


# lazy and audit


def test_lazy_copies_are_bit_for_bit_what_the_rank_had(run: Run, reference: str) -> None:
    """The rank digests its live tensors at each cut; a copy that caught a later state would be refused."""
    settings = ["checkpoint.lazy=true", "checkpoint.audit=true", "checkpoint.every=2", EACH]
    assert go_on(run, *settings) == reference
    assert "save_failed" not in run.kinds()
    assert steps(run) == list(range(2, 42, 2))


@pytest.mark.parametrize(("where", "kept"), [("die_at", 17), ("die_before", 16)])
def test_lazy_copy_is_whole_once_the_next_optimizer_step_has_begun(run: Run, reference: str, where: str, kept: int) -> None:
    Direct(run).train_to_end(
        [EACH, *RARE, "checkpoint.lazy=true", f"launch.env.TINY_{where}=17", "launch.env.TINY_die_how=kill"]
    )
    assert steps(run) == [kept]
    assert go_on(run) == reference


def test_tensor_changed_while_a_lazy_copy_ran_is_an_error_and_never_saved(run: Run, reference: str) -> None:
    end = Direct(run).train_to_end([EACH, *RARE, "checkpoint.lazy=true", "launch.env.TINY_poke_at=17"])
    assert (end.reason, end.error_class) == ("failed", "user")
    assert "model/0.weight" in end.detail
    assert "checkpoint.lazy" in end.detail
    assert steps(run) == [16]
    assert go_on(run) == reference


def test_chunk_end_is_committed_although_nothing_follows_that_would_wait_for_the_copy(run: Run) -> None:
    direct = Direct(run)
    trainer = direct.launch(["checkpoint.lazy=true"], lease=10)
    wait_until(lambda: steps(run) == [10], "the checkpoint the lease waits for")
    wait_until(lambda: b"waiting for lease" in run.dir.progress_json.read_bytes(), "the wait for the next lease")
    time.sleep(1.1)
    trainer.lease(11)
    wait_until(lambda: "waiting_for_lease" in run.kinds(), "the wait is said")
    (event,) = [event for event in run.events() if event["kind"] == "waiting_for_lease"]
    assert (event["step"], event["seconds"] >= 1.1) == (10, True)
    direct.end()


def slots_of(agent: int) -> list[Path]:
    found = []
    for fd in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += [fd] if os.readlink(fd).startswith("/memfd:perdure") else []
    return found


def flip_a_bit(run: Run, step: int) -> bool:
    """In a weight of the snapshot of `step`, in the slot itself; False while it is in none."""
    agent = run.agent()
    assert agent is not None
    for path in slots_of(agent.pid):
        with open(path, "r+b") as file:
            snapshot = Snapshot(file.fileno())
            found = snapshot.whole and snapshot.step == step
            entry = next((one for one in snapshot.entries if one.path == "model/0.weight"), None) if found else None
            at = snapshot._data + entry.offset + 5 if entry else 0
            snapshot.close()
            if entry:
                with mmap.mmap(file.fileno(), 0) as space:
                    space[at] ^= 1
                return True
    return False


def test_audit_finds_a_bit_flipped_in_the_slot_before_it_is_saved(run: Run) -> None:
    direct = Direct(run)
    trainer = direct.launch(["checkpoint.audit=true", "checkpoint.every=5", *run.held_at(6)])
    wait_until(lambda: steps(run) == [5], "the first checkpoint")
    saver = run.saver()
    freeze(saver)
    run.go_on()
    wait_until(lambda: flip_a_bit(run, 10), "the next snapshot in its slot")
    kill(saver, signal.SIGCONT)
    trainer.process.wait(PATIENCE)
    direct.end()
    failed = [event for event in run.events() if event["kind"] == "save_failed"]
    assert {event["step"] for event in failed} == {10}
    assert all("audit" in str(event["error"]) for event in failed)
    assert 10 not in steps(run)


# a slow saver


def test_checkpoint_due_while_both_slots_are_being_saved_waits_says_so_and_is_not_lost(run: Run, reference: str) -> None:
    direct = Direct(run)
    trainer = direct.launch(["checkpoint.every=1", "launch.env.TINY_sleep=0.02", *run.held_at(1)])
    wait_until(lambda: steps(run) == [1], "the first checkpoint")
    saver = run.saver()
    freeze(saver)
    run.go_on()

    def waits() -> list[dict[str, object]]:
        return [event for event in run.events() if event["kind"] == "waiting_for_slot"]

    wait_until(waits, "training waits")
    assert {event["step"] for event in waits()} <= {3, 4}, "two checkpoints are in the slots"
    assert steps(run) == [1]
    kill(saver, signal.SIGCONT)
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    began, ended = [event for event in waits() if "seconds" not in event], [event for event in waits() if "seconds" in event]
    assert [event["step"] for event in began] == [event["step"] for event in ended]
    assert steps(run) == list(range(1, 41)), "none was skipped"
    for name in run.committed():
        with open_checkpoint(run.dir.checkpoint(name)) as reader:
            assert unpack_plain(reader.read("perdure.session"))["step"] == name.step, "and none holds another step's state"
    assert run.digest() == reference


def test_snapshot_that_stays_in_memory_never_waits(run: Run, reference: str) -> None:
    direct = Direct(run)
    trainer = direct.launch(["checkpoint.every=10", EACH, *run.held_at(3)])
    run.wait_until_held()
    saver = run.saver()
    freeze(saver)
    run.go_on()
    wait_until(lambda: "waiting_for_slot" in run.kinds(), "the third checkpoint waits")
    kill(saver, signal.SIGCONT)
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    waits = [event["step"] for event in run.events() if event["kind"] == "waiting_for_slot"]
    assert set(waits) <= {10, 20, 30, 40}, "nine steps before each of these found every slot taken, and went on"
    assert run.digest() == reference


def test_newest_stays_the_committed_one_while_the_next_is_being_written(run: Run, reference: str) -> None:
    direct = Direct(run)
    direct.launch(["checkpoint.every=5", "launch.env.TINY_sleep=0.02", *run.held_at(6)])
    wait_until(lambda: steps(run) == [5], "the first checkpoint")
    [first] = run.committed()
    freeze(run.saver())
    run.go_on()
    wait_until(lambda: run.step() > 10, "the next snapshot is with the saver")
    assert catalog.candidates(run.dir)[0] == first
    kill(run.agent())
    direct.end()
    assert catalog.candidates(run.dir)[0] == first
    assert verify_folder(run.dir.checkpoint(first)) == []
    assert go_on(run, "checkpoint.every=5") == reference


def test_failed_save_is_told_with_its_step_and_the_next_ones_are_not_poisoned(
    run: Run, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_FAIL", "saver:EIO:20")
    end = Direct(run).train_to_end(["checkpoint.every=5", "launch.env.TINY_sleep=0.02"])
    assert end.reason == "complete"
    failed = [event for event in run.events() if event["kind"] == "save_failed"]
    assert len(failed) == 1, "told once"
    assert steps(run) == list(range(5, 45, 5)), "and written in the next try"
    committed = [event["step"] for event in run.events() if event["kind"] == "checkpoint_committed"]
    assert committed == sorted(committed)
    assert catalog.leftovers(run.dir) == []
    assert run.digest() == reference


def test_saver_killed_while_it_writes_is_noticed_named_by_its_status_and_replaced(run: Run, reference: str) -> None:
    direct = Direct(run)
    trainer = direct.launch(["checkpoint.every=1", "launch.env.TINY_sleep=0.02", *run.held_at(20)])
    wait_until(lambda: steps(run) != [], "the first checkpoint")
    kill(run.saver())
    wait_until(lambda: any("saver ended with status -9" in str(event.get("text")) for event in run.events()), "noticed")
    run.go_on()
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    assert steps(run) == list(range(1, 41))
    assert run.digest() == reference


def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    """Two slots of the state and no more, whatever the saver's pace. Each large block goes back when it is freed: what the C
    library keeps of them differs from one process to the next by half a slot."""
    state, report = 252 * 200_000, tmp_path / "bytes"
    by_hand = copy_tiny(tmp_path / "by hand")
    by_hand.write_text(by_hand.read_text().replace("steps = 40", "steps = 12"))
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    env = {**os.environ, **allocator, "OMP_NUM_THREADS": "1", "TINY_width": "200000", "TINY_memory": str(report)}
    subprocess.run([sys.executable, "train.py"], cwd=by_hand.parent, check=True, env=env)
    without = int(report.read_text())
    sizes = ["run.steps=12", "run.chunk=4", "params.width=200000", f"params.memory='{report}'"]
    sizes += [f"launch.env.{name}={value}" for name, value in allocator.items()]
    run = Run(copy_tiny(tmp_path / "tiny"), "store.url=''", *sizes, "checkpoint.every=1", "checkpoint.encoding='raw'")
    direct = Direct(run)
    trainer = direct.launch(run.held_at(1))
    wait_until(lambda: steps(run) == [1], "the first checkpoint")
    saver = run.saver()
    freeze(saver)
    run.go_on()
    wait_until(lambda: "waiting_for_slot" in run.kinds(), "both slots full")
    kill(saver, signal.SIGCONT)
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    assert steps(run) == list(range(1, 13)), "committed and skipped make all; none was skipped"
    more = int(report.read_text()) - without
    assert state < more <= 2 * state * 1.2, f"{more} bytes more, for two slots of {state}"
