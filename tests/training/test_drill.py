"""What a drill promises around its launches: its folder, its environment, its targets, its record, its page."""

import base64
import re
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from harness import copy_tiny

from perdure.tasks import drilled
from perdure.training import files
from perdure.training.config import load_config
from perdure.training.drill import continuation
from perdure.training.drill.drill import drill
from perdure.training.drill.folder import BareFolder, sweep
from perdure.training.drill.plan import Plan, kills_between
from perdure.training.drill.record import Drill, append_drill, read_drills
from perdure.training.drill_settings import parse_time
from perdure.training.errors import ConfigError, DiskFull
from perdure.training.process import identify
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore

HELD = Drill(
    time=1_800_000_000.0, host="h", run="gpt-1", store="s3://b/gpt", passed=True, newest="000000000040-0001", bytes=3_000_000,
    resumed="000000000040-0001", steps=10, kills=("rank after step 43",), point_steps=7, point_secs=42.0, pull_secs=1.0,
    prove_secs=2.0, start_secs=3.5, target_point_secs=3600.0, target_time_secs=1800.0, identical=True, digest="d",
)  # fmt: skip


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_folders_of_the_dead_are_swept(temporary: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        dead = identify(gone.pid)
    me = identify()
    foreign = temporary / "perdure-drill-another-host-1-1-abcd_123"
    lookalike = temporary / "perdure-drill-mine"
    abandoned = temporary / f"perdure-drill-{me.host}-{me.pid}-{me.start + 1}-abcd_123"
    link = temporary / f"perdure-drill-{me.host}-{dead.pid}-1-abcdefgh"
    for path in (foreign, lookalike, abandoned / "run"):
        path.mkdir(parents=True)
    link.symlink_to(lookalike)
    with BareFolder() as ours:
        assert sweep() == [abandoned]
        assert ours.path.is_dir()
    assert {path.name for path in temporary.iterdir()} == {foreign.name, lookalike.name, link.name}


def test_its_folder_goes_whatever_happens_inside(temporary: Path) -> None:
    ours = BareFolder()
    (ours.path / "run").mkdir()
    assert ours.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ZeroDivisionError), ours:
        raise ZeroDivisionError
    assert list(temporary.iterdir()) == []


def test_temporary_files_of_the_launches_go_into_the_folder_unless_a_socket_would_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="d") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        with BareFolder() as ours:
            assert ours.environment() == {"TMPDIR": str(ours.path / "tmp")}
        long = Path(short, "x" * 60)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with BareFolder() as ours:
            assert ours.environment() == {}


def test_the_live_runs_environment_is_not_inherited() -> None:
    given = {"PATH": "/bin", "PERDURE_LOCK_FD": "7", "MASTER_PORT": "29500", "RANK": "3", "TORCHELASTIC_RUN_ID": "x"}
    assert continuation._environment(given) == {"PATH": "/bin", "PERDURE_DRILL": "1"}


def test_without_room_nothing_is_fetched(temporary: Path, tmp_path: Path) -> None:
    config = load_config(copy_tiny(tmp_path / "tiny"))
    before = set(tmp_path.iterdir())
    planned = Plan(needed=1000, free=999, folder="/somewhere")
    with pytest.raises(DiskFull, match="/somewhere: a drill needs room for 1000 bytes, 999 are free"):
        drill(config, [], FolderStore(tmp_path / "nowhere"), None, planned, print)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("steps", "points"), [(1, (101, 101)), (2, (101, 101)), (3, (101, 102)), (10, (103, 106))])
def test_kills_lie_within_the_continuation(steps: int, points: tuple[int, int]) -> None:
    assert tuple(kill.step for kill in kills_between(100, 100 + steps)) == points


def test_times_are_read_and_others_refused(tmp_path: Path) -> None:
    assert [parse_time(text) for text in ("90s", "30m", "1h30m", "1d")] == [90, 1800, 5400, 86400]
    toml = copy_tiny(tmp_path / "tiny")
    for wrong in ("drill.recovery_point=soon", "drill.recovery_time=0s", "drill.recovery_time=5", "drill.steps=0"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            load_config(toml, [wrong])


def test_a_torn_record_is_passed_over_and_the_next_one_whole(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append_drill(run, HELD)
    with open(run.drills, "ab") as file:
        file.write(msgspec.json.encode(HELD)[:50])
    append_drill(run, msgspec.structs.replace(HELD, passed=False))
    assert [one.passed for one in read_drills(run)] == [True, False]


def test_a_killed_writer_leaves_no_record(tmp_path: Path) -> None:
    files.plan_failure("drill:EIO:1")
    files.set_role("drill")
    try:
        with pytest.raises(OSError, match="fail point 1"):
            append_drill(RunDir(tmp_path), HELD)
    finally:
        files.plan_failure("")
    assert read_drills(RunDir(tmp_path)) == []


def test_lines_tell_both_measures_against_target_and_the_last_drills() -> None:
    failed = msgspec.structs.replace(
        HELD, passed=False, problems=("not reproducible: 1 leaf: model/a",), point_steps=None, identical=False
    )
    nothing = Drill(time=0.0, host="h", run="r", store="s", passed=False, target_point_secs=1.0, target_time_secs=1.0)
    text = "\n".join(drilled.lines([HELD, nothing, failed]))
    assert "- not reproducible: 1 leaf: model/a" in text
    assert (
        "recovery point: at most 42.0 s of training (the run directory is not here) (target 1 h 0 min; before: 42.0 s, failed)"
        in text
    )
    assert "recovery time: 6.5 s: pull 1.0 s, prove 2.0 s, to the first step 3.5 s; 3.0 MB (target 30 min 0 s" in text
    assert "killed: rank after step 43: NOT the same bits" in text
    asked = msgspec.structs.replace(HELD, asked=True)
    assert "recovery point: 7 steps, 42.0 s of training (not judged, it was asked for)" in drilled.lines([asked])[0]
    assert "nothing came back" in "\n".join(drilled.lines([nothing]))


def test_the_page_draws_both_measures_once_there_are_two_drills() -> None:
    assert "![" not in drilled.markdown([HELD], "gpt")
    page = drilled.markdown([HELD, msgspec.structs.replace(HELD, start_secs=9.0)], "gpt")
    pictures = re.findall(r"!\[[^]]*\]\(data:image/svg\+xml;base64,([^)]+)\)", page)
    assert [ET.fromstring(base64.b64decode(one)).tag.rpartition("}")[2] for one in pictures] == ["svg", "svg"]
    assert page.count("| passed |") == 2


def test_ranks_of_several_nodes_go_on_on_the_machine_of_the_drill(tmp_path: Path, temporary: Path) -> None:
    several = ["launch.nodes=2", "launch.processes=3", "launch.shared_disk=false", "store.url=copies"]
    config = load_config(copy_tiny(tmp_path / "tiny"), several)
    with BareFolder() as folder:
        going = continuation.Continuation(config, several, folder, CheckpointName(5, 1), save_every=0)
        found = load_config(config.path, going.settings())
    assert (found.launch.nodes, found.launch.processes, found.launch.shared_disk) == (1, 6, True)
    assert found.trajectory() == config.trajectory(), "which decides no bit"
