"""Which checkpoints count: launches and their lineage, zombies, roll-backs, trust, leftovers, and runs that are moved about."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import RUN_ID, small_source, write

from perdure.training import files
from perdure.training.checkpoint import catalog, facts, lineage, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import (
    LaunchEnd,
    LaunchRecord,
    committed,
    create_launch,
    follow,
    read_end,
    read_launches,
    write_end,
)
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.run_info import create_run_info, read_run_info
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.config import load_config
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir

DEEP = b'{"unknown":' + b"[" * 100_000
"""A field that no record has, too deep to be passed over."""


def name(step: int, token: int = 1) -> CheckpointName:
    return CheckpointName(step, token)


def record(token: int, resumed_from: CheckpointName | str | None = None, owner: str = "o") -> LaunchRecord:
    source = None if resumed_from is None else str(resumed_from)
    return LaunchRecord(
        token=token, resumed_from=source, created=time.time(), host="h", pid=1, run=RUN_ID, owner=owner, notes={"why": "test"}
    )


def launch(run: RunDir, token: int, resumed_from: CheckpointName | None = None) -> None:
    assert create_launch(run, record(token, resumed_from))


def commit(run: RunDir, step: int, token: int = 1) -> CheckpointName:
    write(run, small_source(step), name=name(step, token))
    return name(step, token)


def fact(run: RunDir, which: CheckpointName, result: str, copy: str = "local") -> None:
    facts.write_fact(run, which, Fact(copy=copy, checked_at=time.time(), result=result))


# lineage


def test_order_is_that_of_numbers_whatever_text_times_and_creation_say(run: RunDir) -> None:
    launch(run, 1)
    steps = [900, 1000, 5000, 10_000]
    for step in [10_000, 900, 5000, 1000]:
        commit(run, step)
    for step in steps:
        os.utime(run.checkpoint(name(step)), (2e9 - step, 2e9 - step))
    assert [listed.name.step for listed in catalog.list_checkpoints(run)] == steps
    assert [candidate.step for candidate in catalog.candidates(run)] == steps[::-1]
    for step in steps:
        os.utime(run.checkpoint(name(step)), (0, 0))
    assert catalog.candidates(run)[0] == name(10_000)


def test_rolled_back_and_trained_on_the_new_one_takes_the_place_of_the_later_ones(run: RunDir) -> None:
    launch(run, 1)
    for step in (2, 4, 6):
        commit(run, step)
    launch(run, 2, name(2))
    assert lineage.lineage(run) == [name(2)]
    commit(run, 4, 2)
    assert catalog.candidates(run) == [name(4, 2), name(2)]
    assert catalog.leftovers(run) == [run.checkpoint(name(4)), run.checkpoint(name(6))]
    assert [(listed.name, listed.in_lineage) for listed in catalog.list_checkpoints(run)] == [
        (name(2), True),
        (name(4), False),
        (name(4, 2), True),
        (name(6), False),
    ]


def test_what_a_zombie_commits_late_is_a_leftover(run: RunDir) -> None:
    launch(run, 1)
    commit(run, 2)
    launch(run, 2, name(2))
    commit(run, 4, 1)  # the first launch was not dead
    commit(run, 3, 2)
    assert lineage.lineage(run) == [name(3, 2), name(2)]
    assert run.checkpoint(name(4, 1)) in catalog.leftovers(run)


def test_a_launch_that_starts_from_nothing_leaves_everything_before_it_out(run: RunDir) -> None:
    launch(run, 1)
    commit(run, 2)
    launch(run, 2, None)
    assert lineage.lineage(run) == []
    assert not catalog.has_checkpoints(run)


def test_a_lineage_goes_through_launches_without_checkpoints_and_skips_those_never_resumed(run: RunDir) -> None:
    launch(run, 1)
    commit(run, 2)
    launch(run, 2, name(2))
    launch(run, 3, name(2))
    commit(run, 4, 3)
    launch(run, 7, name(4, 3))
    assert lineage.lineage(run) == [name(4, 3), name(2)]


def test_without_launches_or_folders_there_is_nothing_and_no_error(run: RunDir) -> None:
    assert lineage.lineage(run) == committed(run) == catalog.list_checkpoints(run) == catalog.leftovers(run) == []
    assert read_launches(run) == {}
    assert read_end(run, 1) is None
    assert catalog.newest_with(run, {"verified"}) is None


def listed(run: RunDir) -> list[CheckpointName]:
    return [one.name for one in catalog.list_checkpoints(run)]


@pytest.mark.parametrize("look", [committed, listed])
def test_of_one_that_is_pruned_while_we_look_the_newer_one_is_found(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, look: Callable[[RunDir], list[CheckpointName]]
) -> None:
    """Case P4: a save and the prune after it come between our listing and the look at what is in it."""
    launch(run, 1)
    commit(run, 2)
    real, acted = Path.iterdir, list[bool]()

    def late(folder: Path) -> Iterator[Path]:
        there = list(real(folder))
        if folder == run.checkpoints and not acted:
            acted.append(True)
            commit(run, 4)
            files.remove_tree(run.checkpoint(name(2)))
        return iter(there)

    monkeypatch.setattr(Path, "iterdir", late)
    assert look(run) == [name(4)]
    assert acted


names = st.builds(CheckpointName, st.integers(0, 9), st.integers(1, 6))
records = st.dictionaries(st.integers(1, 6), st.none() | names, max_size=6)


@settings(max_examples=300, deadline=None)
@given(records, st.lists(names, unique=True, max_size=20))
def test_a_lineage_of_any_records_ends_and_goes_back_in_step_and_token(
    resumed: dict[int, CheckpointName | None], there: list[CheckpointName]
) -> None:
    found = follow({token: record(token, source) for token, source in resumed.items()}, there)
    assert set(found) <= set(there)
    assert [item.token for item in found] == sorted((item.token for item in found), reverse=True)
    newest = max(resumed, default=0)
    assert {item for item in there if item.token == newest and resumed} <= set(found)
    for item in found:
        if item.token != newest:
            assert any(source and source.token == item.token and item.step <= source.step for source in resumed.values())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_history_of_resumes_has_the_lineage_that_a_person_would_name(data: st.DataObject) -> None:
    """Each launch resumes from some checkpoint of the lineage and commits a few steps further."""
    launches: dict[int, LaunchRecord] = {}
    there: list[CheckpointName] = []
    expected: list[CheckpointName] = []  # oldest first
    for token in range(1, data.draw(st.integers(1, 5)) + 1):
        expected = expected[: data.draw(st.integers(0, len(expected)))]
        launches[token] = record(token, expected[-1] if expected else None)
        step = expected[-1].step if expected else 0
        mine = [name(step + number, token) for number in range(1, data.draw(st.integers(0, 3)) + 1)]
        expected, there = expected + mine, there + mine
    random.Random(0).shuffle(there)
    assert follow(launches, there) == expected[::-1]


# records


def test_a_token_has_one_winner_and_its_record_stays(run: RunDir) -> None:
    assert create_launch(run, record(1, owner="a"))
    assert not create_launch(run, record(1, owner="b"))
    assert read_launches(run)[1].owner == "a"


@pytest.mark.parametrize("junk", [b"", b"{}", b"null", b"\x80\x04}", b'{"token":"1"}', DEEP])
def test_records_that_are_damaged_or_named_otherwise_are_passed_over(run: RunDir, junk: bytes) -> None:
    launch(run, 1)
    run.launch_record(2).write_bytes(junk)
    run.launch_record(3).write_bytes(run.launch_record(1).read_bytes())
    run.launch_record(4).mkdir()
    (run.launches / "notes.txt").write_text("hello")
    run.launch_end(1).write_bytes(junk)
    assert list(read_launches(run)) == [1]
    assert read_end(run, 1) is None


def test_why_a_launch_ended_comes_back(run: RunDir) -> None:
    launch(run, 1)
    end = LaunchEnd(token=1, reason="failed", error_class="ValueError", step=7, detail="caf\u00e9", log_tail="a\nb", ended=1.5)
    write_end(run, end)
    assert read_end(run, 1) == end
    assert list(read_launches(run)) == [1]


# facts and trust


@pytest.mark.parametrize(
    ("local", "store", "expected"),
    [
        (None, None, "written"),
        ("good", None, "verified"),
        ("good", "good", "replicated"),
        (None, "good", "replicated"),
        ("good", "damaged", "verified"),
        ("damaged", None, "quarantined"),
        ("damaged", "good", "quarantined"),
        ("odd", None, "written"),
    ],
)
def test_trust_follows_from_the_facts(run: RunDir, local: str | None, store: str | None, expected: str) -> None:
    launch(run, 1)
    commit(run, 2)
    commit(run, 4)
    for copy, result in (("local", local), ("store", store)):
        if result:
            fact(run, name(4), result, copy)
    assert facts.trust(run, name(4)) == expected
    assert (name(4) in catalog.candidates(run)) == (expected != "quarantined")
    assert name(2) in catalog.candidates(run)
    assert catalog.newest_with(run, {expected}) == name(4)


@pytest.mark.parametrize("junk", [b"", b"{}", b"\x80\x04}", DEEP, b'{"copy":"local","checked_at":0,"result":3}'])
def test_a_fact_that_cannot_be_read_is_none(run: RunDir, junk: bytes) -> None:
    commit(run, 2)
    run.fact(name(2), "local").write_bytes(junk)
    assert facts.read_fact(run, name(2), "local") is None
    assert facts.trust(run, name(2)) == "written"


def test_the_newest_damaged_in_every_way_the_one_before_is_the_candidate_after_a_check(run: RunDir) -> None:
    launch(run, 1)
    for step in (2, 4, 6):
        commit(run, step)
    folder = run.checkpoint(name(6))
    for file in folder.iterdir():
        file.write_bytes(b"")  # as after a power cut without fsync
    assert check(run, name(6)).result == "damaged"
    assert catalog.candidates(run) == [name(4), name(2)]
    assert folder.is_dir()
    run.manifest(name(4)).unlink()
    assert catalog.candidates(run) == [name(2)]
    with pytest.raises(CheckpointNotFound):
        check(run, name(4))
    assert not run.fact(name(4), "local").exists()


def test_a_damaged_manifest_is_listed_with_its_problem(run: RunDir) -> None:
    launch(run, 1)
    commit(run, 2)
    run.manifest(name(2)).write_bytes(b"{}")
    (listed,) = catalog.list_checkpoints(run)
    assert listed.manifest is None
    assert "manifest" in listed.problem
    with pytest.raises(CheckpointDamaged):
        catalog.manifest_of(run, name(2))


# leftovers


def test_leftovers_are_all_that_a_crash_leaves_and_nothing_else(run: RunDir) -> None:
    launch(run, 1)
    commit(run, 2)
    half = run.checkpoint(name(4))
    half.mkdir()
    (half / "rank-00000.pack").write_bytes(b"half")
    temporaries = [
        files.temporary_name(run.checkpoint(name(2)) / "rank-00000.pack"),
        files.temporary_name(run.launches / "0002.json"),
    ]
    for path in temporaries:
        path.write_bytes(b"torn")
    stranger = run.checkpoints / "notes"
    stranger.mkdir()
    assert catalog.leftovers(run) == sorted([half, stranger, *temporaries])
    assert committed(run) == [name(2)]
    (listed,) = catalog.list_checkpoints(run)
    assert listed.bytes_on_disk == sum(path.stat().st_size for path in run.checkpoint(name(2)).iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "2-1",
        "000000000002-00001",
        "00000000002-0001",
        "000000000002-0001 ",
        "-00000000002-0001",
        "latest",
        "000000000002_0001",
        "\u0660" * 12 + "-0001",
        "000000000002-0001\n",
        "0000000000002-0001",
        "000000000002-001",
        "000000000002-0001.bak",
    ],
)
def test_a_folder_named_in_any_other_way_is_no_checkpoint(run: RunDir, text: str) -> None:
    launch(run, 1)
    commit(run, 2)
    shutil.copytree(run.checkpoint(name(2)), run.checkpoints / text)
    assert committed(run) == [name(2)]
    assert catalog.leftovers(run) == [run.checkpoints / text]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**12 - 1), st.integers(0, 10**6))
def test_names_are_read_as_they_are_written_and_sort_as_numbers(step: int, token: int) -> None:
    assert CheckpointName.parse(str(name(step, token))) == name(step, token)


# run.json


def test_the_first_to_make_a_run_names_it_and_everyone_else_finds_that(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def train(session): ...\n")
    (tmp_path / "run.toml").write_text('[run]\nname = "gpt"\nentry = "train.py:train"\nsteps = 40\nchunk = 10\n')
    config = load_config(tmp_path / "run.toml")
    first = create_run_info(run, config)
    assert first.id.startswith("gpt-")
    assert (first.format, first.steps, first.chunk) == (1, 40, 10)
    assert create_run_info(run, config) == first == read_run_info(run)
    assert create_run_info(RunDir(tmp_path / "other"), config).id != first.id


def test_what_is_no_run_is_said_to_be_none(run: RunDir) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no run\.json"):
        read_run_info(run)
    files.make_dirs(run.root)
    for junk in (b"", b"{}", DEEP, b"\x80\x04}", bytes(2 << 20)):
        run.run_json.write_bytes(junk)
        with pytest.raises(CheckpointDamaged) as error:
            read_run_info(run)
        assert error.value.part == "run.json"


def test_a_run_of_a_newer_version_is_refused_as_such(run: RunDir) -> None:
    files.make_dirs(run.root)
    run.run_json.write_text('{"id":"gpt-1","name":"gpt","created":0,"format":2,"steps":1,"chunk":1}')
    with pytest.raises(CheckpointDamaged, match="written by a newer version"):
        read_run_info(run)


# places


PLACES = [
    "a b/\u0442\u0435\u0441\u0442 \u65e5\u672c/run.v1.2",
    "-dash",
    "100%41",
    "a+b#c?d",
    'it\'s "quoted"',
    "x;y&z|$HOME",
    "*",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_run_lives_in_a_place_of_any_name(tmp_path: Path, place: str) -> None:
    run = RunDir(tmp_path / place)
    launch(run, 1)
    commit(run, 2)
    assert check(run, name(2)).result == "good"
    assert catalog.candidates(run) == [name(2)]
    with open_checkpoint(run.checkpoint(name(2))) as reader:
        assert bytes(reader.read("rng/cpu")) == small_source().bytes["rng/cpu"]
    assert {path.name for path in tmp_path.iterdir()} == {place.split("/")[0]}


@pytest.mark.parametrize("place", ["./x", "../here/y", "z/", "-dash"])
def test_a_relative_place_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = RunDir(Path(place))
    launch(run, 1)
    commit(run, 2)
    assert verify_folder(run.checkpoint(name(2))) == []
    assert catalog.candidates(run) == [name(2)]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert [path.name for path in (tmp_path / "here").iterdir()] == [Path(place).name]


def test_a_run_that_is_moved_is_the_same_run_and_nothing_names_the_old_place(tmp_path: Path) -> None:
    old, new = RunDir(tmp_path / "old place"), RunDir(tmp_path / "elsewhere" / "new")
    launch(old, 1)
    commit(old, 2)
    assert check(old, name(2)).result == "good"
    launch(old, 2, name(2))
    before = manifest.read(old.checkpoint(name(2)))
    new.root.parent.mkdir()
    old.root.rename(new.root)
    assert catalog.candidates(new) == [name(2)]
    assert facts.trust(new, name(2)) == "verified"
    assert manifest.read(new.checkpoint(name(2))) == before
    commit(new, 4, 2)
    assert lineage.lineage(new) == [name(4, 2), name(2)]
    for path in new.root.rglob("*"):
        assert not path.is_file() or b"old place" not in path.read_bytes(), path


def test_no_stored_file_is_a_pickle_or_an_archive_of_one(run: RunDir) -> None:
    launch(run, 1)
    commit(run, 2)
    check(run, name(2))
    for path in run.root.rglob("*"):
        if path.is_file():
            assert not path.read_bytes().startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")), path
    assert json.loads(run.manifest(name(2)).read_bytes())["format"] == "perdure-checkpoint"
