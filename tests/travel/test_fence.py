"""A store belongs to one run and a token to one launch, whoever asks at the same time and whichever answer is lost."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.training.checkpoint.lineage import LaunchRecord, create_launch, read_launches
from perdure.training.errors import StoreConflict, StoreError
from perdure.training.run_dir import RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.fence import claim_run, record_launch, remote_tokens, take_token

MadeRun = Any


def take(run: RunDir, store: ObjectStore | None, resumed_from: str | None = None) -> LaunchRecord:
    return take_token(run, store, run_id="gpt-1234", resumed_from=resumed_from, created=time.time(), host="here", pid=7)


def test_the_next_token_is_above_what_is_here_and_in_the_store(store: ObjectStore, made: MadeRun) -> None:
    assert take(made.dir, store).token == 2
    for token in (5, 11):
        store.put(f"launches/{token:04d}.json", b"even when its record is unreadable")
    assert take(made.dir, store, "000000000100-0001").token == 12
    assert read_launches(made.dir)[12].resumed_from == "000000000100-0001"
    assert remote_tokens(store) == [2, 5, 11, 12]
    stored = msgspec.json.decode(store.get("launches/0012.json", limit=10_000), type=LaunchRecord)
    assert stored == read_launches(made.dir)[12]


def test_machines_that_ask_at_once_get_different_tokens(store: ObjectStore, make_run: Callable[..., MadeRun]) -> None:
    machines = [make_run(f"machine-{number}").dir for number in range(4)]
    taken: list[int] = []
    barrier = threading.Barrier(4)

    def ask(run: RunDir) -> None:
        barrier.wait()
        taken.extend(take(run, store).token for _ in range(3))

    threads = [threading.Thread(target=ask, args=(run,)) for run in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == remote_tokens(store) == sorted(set(taken))
    assert len(taken) == 12


def test_processes_on_one_machine_get_different_tokens_without_a_store(made: MadeRun) -> None:
    assert [take(made.dir, None).token for _ in range(3)] == [2, 3, 4]


def test_our_own_record_is_known_again_and_anothers_is_not(store: ObjectStore, made: MadeRun) -> None:
    record = read_launches(made.dir)[1]
    assert record_launch(store, record)
    assert record_launch(store, record)
    assert not record_launch(store, msgspec.structs.replace(record, owner="another"))


def test_a_store_that_is_down_gives_a_local_token_that_says_so(
    open_s3: Callable[..., Any], made: MadeRun, tmp_path: Path
) -> None:
    down = open_s3(endpoint="http://127.0.0.1:1")
    record = take(made.dir, down)
    assert record.token == 2
    assert "not reached" in record.notes["store"]
    assert read_launches(made.dir)[2] == record


def test_a_store_that_refuses_us_is_not_passed_over(open_s3: Callable[..., Any], made: MadeRun) -> None:
    with pytest.raises(StoreError, match="NoSuchBucket"):
        take(made.dir, open_s3(bucket="no-such-bucket"))
    assert sorted(read_launches(made.dir)) == [1]


def test_claiming_is_repeatable_and_excludes_other_runs(
    store: ObjectStore, made: MadeRun, make_run: Callable[..., MadeRun]
) -> None:
    claim_run(made.dir, store)
    claim_run(made.dir, store)
    other = make_run("other", "bert-9999")
    with pytest.raises(StoreConflict, match="holds run gpt-1234, not this run bert-9999"):
        claim_run(other.dir, store)


def test_a_token_burnt_by_a_crash_between_store_and_disk_is_skipped(store: ObjectStore, made: MadeRun) -> None:
    record = msgspec.structs.replace(read_launches(made.dir)[1], token=2, owner="a launch that died at once")
    assert record_launch(store, record)
    assert take(made.dir, store).token == 3
    assert create_launch(made.dir, record)  # its place on this disk is still free
