"""Runs of several ranks under test: what each traces, who they are, and how they are killed."""

import json
import os
from pathlib import Path

from harness import Direct, Run, children, kill, wait_until

from perdure.training.process import ProcessId, identify

SLOW = "launch.env.TINY_sleep=0.3"
"""Slow enough to be hit in the middle."""


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
    """Those that live, in their order; none before both are there."""
    launcher = launcher_of(run)
    found = {number_of(pid): identify(pid) for pid in (children(launcher.pid) if launcher else [])}
    return [found[0], found[1]] if {0, 1} <= set(found) else []


def launcher_of(run: Run) -> ProcessId | None:
    return run.child_of_agent("engine.torchrun") or run.child_of_agent("engine.deepspeed_launch")


def number_of(pid: int) -> int:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return next((int(text.partition(b"=")[2]) for text in variables if text.startswith(b"RANK=")), -1)


def listening(pids: list[int]) -> set[str]:
    """Addresses at which these processes take connections."""
    sockets = {os.readlink(file) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    hexed = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}
    return {".".join(str(byte) for byte in reversed(bytes.fromhex(address))) for address in hexed}


def hit(run: Run, step: int, victims: list[int], number: int, *settings: str) -> tuple[Direct, int]:
    """Launch, wait for `step`, send a signal to these ranks; the step all had finished then."""
    direct = Direct(run)
    trainer = direct.launch([SLOW, tracing(run), *settings])
    wait_until(lambda: run.step() >= step or not trainer.is_alive(), f"step {step}")
    found, at = ranks(run), run.step()
    launcher = launcher_of(run)
    assert launcher is not None
    assert listening([launcher.pid, *(rank.pid for rank in found)]) == {"127.0.0.1"}, "the network has no business there"
    for victim in victims:
        kill(found[victim], number)
    trainer.process.wait(60)
    return direct, at
