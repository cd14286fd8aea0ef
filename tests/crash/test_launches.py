"""Launches without Prefect: whatever is killed, the finished state is that of an undisturbed run, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import PATIENCE, Direct, Run, children, copy_tiny, freeze, kill, wait_until

from perdure.tasks.curve import Curve
from perdure.training.agent.launch import Trainer
from perdure.training.checkpoint import catalog
from perdure.training.checkpoint.pins import read_pins
from perdure.training.checkpoint.plain import unpack_plain
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import check
from perdure.training.process import identify
from perdure.training.run_dir import CheckpointName

SLOW = "launch.env.TINY_sleep=0.05"
"""Slow enough for each step to be told; of that launch only."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """State digest of a run nobody disturbed."""
    run = Run(copy_tiny(tmp_path_factory.mktemp("reference") / "tiny"), "store.url=''")
    assert Direct(run).train_to_end().reason == "complete"
    return run.digest()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(copy_tiny(tmp_path / "tiny"), "store.url=''", "launch.stop_grace=60")


def go_on(run: Run) -> str:
    """Resume until the end; the digest."""
    end = Direct(run).train_to_end()
    assert end.reason == "complete", end
    return run.digest()


def test_rank_killed_resumes_from_last_committed_and_ends_bit_identical(run: Run, reference: str) -> None:
    direct = Direct(run)
    trainer = direct.launch([SLOW, *run.held_at(17)])
    wait_until(lambda: run.step() >= 17, "step 17")
    kill(run.rank())
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert (end.reason, end.error_class) == ("failed", "infrastructure")
    assert "SIGKILL" in end.detail
    assert run.committed()[-1].step >= 15, "no step before the last checkpoint is lost"
    assert go_on(run) == reference
    logged = {name.step: catalog.manifest_of(run.dir, name).metrics for name in run.committed()}
    assert {step for step, found in logged.items() if "accuracy" in found} == {10, 15, 20, 25, 30}, (
        "the newest, if it is finite"
    )
    assert {found.get("accuracy") for found in logged.values()} == {None, 0.5}
    assert len({found["clock"] for found in logged.values()}) == len(logged), "which is no part of the state's digest"


def test_saver_killed_in_the_middle_loses_nothing(run: Run, reference: str) -> None:
    direct = Direct(run)
    trainer = direct.launch([SLOW, *run.held_at(28)])
    for number in (1, 2, 3):
        wait_until(lambda number=number: len(run.committed()) >= number, f"{number} checkpoints")
        killed = run.saver()
        kill(killed)
        wait_until(lambda killed=killed: run.saver() not in (None, killed), "another saver")
    run.go_on()
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    assert [name.step for name in run.committed()] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert run.digest() == reference


def test_agent_killed_takes_rank_and_saver_with_it(run: Run, reference: str) -> None:
    direct = Direct(run)
    direct.launch([SLOW, *run.held_at(12)])
    wait_until(lambda: run.step() >= 12, "step 12")
    agent, rank, saver = run.agent(), run.rank(), run.saver()
    kill(agent)
    wait_until(lambda: not (rank.is_alive() or saver.is_alive()), "rank and saver gone")
    end = direct.end()
    assert (end.error_class, end.step >= 12) == ("infrastructure", True), "told of the step it had come to"
    assert go_on(run) == reference


def test_a_named_step_is_a_milestone_whoever_dies_and_takes_its_name_along_when_trained_again(run: Run, reference: str) -> None:
    """The saver is killed until the step is committed, then the agent at once: the name came with the commit, or not at all."""
    direct, named = Direct(run), ["launch.env.TINY_name_at=16"]
    direct.launch([*named, *run.held_at(16)], lease=17)
    run.wait_until_held()
    kill(run.saver())
    run.go_on()
    wait_until(lambda: CheckpointName(17, 1) in run.committed(), "step 17 committed")
    kill(run.agent())
    assert direct.end().error_class == "infrastructure"
    assert milestones(run) == {CheckpointName(17, 1): ("before-decay",)}
    os.truncate(run.dir.checkpoint(CheckpointName(17, 1)) / "rank-00000.pack", 100)
    wait_until(lambda: not run.processes(), "all gone")
    assert check(run.dir, CheckpointName(17, 1)).result == "damaged"
    assert Direct(run).train_to_end(named).reason == "complete"
    assert run.digest() == reference
    assert milestones(run) == {CheckpointName(17, 2): ("before-decay",)}


def milestones(run: Run) -> dict[CheckpointName, tuple[str, ...]]:
    return dict(read_pins(run.dir, catalog.list_checkpoints(run.dir)).names)


def close_lifeline(trainer: Trainer) -> None:
    """Without waiting for what that brings about."""
    assert trainer.process.stdin is not None
    trainer.process.stdin.close()


def test_lifeline_closed_saves_the_step_it_is_at(run: Run, reference: str) -> None:
    direct = Direct(run)
    trainer = direct.launch([SLOW, *run.held_at(13)])
    wait_until(lambda: run.step() >= 13, "step 13")
    close_lifeline(trainer)
    run.go_on(told_to_stop=True)
    end = direct.end()
    assert end.reason == "stopped"
    assert run.committed()[-1].step == end.step >= 13
    assert go_on(run) == reference


@pytest.mark.parametrize("whom", ["agent", "rank"])
def test_sigterm_saves_and_stops(run: Run, reference: str, whom: str) -> None:
    direct = Direct(run)
    trainer = direct.launch([SLOW, *run.held_at(12)])
    wait_until(lambda: run.step() >= 12, "step 12")
    kill(getattr(run, whom)(), signal.SIGTERM)
    run.go_on(told_to_stop=whom == "agent")
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert end.reason == "stopped"
    assert run.committed()[-1].step == end.step >= 12
    assert go_on(run) == reference


def test_a_stop_whose_save_takes_longer_than_the_grace_is_a_stop_and_no_error_of_the_training_code(
    run: Run, reference: str
) -> None:
    direct = Direct(run)
    trainer = direct.launch([*run.held_at(6), "launch.stop_grace=1"])
    wait_until(lambda: run.committed() != [], "the first checkpoint")
    run.wait_until_held()
    freeze(run.saver())
    kill(run.agent(), signal.SIGTERM)
    run.go_on(told_to_stop=True)
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert (end.reason, end.error_class, end.detail) == ("stopped", "", "SIGTERM")
    assert [name.step for name in run.committed()] == [5]
    assert go_on(run) == reference


@pytest.mark.parametrize("phase", ["setup", "batch", "evaluation", "after"])
def test_sigterm_in_every_phase_ends_within_the_grace(run: Run, reference: str, phase: str) -> None:
    """Which the code goes on with when it has been told."""
    direct = Direct(run)
    where = {"wait_in": phase, "slow_batch_at": 12, "evaluate_at": 12}
    trainer = direct.launch([f"launch.env.TINY_{name}={value}" for name, value in where.items()])
    run.wait_until_held()
    agent = run.agent()
    kill(agent, signal.SIGTERM)
    kill(agent, signal.SIGTERM)
    run.go_on(told_to_stop=True)
    trainer.process.wait(run.config.launch.stop_grace + 5)
    end = direct.end()
    assert end.reason == ("complete" if phase == "after" else "stopped")
    if phase in ("batch", "evaluation"):
        assert run.committed()[-1].step >= 12, "progress lost is at most one step"
    assert go_on(run) == reference


def test_exception_in_user_code_is_told_with_class_and_log(run: Run) -> None:
    end = Direct(run).train_to_end([SLOW, "params.bug_at=7"])
    assert (end.reason, end.error_class, end.step) == ("failed", "user", 7)
    assert "made up by the test" in end.detail
    assert "ValueError" in end.log_tail


@pytest.mark.parametrize(
    ("phase", "limit", "least"), [("batch", "launch.step_timeout", 2), ("setup", "launch.startup_timeout", 8)]
)
def test_hang_is_found_by_its_limit_and_its_stacks_are_in_the_log(run: Run, phase: str, limit: str, least: int) -> None:
    """On a busy machine a rank may not have come to its sleep when the shortest limit is over, or comes to it just after."""
    hang = {"sleep_in": phase, "sleep_secs": 600, "slow_batch_at": 12}
    for seconds in (least, 4 * least, 16 * least):
        end = Direct(run).train_to_end(
            [*(f"launch.env.TINY_{key}={value}" for key, value in hang.items()), f"{limit}={seconds}"]
        )
        assert (end.reason, end.error_class) == ("failed", "hang")
        assert f"{seconds} s" in end.detail
        if "phase_sleep" in (log := (run.dir.logs(end.token) / "rank-00000.log").read_text()):
            break
    assert "phase_sleep" in log, "the stack of the sleeping function"


def test_no_process_survives_its_launch(run: Run) -> None:
    direct = Direct(run)
    trainer = direct.launch(run.held_at(3))
    run.wait_until_held()
    seen = [run.agent(), run.rank(), run.saver()]
    assert None not in seen
    close_lifeline(trainer)
    run.go_on(told_to_stop=True)
    direct.end()
    assert not any(process.is_alive() for process in seen if process)
    assert children(os.getpid()) == [] or all(pid not in children(os.getpid()) for pid in (p.pid for p in seen if p))


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_children_of_the_training_code_end_with_the_launch(run: Run, tmp_path: Path, victim: str) -> None:
    direct = Direct(run)
    trainer = direct.launch([*run.held_at(3), f"params.child='{tmp_path}/child'"])
    run.wait_until_held()
    child = identify(int((tmp_path / "child").read_text()))
    assert child.is_alive()
    kill(getattr(run, victim)())
    trainer.process.wait(PATIENCE)
    trainer.kill()
    direct.end()
    assert child.wait(PATIENCE), "the sleeping child is gone"


def test_slow_saver_never_mixes_steps_and_loses_none(run: Run) -> None:
    """The saver is stopped while training goes on into the second slot: each checkpoint still holds its own step's state."""
    direct = Direct(run)
    trainer = direct.launch(run.held_at(6))
    wait_until(lambda: run.committed() != [], "the first checkpoint")
    saver = run.saver()
    freeze(saver)
    run.go_on()
    wait_until(lambda: "waiting_for_slot" in run.kinds(), "training went on into both slots")
    assert {event["step"] for event in run.events() if event["kind"] == "waiting_for_slot"} <= {15, 20}, "and waits for one"
    assert [name.step for name in run.committed()] == [5]
    kill(saver, signal.SIGCONT)
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    assert [name.step for name in run.committed()] == list(range(5, 45, 5)), "none was skipped"
    for name in run.committed():
        with open_checkpoint(run.dir.checkpoint(name)) as reader:
            assert unpack_plain(reader.read("perdure.session"))["step"] == name.step
            assert float(np.frombuffer(reader.read("optimizer/model.0.weight/step"), "<f4")[0]) == name.step


