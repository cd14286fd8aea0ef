"""A real process worker for tests, started as a user starts it; and what the server says of a run's flow runs."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Run
from prefect_rows import deployed_flow_runs_of

from perdure.training.process import ProcessId, identify

PREFECT = str(Path(sys.executable).parent / "prefect")
YAML = """
deployments:
  - name: tests
    entrypoint: perdure.flows.train.train
    pull: []
    work_pool: {name: tests}
"""


class Worker:
    """On a pool that is there."""

    def __init__(self, pool: str, folder: Path) -> None:
        with open(folder / "worker.log", "ab") as log:
            command = [PREFECT, "worker", "start", "--pool", pool]
            environment = {**os.environ, "PREFECT_WORKER_QUERY_SECONDS": "1"}
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environment
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def serving_pool(folder: Path) -> Iterator[Worker]:
    """The deployment `train/tests`, and a worker for its pool."""
    (folder / "prefect.yaml").write_text(YAML)
    for command in (["work-pool", "create", "tests", "--type", "process", "--overwrite"], ["deploy", "--all"]):
        subprocess.run([PREFECT, "--no-prompt", *command], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=120)
    worker = Worker("tests", folder)
    yield worker
    worker.stop()


def flow_process(run: Run) -> ProcessId:
    """The agent's parent."""
    agent = run.agent()
    assert agent is not None
    stat = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()
    return identify(int(stat[1]))


def flow_runs(run: Run) -> list[Any]:
    """Those of its own deployments and of `train/tests` that no schedule made, oldest first, upkeep included."""
    return deployed_flow_runs_of(run, run.config.run.name, "tests")


def states(run: Run) -> list[str]:
    return [one.state.type.value for one in flow_runs(run) if one.state is not None]
