"""However a run ends under a real worker: one notice of the right kind, the right state within a minute, no process left."""

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import RANKS, Run, children, copy_tiny, kill, wait_until
from prefect import get_client
from prefect.deployments import run_deployment
from prefect.states import Cancelling
from prefect_worker import Worker, flow_process, flow_runs, serving_pool, states
from slack_server import CHANNEL, SlackServer

from perdure.training.process import ProcessId, identify

pytestmark = pytest.mark.chaos
TOKEN = "xoxb-canary-5151515151-abcdefABCDEF"
STATE_SECS = 60.0


@pytest.fixture
def pool(prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setenv("SLACK_BOT_TOKEN", TOKEN)
    with serving_pool(tmp_path) as worker:
        yield worker


@dataclass(frozen=True)
class Ending:
    brought: Callable[[Run], None]
    """What is done to it at step 12."""
    says: str
    """The one notice."""
    state: str
    settings: tuple[str, ...] = ()
    goes_on: bool = False


def cancel(run: Run) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_runs(run)[0].id, Cancelling())


ENDINGS = {
    "exception": Ending(lambda _: None, "Failed: user at step", "FAILED", ("params.bug_at=17",)),
    "SystemExit": Ending(lambda _: None, "Failed: user at step", "FAILED", ("params.exit_at=17",)),
    "out of memory": Ending(
        lambda _: None, "Failed: oom at step", "COMPLETED", ("params.die_at=16", "params.die_how=memory"), goes_on=True
    ),
    "SIGTERM": Ending(
        lambda run: flow_process(run).send(signal.SIGTERM), "Stopped at step 13: SIGTERM", "CRASHED", goes_on=True
    ),
    "SIGKILL": Ending(lambda run: kill(flow_process(run)), "Failed: infrastructure at step", "CRASHED", goes_on=True),
    "cancelled": Ending(cancel, "Stopped at step", "CANCELLED"),
}


ADDED = {
    "def die(how: str) -> None:\n": """def die(how: str) -> None:
    if Path("died").exists():
        return
    Path("died").touch()
""",
    """        if params.get("bug_at")""": """        if params.get("exit_at") == step:
            raise SystemExit(3)
        if params.get("bug_at")""",
}
"""To the training code: it dies once only, and may exit."""


@pytest.mark.parametrize("name", ENDINGS)
def test_an_ending_is_told_once_and_its_state_is_right_within_a_minute(pool: Worker, tmp_path: Path, name: str) -> None:
    ending = ENDINGS[name]
    with SlackServer(TOKEN) as slack:
        toml = copy_tiny(tmp_path / "tiny")
        code = toml.parent / "train.py"
        for old, new in ADDED.items():
            assert old in code.read_text()
            code.write_text(code.read_text().replace(old, new))
        told = (f"notify.slack_channel='{CHANNEL}'", f"notify.slack_api='{slack.url}'")
        run = Run(toml, *Run.held_at(12), *ending.settings, *told)
        run_deployment("train/tests", parameters={"config": str(toml), "overrides": run.settings}, timeout=0, as_subflow=False)
        run.wait_until_held()
        ending.brought(run)
        run.go_on(told_to_stop=name in ("SIGTERM", "SIGKILL", "cancelled"))
        wait_until(lambda: states(run)[:1] == [ending.state], f"the state {ending.state}", STATE_SECS)
        if ending.goes_on:
            wait_until(lambda: states(run)[-1] == "COMPLETED", "it goes on")
        wait_until(lambda: not run.processes(), "no process left")
        wait_until(lambda: slack.roots and slack.roots[0]["edits"], "the root message")
        said = [str(reply["text"]).splitlines()[0] for reply in slack.replies]
    others = ("Recovered", "Resumed", "Completed")
    endings = [line for line in said if not line.startswith(others)]
    assert len(endings) == 1, said
    assert endings[0].startswith(ending.says)
    assert len([line for line in said if line.startswith("Completed")]) == ending.goes_on
    assert slack.problems == []


def descendants(process: ProcessId) -> list[ProcessId]:
    below = [identify(pid) for pid in children(process.pid)]
    return [*below, *(one for child in below for one in descendants(child))]


@pytest.mark.parametrize("how", ["cancelled", "SIGKILL"])
def test_ranks_and_the_workers_of_their_loaders_end_with_the_flow_run(pool: Worker, tmp_path: Path, how: str) -> None:
    """Two ranks with two workers each; the last step is saved all the same."""
    shutil.copytree(RANKS, tmp_path / "ranks")
    code = tmp_path / "ranks" / "train.py"
    code.write_text(code.read_text().replace("world=session.world_size\n", "world=session.world_size, num_workers=2\n"))
    run = Run(tmp_path / "ranks" / "run.toml", "params.kind=ddp", "launch.env.TINY_sleep=0.5")
    run_deployment("train/tests", parameters={"config": str(run.toml), "overrides": run.settings}, timeout=0, as_subflow=False)
    wait_until(lambda: run.step() >= 8, "step 8")
    flow, seen = flow_process(run), list[ProcessId]()

    def all_there() -> bool:
        """The workers are others in every epoch."""
        seen[:] = [flow, *descendants(flow)]
        return len(seen) >= 10

    wait_until(all_there, "the flow, agent, saver, torchrun, two ranks, four workers")
    if how == "cancelled":
        cancel(run)
    else:
        pool.kill()  # or it would start the next flow run
        kill(flow)
    wait_until(lambda: not any(one.is_alive() for one in seen), "nothing alive", run.config.launch.stop_grace + 5)
    wait_until(lambda: not run.processes(), "nothing else either", 5)
    assert run.committed()[-1].step >= 8
    if how == "cancelled":
        wait_until(lambda: states(run) == ["CANCELLED"], "the state Cancelled", STATE_SECS)