def test_trace_of_a_cut_run_equals_the_reference_step_by_step(run: Run, tmp_path: Path) -> None:
    """Data order, learning rate and loss of every step that survived, as float hex; of what was logged a reader has each step
    once, with the reference's value, though the launch that died had logged more than it saved."""
    whole = Run(copy_tiny(tmp_path / "whole"), "store.url=''", f"params.trace='{tmp_path}/a.jsonl'")
    Direct(whole).train_to_end()
    traced = f"params.trace='{tmp_path}/b.jsonl'"
    slow = {"slow_batch_at": 21, "sleep_in": "batch", "sleep_secs": 1.1, "die_at": 23, "die_how": "kill"}
    Direct(run).train_to_end([traced, *(f"launch.env.TINY_{name}={value}" for name, value in slow.items())])
    assert run.committed()[-1].step == 20
    assert logged(run, 1)[-1][0] >= 22
    Direct(run).train_to_end([traced, "launch.env.PYTHONWARNINGS=error"])
    assert "Warning" not in (run.dir.logs(2) / "rank-00000.log").read_text()
    assert surviving(tmp_path / "a.jsonl") == surviving(tmp_path / "b.jsonl")
    curves = [Curve(one.dir, 40) for one in (whole, run)]
    for curve in curves:
        curve.read()
    assert curves[1].points() == curves[0].points() == logged(whole, 1)
    assert [step for step, _ in curves[1].points()] == list(range(1, 41))


