"""A run directory to write checkpoints to, and a process that prunes and rolls up in it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.training.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory without a run.json."""
    return RunDir(tmp_path / "run")


@pytest.fixture(scope="module")
def order_upkeep() -> Iterator[Callable[..., int]]:
    """Have a forked process prune or roll up under a fail plan; its exit status."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, here / "forking_upkeep.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        stdin, stdout = worker.stdin, worker.stdout

        def give(run: RunDir, plan: str = "", act: str = "prune", keep_last: int = 1) -> int:
            stdin.write(json.dumps({"run": str(run.root), "plan": plan, "act": act, "keep_last": keep_last}) + "\n")
            stdin.flush()
            return int(stdout.readline())

        yield give
        stdin.close()
        assert worker.wait(30) == 0


@pytest.fixture(scope="module")
def order() -> Iterator[Callable[..., int]]:
    """Have a forked process write (or check, or take a token) under a fail plan; its exit status."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parent)}
    with subprocess.Popen(
        [sys.executable, here / "forking_writer.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        stdin, stdout = writer.stdin, writer.stdout

        def give(run: RunDir, plan: str = "", act: str = "write", step: int = 4, seed: int = 4, base: object = "") -> int:
            told = {"run": str(run.root), "plan": plan, "act": act, "step": step, "seed": seed, "base": str(base)}
            stdin.write(json.dumps(told) + "\n")
            stdin.flush()
            return int(stdout.readline())

        yield give
        stdin.close()
        assert writer.wait(30) == 0
