"""The report's numbers against a run whose history is known; an empty time and a run that needs somebody say so."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from perdure.training import files
from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord, create_launch, read_launches, write_end
from perdure.training.run_dir import CheckpointName

Command = Callable[..., Any]
DAY = 86400.0


def event(made: Any, at: float, kind: str, **data: object) -> None:
    files.append(made.run.events, json.dumps({"time": at, "kind": kind, **data}).encode() + b"\n")


def launch(made: Any, token: int, at: float, resumed_from: str | None, steps: range) -> None:
    """A launch that makes a step every ten seconds from a minute after its start on."""
    record = LaunchRecord(token=token, resumed_from=resumed_from, created=at, host="h", pid=1, run=made.id, owner=f"o{token}")
    made.run.launch_record(token).unlink(missing_ok=True)
    assert create_launch(made.run, record)
    rows = [{"step": step, "time": at + 60 + 10 * number, "loss": 1.0} for number, step in enumerate(steps, 1)]
    made.run.metrics(token).parent.mkdir(exist_ok=True)
    made.run.metrics(token).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def known(made: Any) -> Any:
    """Ten days ago launch 1 made steps 1 to 47 and died after committing step 40; two days ago launch 2 went on to 60."""
    old, new = time.time() - 10 * DAY, time.time() - 2 * DAY
    event(made, old, "run_created", id=made.id, name="tiny", steps=60, chunk=20)
    launch(made, 1, old, None, range(1, 48))
    event(made, old + 1, "launch_started", token=1, step=0)
    for step in (20, 40):
        event(made, old + 60 + 10 * step, "checkpoint_committed", token=1, step=step, seconds=1.0)
        event(made, old + 61 + 10 * step, "chunk_finished", token=1, end=step)
    event(made, new - 5, "failed", token=1, error_class="infrastructure", step=47, next="restarting in 1 s")
    launch(made, 2, new, "000000000040-0001", range(41, 61))
    event(made, new + 1, "recovered", token=2, step=40)
    made.write(60, 2)
    event(made, new + 270, "checkpoint_committed", token=2, step=60, seconds=1.0)
    event(made, new + 271, "chunk_finished", token=2, end=60)
    for step, token in ((20, 1), (40, 1), (60, 2)):
        write_fact(made.run, CheckpointName(step, token), Fact(copy="local", checked_at=new, result="good"))
    end = LaunchEnd(token=2, reason="complete", error_class="", step=60, detail="", log_tail="", ended=new + 280)
    write_end(made.run, end)
    event(made, new + 300, "completed", step=60, digest="d")
    return made


def test_the_numbers_of_a_week_are_those_of_its_history(known: Any, command: Command) -> None:
    [found] = command("report", known.run.root, "--json").json["runs"]
    counts = {key: found[key] for key in ("steps_made", "chunks", "launches", "failures", "lost_steps", "state", "step")}
    assert counts == {
        "steps_made": 20, "chunks": 1, "launches": 1, "failures": {"infrastructure": 1}, "lost_steps": 7, "state": "complete",
        "step": 60,
    }  # fmt: skip
    assert (found["verified_step"], found["replicated_step"], found["bytes_in_store"]) == (60, None, 0)
    assert found["bytes_on_disk"] == sum(path.stat().st_size for path in known.run.checkpoints.rglob("*") if path.is_file())
    times, passed = found["times"], time.time() - (read_launches(known.run)[2].created + 2 * DAY)  # the week began later
    assert 5 * DAY + 300 - passed - 1 <= sum(times.values()) <= 5 * DAY + 300 + 1
    assert times["training"] == pytest.approx(200, abs=1)
    assert times["starting up"] == pytest.approx(60, abs=1)
    assert 5 * DAY - passed - 1 <= times["down and restarting"] <= 5 * DAY + 1
    assert found["next_action"] == "not everything is in the store: `perdure run` only pushes"


def test_a_longer_look_back_takes_in_all_of_it(known: Any, command: Command) -> None:
    [found] = command("report", known.toml, "--days", "30", "--json").json["runs"]
    assert (found["steps_made"], found["chunks"], found["launches"], found["lost_steps"]) == (60, 3, 2, 7)
    assert found["times"]["training"] == pytest.approx(200 + 400, abs=1)
    assert found["times"]["trained again after a death"] == pytest.approx(70, abs=1)


def test_an_empty_time_is_said(known: Any, command: Command) -> None:
    answer = command("report", known.run.root, "--days", "0.5")
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "nothing happened in the last 0.5 days"


def test_a_folder_of_runs_is_one_table_and_one_page(known: Any, command: Command) -> None:
    table = command("report", known.run.root.parent).out.splitlines()
    assert table[0].split()[:6] == ["run", "state", "step", "of", "made", "chunks"]
    assert table[1].split()[:6] == ["tiny", "complete", "60", "60", "20", "1"]
    page = command("report", known.run.root.parent, "--markdown").out
    assert "- made: 20 steps in 1 chunk, 1 launch\n- failures: 1 x infrastructure; lost steps: 7\n" in page


def test_damage_and_death_name_what_helps(made: Any, command: Command) -> None:
    assert "perdure watchdog" in command("report", made.run.root).out
    made.end(1, "stopped", 40, detail="asked to stop")
    assert command("report", made.run.root).out.splitlines()[-1] == "tiny: `perdure run` goes on"
    write_fact(made.run, CheckpointName(40, 1), Fact(copy="local", checked_at=1.0, result="damaged"))
    assert "perdure scrub" in command("report", made.run.root).out


def test_what_is_no_run_or_no_time_is_refused(made: Any, command: Command) -> None:
    assert command("report", made.run.root.parent / "absent").code == 4
    assert command("report", made.run.root, "--days", "0").code == 2