def test_script_run_by_hand_trains_the_same_numbers_and_saves_nothing(tmp_path: Path) -> None:
    managed = Run(copy_tiny(tmp_path / "managed"), "store.url=''", f"params.trace='{tmp_path}/a.jsonl'")
    Direct(managed).train_to_end()
    toml = copy_tiny(tmp_path / "by hand")
    toml.write_text(toml.read_text() + f"\n[params]\ntrace = '{tmp_path}/b.jsonl'\n")
    subprocess.run([sys.executable, "train.py"], cwd=toml.parent, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert surviving(tmp_path / "a.jsonl") == surviving(tmp_path / "b.jsonl")
    assert not (toml.parent / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_script_run_by_hand_ends_on_signals_as_any_script_does(tmp_path: Path, number: int) -> None:
    toml = copy_tiny(tmp_path / "by hand")
    toml.write_text(toml.read_text() + f"\n[params]\nsleep = 1\ntrace = '{tmp_path}/trace'\n")
    script = subprocess.Popen([sys.executable, "train.py"], cwd=toml.parent, stderr=subprocess.DEVNULL)
    wait_until((tmp_path / "trace").exists, "a step")
    script.send_signal(number)
    assert script.wait(PATIENCE) in (-number, 130, 1)


def test_nested_loop_with_end_step_cuts_and_resumes_to_the_same_bits(run: Run, reference: str) -> None:
    direct = Direct(run)
    trainer = direct.launch([*run.held_at(16), "params.nested=true"])
    run.wait_until_held()
    kill(run.rank())
    trainer.process.wait(PATIENCE)
    direct.end()
    assert Direct(run).train_to_end(["params.nested=true"]).reason == "complete"
    assert run.digest() == reference


def logged(run: Run, token: int) -> list[tuple[int, float]]:
    rows = map(json.loads, run.dir.metrics(token).read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def surviving(path: Path) -> dict[int, str]:
    """The last line of each step: the earlier ones were rolled back."""
    return {json.loads(line)["step"]: line for line in path.read_text().splitlines()}
