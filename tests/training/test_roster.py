"""The nodes of a launch by their files: who may join, who counts as gone, and when a launch is over for the others."""

import time
from pathlib import Path

import msgspec
import pytest

from perdure.training import files
from perdure.training.agent.node import refuse_another_run
from perdure.training.agent.roster import Beat, Call, Caller, Held, Others, join, listen, read_call, tell_held
from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord, create_launch, write_end
from perdure.training.config import load_config
from perdure.training.errors import ConfigError
from perdure.training.launch_settings import LaunchSection
from perdure.training.process import identify
from perdure.training.run_dir import CheckpointName, RunDir

LAUNCH = LaunchSection(nodes=3, node_timeout=1.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    begin(run, 1)
    return run


def begin(run: RunDir, token: int) -> None:
    create_launch(run, LaunchRecord(token=token, resumed_from=None, created=0.0, host="a", pid=1, run="r", owner="o"))


def call(token: int = 1) -> Call:
    return Call(
        token=token, run_id="r", resume="", replan=False, overrides=(), trajectory={"steps": 4}, address="10.0.0.1", port=1
    )


def end(token: int, reason: str, error_class: str = "") -> LaunchEnd:
    return LaunchEnd(token=token, reason=reason, error_class=error_class, step=3, detail="why", log_tail="", ended=0.0)


def beat(run: RunDir, number: int, counter: int) -> None:
    files.publish(run.node(1, number), msgspec.json.encode(Beat(process=identify(), counter=counter)))


def test_each_node_joins_a_launch_once_and_only_the_newest_that_goes_on(run: RunDir) -> None:
    others = Others(run, 1, LAUNCH)
    assert read_call(run) is None, "it asks for nobody yet"
    others.call(call())
    assert read_call(run) == call()
    assert (join(run, 1, 2, identify()), join(run, 1, 2, identify())) == (True, False)
    assert others.missing() == [1]
    write_end(run, end(1, "failed"))
    assert read_call(run) is None
    begin(run, 2)
    assert read_call(run) is None, "the newer one asks for nobody"


def test_a_node_counts_as_gone_when_its_counter_stands_still_and_one_that_has_not_joined_does_not(run: RunDir) -> None:
    others = Others(run, 1, LAUNCH)
    others.call(call())
    join(run, 1, 1, identify())
    began, counter = time.monotonic(), 0
    while time.monotonic() < began + 2.5:
        counter += 1
        beat(run, 1, counter)
        assert others.failed() == ("", "")
        time.sleep(0.05)
    while not others.failed()[0]:
        assert time.monotonic() < began + 60
    assert others.failed()[0] == "infrastructure"
    assert "node 1" in others.failed()[1]
    assert "no sign of life" in others.failed()[1]


def test_what_a_node_says_of_its_end_is_the_reason_of_the_launch(run: RunDir) -> None:
    others = Others(run, 1, LAUNCH)
    others.call(call())
    join(run, 1, 2, identify())
    write_end(run, end(1, "failed", "oom"), 2)
    assert others.failed()[0] == "oom"
    assert others.failed()[1].endswith("why")


def test_what_the_others_hold_is_known_once_all_have_said_it_and_who_went_with_node_0_is_not_blamed(run: RunDir) -> None:
    others = Others(run, 1, LAUNCH)
    others.call(call())
    tell_held(run, 1, 1, Held(steps=(6, 8), error_class="", detail=""))
    assert others.held() is None, "node 2 is silent"
    write_end(run, end(1, "failed", "infrastructure"), 1)
    assert others.look() == ("", "")
    tell_held(run, 1, 2, Held(steps=(6, 7), error_class="oom", detail="why"))
    assert others.held() == [{6, 8}, {6, 7}]
    assert others.look() == ("oom", "node 2 (?): why")


def test_a_node_that_says_nothing_of_what_it_holds_is_waited_for_while_it_lives(run: RunDir) -> None:
    now = 0.0
    others = Others(run, 1, LAUNCH, lambda: now)
    others.call(call())
    for number in others.numbers:
        beat(run, number, 1)
    assert not others.silent(5)
    tell_held(run, 1, 2, Held(steps=(7,), error_class="", detail=""))
    for counter in (2, 3):
        now += 4
        beat(run, 1, counter)
        assert not others.silent(5), "node 1 lives, and of node 2 all is known"
    now += 6
    assert others.silent(5)
    write_end(run, end(1, "failed"), 1)
    assert not others.silent(5), "nothing more will come of it"


def test_a_save_waits_no_more_for_a_node_that_ended_without_its_part(run: RunDir) -> None:
    name = CheckpointName(6, 1)
    others = Others(run, 1, LAUNCH)
    others.call(call())
    assert not others.gone_without(name)
    write_end(run, end(1, "failed", "infrastructure"), 2)
    assert Others(run, 1, LAUNCH).gone_without(name)
    files.make_dirs(run.checkpoint(name))
    files.write_atomically(run.part(name, 2), b"part")
    assert not Others(run, 1, LAUNCH).gone_without(name), "all it had to do is done"


def test_a_launch_is_over_for_the_others_when_it_has_ended_or_a_newer_one_has_begun(run: RunDir) -> None:
    assert Caller(run, 1, 60.0).over() == ""
    begin(run, 2)
    assert Caller(run, 1, 60.0).over() == "a newer launch has begun"
    write_end(run, end(2, "stopped"))
    caller = Caller(run, 2, 60.0)
    assert caller.over() == "the launch has ended: stopped"
    assert caller.end is not None


def test_a_node_whose_settings_decide_the_weights_otherwise_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def train(session): ...")
    (tmp_path / "run.toml").write_text('[run]\nname = "a"\nentry = "train.py:train"\nsteps = 4\nchunk = 2\n')
    config = load_config(tmp_path / "run.toml", [])
    same = msgspec.structs.replace(call(), trajectory=config.trajectory())
    refuse_another_run(config, same)
    with pytest.raises(ConfigError, match="steps: 9 -> 4"):
        refuse_another_run(config, msgspec.structs.replace(same, trajectory={**config.trajectory(), "steps": 9}))


def test_an_address_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is no address of this machine"):
        listen(LaunchSection(nodes=2, address="192.0.2.1"))
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    with pytest.raises(ConfigError, match="its name 'localhost' means the loopback interface"):
        listen(LaunchSection(nodes=2))
