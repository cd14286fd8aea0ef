"""Runs of several ranks under test: what each traces, who they are, and how they are killed."""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import LAUNCHED, PATIENCE, PERDURE, RANKS, Direct, Run, all_pids, children, command_line, kill, wait_until

from perdure.training.agent import roster
from perdure.training.process import SESSION_VARIABLE, ProcessId, identify
from perdure.training.run_dir import CheckpointName

SLOW = "launch.env.TINY_sleep=0.3"
"""Slow enough to be hit in the middle."""


def ranks_run(folder: Path, kind: str) -> Run:
    """The run of two ranks, `ddp` or `fsdp2`, in a folder of its own."""
    shutil.copytree(RANKS, folder / kind)
    return Run(folder / kind / "run.toml", f"params.kind={kind}", "params.name_at=8")


class OwnDisks:
    """A run of two nodes without a shared disk, as each of them sees it. Here their directories lie side by side."""

    def __init__(self, folder: Path, kind: str, store: str, *settings: str) -> None:
        found = ranks_run(folder, kind)
        common = [*found.settings, "launch.nodes=2", "launch.processes=1", "launch.shared_disk=false", f"store.url={store}"]
        self.zero, self.one = (Run(found.toml, *common, *settings, f"run.dir=disk-{number}") for number in (0, 1))

    def node(self, *within: str) -> "OtherNode":
        """`perdure node` with the disk that it has, or a bare one."""
        return OtherNode(self.one, *within, settings=self.one.settings)


def tracing(run: Run) -> str:
    return f"launch.env.TINY_trace={run.toml.parent}/trace"


def surviving(run: Run, ranks: int = 2) -> dict[tuple[int, int], str]:
    """The last line of each step of each rank: the earlier ones were rolled back."""
    found = {}
    for rank in range(ranks):
        for line in (run.toml.parent / f"trace-{rank}").read_text().splitlines():
            found[(rank, json.loads(line)["step"])] = line
    return found


def ranks(run: Run) -> list[ProcessId]:
    """Those of the living agent, whatever started them, in their order; none before both are there."""
    agent, found = run.agent(), {}
    for pid in all_pids() if agent else []:
        own = environment(pid)
        if agent and own.get(SESSION_VARIABLE) == str(agent.pid) and "engine.main" in command_line(pid):
            found[int(own.get("RANK", 0))] = identify(pid)
    return [found[0], found[1]] if {0, 1} <= set(found) else []


def launcher_of(run: Run) -> ProcessId | None:
    return run.child_of_agent("engine.torchrun") or run.child_of_agent("engine.deepspeed_launch")


def environment(pid: int) -> dict[str, str]:
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or not ours
        return {}
    return dict(text.split("=", 1) for text in found if "=" in text)


def listening(pids: list[int]) -> set[str]:
    """Addresses at which these processes take connections."""
    sockets = set[str]()
    for file in (file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(file))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    hexed = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}
    return {".".join(str(byte) for byte in reversed(bytes.fromhex(address))) for address in hexed}


def hit(run: Run, step: int, victims: list[int], number: int, *settings: str) -> tuple[Direct, int]:
    """Launch, send these ranks a signal when all have finished `step` and the second one waits within the next; that step."""
    direct = Direct(run)
    trainer = direct.launch([tracing(run), *run.held_at(step), *settings])
    run.wait_until_held()
    found = ranks(run)
    pids = [process.pid for process in (launcher_of(run), *found) if process]
    assert listening(pids) == {"127.0.0.1"}, "the network has no business there"
    for victim in victims:
        kill(found[victim], number)
    trainer.process.wait(PATIENCE)
    return direct, step


def train_with(run: Run, processes: int, until: int, *settings: str) -> None:
    """A launch with so many ranks, which `until` ends at a checkpoint."""
    direct = Direct(run)
    here = [tracing(run), f"launch.processes={processes}", "launch.launcher=torchrun", *settings]
    trainer = direct.launch(here, lease=until, replan=True)
    ours = CheckpointName(until, trainer.token)
    wait_until(lambda: ours in run.committed() or not trainer.is_alive(), f"step {until}")
    end = direct.end()
    assert end.reason in ("stopped", "complete"), end


def losses_with(run: Run, processes: int, steps: range, reference: dict[tuple[int, int], str]) -> list[tuple[float, float]]:
    """Of each of these steps with so many ranks, and of the undisturbed run: both had the same samples in it."""
    lines, losses = surviving(run, processes), []
    for step in steps:
        had = [json.loads(lines[(rank, step)]) for rank in range(processes)]
        wanted = [json.loads(line) for (_, its), line in sorted(reference.items()) if its == step]
        assert _indices(had) == _indices(wanted), "the same samples in every global batch"
        losses.append((_mean_loss(had), _mean_loss(wanted)))
    return losses


def assert_about_the_same(losses: list[tuple[float, float]]) -> None:
    here, undisturbed = (statistics.mean(column) for column in zip(*losses, strict=True))
    assert abs(here / undisturbed - 1) < 0.2, "the noise of new ranks is another, the weights are not"


def _indices(ranks: list[dict[str, Any]]) -> list[int]:
    return sorted(index for rank in ranks for index in rank["indices"])


def _mean_loss(ranks: list[dict[str, Any]]) -> float:
    return statistics.mean(float.fromhex(rank["loss"]) for rank in ranks)


class OtherNode:
    """`perdure node` for node 1 of a run, on this machine; `within`: words that start it elsewhere; `settings` of its own."""

    def __init__(self, run: Run, *within: str, settings: Sequence[str] = ()) -> None:
        self.run, self._log = run, run.toml.parent / "node-1.log"
        with open(self._log, "ab") as log:
            words = [*within, *PERDURE, "node", str(run.toml), "--node", "1", "--set", "launch.nodes=2"]
            words += [part for text in settings for part in ("--set", text)]
            self.process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        LAUNCHED.append(self)

    def agent(self, token: int) -> ProcessId | None:
        beat = roster.read_node(self.run.dir, token, 1)
        return beat.process if beat else None

    def _session(self, token: int) -> tuple[int, list[int]]:
        """The agent, and what it has started for training."""
        agent = self.agent(token)
        assert agent is not None
        return agent.pid, [pid for pid in all_pids() if environment(pid).get(SESSION_VARIABLE) == str(agent.pid)]

    def kill_rank(self, token: int) -> None:
        """And nothing else."""
        [rank] = [pid for pid in self._session(token)[1] if "engine.main" in command_line(pid)]
        kill(identify(rank))

    def lose(self, token: int) -> None:
        """All of it at once, as when the machine is gone."""
        agent, left = self._session(token)
        lost = [identify(pid) for pid in (self.process.pid, agent, *left, *children(agent))]
        for process in lost:
            process.send(signal.SIGKILL)
        self.process.wait()
        assert all(process.wait(PATIENCE) for process in lost), "none of them writes any more"

    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its agent goes with it
            self.process.wait()
