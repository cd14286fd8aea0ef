"""Drives real runs for the crash tests: starts `perdure run` or a bare agent, finds and kills processes, reads what is left."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from perdure.training.agent.launch import Trainer
from perdure.training.agent.lock import RunLock, read_agent
from perdure.training.checkpoint import catalog, lineage
from perdure.training.config import load_config
from perdure.training.process import ProcessId, identify
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import open_store

TINY, RANKS = (Path(__file__).parent / name for name in ("tiny", "ranks"))
PERDURE = [sys.executable, "-m", "perdure.cli.main"]
PATIENCE = 240.0
"""Seconds after which a test gives up: no limit of the product, and far from what a busy machine takes."""


def copy_tiny(folder: Path) -> Path:
    """The TINY run in a folder of its own; returns its run.toml."""
    shutil.copytree(TINY, folder)
    return folder / "run.toml"


def wait_until(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
    """Poll for a fact; the test fails by name when it does not come true."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(0.01)


class Run:
    """One run directory under test, from its run.toml."""

    def __init__(self, toml: Path, *settings: str) -> None:
        self.toml, self.settings = toml, list(settings)
        self.config = load_config(toml, settings)
        self.dir = RunDir(self.config.run_dir)

    # the command a user types

    def command(self, *extra: str) -> list[str]:
        return [*PERDURE, "run", str(self.toml), *(part for text in self.settings for part in ("--set", text)), *extra]

    def start(self, *extra: str, env: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
        log = open(self.toml.parent / "parent.log", "ab")
        with log:
            return subprocess.Popen(
                self.command(*extra),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def finish(self, *extra: str, env: dict[str, str] | None = None) -> int:
        """Run to the end; the exit code."""
        return self.start(*extra, env=env).wait(PATIENCE * 2)

    def log(self) -> str:
        return (self.toml.parent / "parent.log").read_text()

    # a step to be met at

    @staticmethod
    def held_at(*steps: int) -> list[str]:
        """Settings of a launch that waits after so many finished steps until `go_on`: what is done to it hits its middle. Of
        two ranks the second one waits, and with it the first; it can do so at several steps (`go_on_until_held`)."""
        return [f"launch.env.TINY_wait_at={','.join(map(str, steps))}", "launch.step_timeout=200"]

    def hold_again(self) -> None:
        """What an earlier launch left of its wait is gone."""
        for name in ("go-on", "held"):
            (self.toml.parent / name).unlink(missing_ok=True)

    def start_held_at(self, step: int, env: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
        """`perdure run`, waiting after that step."""
        self.hold_again()
        parent = self.start(*(part for text in self.held_at(step) for part in ("--set", text)), env=env)
        self.wait_until_held()
        return parent

    def wait_until_held(self) -> None:
        wait_until((self.toml.parent / "held").exists, "the step at which it waits")

    def go_on(self, *, told_to_stop: bool = False) -> None:
        """At once, or when the agent has told the ranks to stop after this step."""
        if told_to_stop:
            wait_until(lambda: self.state() == "stopping", "told to stop")
        (self.toml.parent / "go-on").touch()

    def go_on_until_held(self) -> None:
        """To the next of several steps."""
        (self.toml.parent / "held").unlink()
        self.go_on()
        self.wait_until_held()

    # what is on disk

    def digest(self) -> str:
        """State digest of the last step's checkpoint."""
        name = lineage.lineage(self.dir)[0]
        assert name.step == self.config.run.steps
        return catalog.manifest_of(self.dir, name).state_digest

    def committed(self) -> list[CheckpointName]:
        names = (CheckpointName.parse(folder.name) for folder in self.dir.checkpoints.glob("*"))
        return sorted(name for name in names if name and self.dir.manifest(name).exists())

    def step(self) -> int:
        try:
            return int(json.loads(self.dir.progress_json.read_bytes())["step"])
        except (OSError, ValueError):
            return 0

    def state(self) -> str:
        try:
            return str(json.loads(self.dir.progress_json.read_bytes())["state"])
        except (OSError, ValueError):
            return ""

    def has_started(self) -> bool:
        return self.step() > 0

    def events(self) -> list[dict[str, object]]:
        """A line that is being written waits for the next look, as for every reader."""
        return [json.loads(line) for line in self.dir.events.read_text().split("\n")[:-1]]

    def kinds(self) -> list[str]:
        return [str(event["kind"]) for event in self.events()]

    # its processes

    def agent(self) -> ProcessId | None:
        agent = read_agent(self.dir)
        return agent if agent and agent.is_alive() else None

    def child_of_agent(self, module: str) -> ProcessId | None:
        """The agent's child that runs this module: `saver` or `engine.main`."""
        agent = self.agent()
        for pid in children(agent.pid) if agent else []:
            if module in command_line(pid):
                return identify(pid)
        return None

    def rank(self) -> ProcessId | None:
        return self.child_of_agent("engine.main")

    def saver(self) -> ProcessId | None:
        return self.child_of_agent("agent.saver")

    def flow(self) -> ProcessId | None:
        for pid in all_pids():
            line = command_line(pid)
            if "perdure.flows.main" in line and str(self.toml) in line:
                return identify(pid)
        return None

    def processes(self) -> list[int]:
        """Every live process that belongs to this run, by command line or ancestry of its agent."""
        own = [pid for pid in all_pids() if str(self.toml.parent) in command_line(pid) and pid != os.getpid()]
        agent = self.agent()
        return own + (children(agent.pid) if agent else [])


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Started(Protocol):
    def kill(self) -> None: ...


LAUNCHED: list[Started] = []
"""By the test that runs; what it leaves running is ended after it (tests/conftest.py)."""


class Direct:
    """Launches without Prefect: the same lock, tokens, agent, saver and rank, driven from the test."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trainer: Trainer | None = None

    def launch(self, settings: Sequence[str] = (), *, lease: int | None = None, replan: bool = False) -> Trainer:
        from perdure.flows.start import next_token, open_run

        self.run.hold_again()
        config = load_config(self.run.toml, [*self.run.settings, *settings])
        store = None if config.launch.shared_disk else open_store(config.store_url, config.store)
        start = open_run(config, store, replan=replan)
        self.lock = RunLock.acquire(self.run.dir, orphan_wait=20.0)
        record = next_token(config, store, start)
        self.trainer = Trainer.start(
            config,
            [*self.run.settings, *settings],
            self.lock,
            run_id=start.run_id,
            token=record.token,
            resume=start.resume,
            replan=replan,
        )
        LAUNCHED.append(self.trainer)
        self.trainer.lease(lease or config.run.steps)
        return self.trainer

    def end(self, timeout: float = PATIENCE) -> lineage.LaunchEnd:
        assert self.trainer is not None
        end = self.trainer.end(timeout)
        self.lock.close()
        return end

    def train_to_end(self, settings: Sequence[str] = ()) -> lineage.LaunchEnd:
        self.launch(settings)
        assert self.trainer is not None
        self.trainer.process.wait(PATIENCE)
        return self.end()


def kill(process: ProcessId | None, number: int = signal.SIGKILL) -> None:
    assert process is not None, "nothing to kill"
    process.send(number)


def freeze(process: ProcessId | None) -> None:
    """Until it gets SIGCONT; what it was about to do is done when this returns, or waits."""
    kill(process, signal.SIGSTOP)
    assert process is not None
    wait_until(lambda: all(state in "tT" for state in _thread_states(process.pid)), "it stands still")


def _thread_states(pid: int) -> list[str]:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            states.append(task.joinpath("stat").read_text().rpartition(")")[2].split()[0])
    return states
