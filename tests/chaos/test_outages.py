"""What is around a run misbehaves for as long as it lasts: nothing is lost, nothing is started twice."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from harness import Direct, Run, copy_tiny
from prefect_rows import flow_runs_of
from storage.proxy import Reply, Seen, proxy_to

from perdure.training.checkpoint import facts

pytestmark = pytest.mark.chaos
ERRORS = ((500, "InternalError"), (503, "SlowDown"))


class Flaky:
    """A rule of the proxy: so large a share of the requests fails, half of them after the server has done the work."""

    def __init__(self, share: float, always: str = " ") -> None:
        self.share, self.always, self.dice, self.failed = share, always, random.Random(1), 0
        self._lock = threading.Lock()

    def __call__(self, seen: Seen) -> Reply | None:
        with self._lock:
            status, code = self.dice.choice(ERRORS)
            fails, after = self.dice.random() < self.share, self.dice.random() < 0.5
            if not fails and self.always not in seen.path:
                return None
            self.failed += 1
            return Reply(status, code, after=after and self.always not in seen.path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run(copy_tiny(tmp_path_factory.mktemp("reference") / "tiny"), "store.url=''")
    assert Direct(run).train_to_end().reason == "complete"
    return run.digest()


def state_in_prefect(run: Run) -> str:
    [one] = flow_runs_of(run)
    return one.state.type.value if one.state else ""


def test_errors_of_the_store_and_of_the_api_during_a_whole_run_lose_nothing(
    prefect_api: str, s3_server: Any, tmp_path: Path, reference: str
) -> None:
    """The API's websockets never work."""
    bucket, store, api = s3_server.make_bucket(), Flaky(0.25), Flaky(0.1, always="/events/")
    with proxy_to(s3_server.endpoint, store) as s3, proxy_to(prefect_api, api) as prefect:
        where = (f"store.url='s3://{bucket}/run'", f"store.endpoint_url='{s3.endpoint}'", "store.region='us-east-1'")
        run = Run(copy_tiny(tmp_path / "tiny"), *where, "params.sleep=0.2")
        environment = {"PREFECT_API_URL": f"{prefect.endpoint}/api", **s3_server.admin.environment()}
        assert run.finish(env=environment) == 0, run.log()
    assert run.digest() == reference
    assert min(store.failed, api.failed) >= 10
    assert [name.step for name in run.committed()] == list(range(5, 45, 5))
    assert all(facts.is_in(run.dir, name, "store") for name in run.committed())
    assert len(list(run.dir.launches.glob("????.json"))) == 1, "the launch was not disturbed"
    assert run.kinds().count("completed") == 1
    assert state_in_prefect(run) == "COMPLETED"
    assert "failed" not in run.kinds()


def test_a_rank_that_holds_the_gil_for_a_minute_is_neither_killed_nor_lost(
    prefect_api: str, tmp_path: Path, reference: str
) -> None:
    run = Run(copy_tiny(tmp_path / "tiny"), "launch.env.TINY_hold_gil_at=12", "launch.env.TINY_hold_secs=61")
    assert run.finish() == 0, run.log()
    assert run.digest() == reference
    assert len(list(run.dir.launches.glob("????.json"))) == 1
    assert {"failed", "recovered", "stopped"}.isdisjoint(run.kinds())
