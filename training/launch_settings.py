"""[launch] of run.toml: how many ranks, what starts them, how long they may take."""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

SLOTS = ("python", "module", "processes")
"""What stands in braces in a launch command."""
_SLOT = re.compile(r"(?<!\$)\{([a-z_]*)\}")
_LONGEST_SECS = 31 * 86400.0
_MOST_NODES = 1024
_MOST_PROCESSES = 128
"""The agent has four descriptors for each, of the 1024 it may have; those of all slots travel in one message (wire.MAX_FDS)."""


class LaunchSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    processes: int = 1
    """Ranks on this machine; with `nodes`, on each."""
    nodes: int = 1
    """Machines; all but node 0 run `perdure node`."""
    address: str = ""
    """Name or IPv4 address at which the other nodes reach node 0; empty: its host name."""
    shared_disk: bool = True
    """Whether all nodes see one run directory; if not, each has its own, and checkpoints are in the store."""
    node_timeout: float = 30.0
    """Seconds without a sign of life of another node after which it counts as gone."""
    launcher: Literal["auto", "torchrun", "deepspeed", "srun", "command"] = "auto"
    """auto: one process is started directly, several by torchrun; torchrun: one too, so that torch.distributed works in it;
    deepspeed: by DeepSpeed's own; srun: as a step of the Slurm job around us; command: by `command`."""
    command: tuple[str, ...] = ()
    """The words that start all ranks, with `{python}`, `{module}` and `{processes}` in them."""
    stop_grace: float = 25.0
    """Seconds a stopping trainer has to finish its step and save, before it is killed."""
    startup_timeout: float = 600.0
    """Seconds from launch to the first finished step."""
    step_timeout: float = 0.0
    """Seconds without a finished step that count as a hang; 0: 5 x the longest step so far, at least 60."""
    env: dict[str, str] = {}
    """Environment of the ranks, `OMP_NUM_THREADS` say."""

    @property
    def world(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.processes

    @property
    def nodes_here(self) -> int:
        """Nodes whose checkpoints lie on the disk of this one."""
        return self.nodes if self.shared_disk else 1

    @property
    def started_by(self) -> str:
        """The launcher; empty where the only process is started directly."""
        if self.launcher == "auto":
            return "torchrun" if self.world > 1 else ""
        return self.launcher


def wrong_launch(launch: LaunchSection) -> Iterator[tuple[str, str]]:
    """Each setting that cannot be, with what to do."""
    if not 1 <= launch.processes <= _MOST_PROCESSES:
        fix = f"use 1 to {_MOST_PROCESSES}, one for each device"
        yield f"launch.processes = {launch.processes} is out of range", fix
    if not 1 <= launch.stop_grace <= _LONGEST_SECS:
        yield f"launch.stop_grace = {launch.stop_grace} is out of range", "give the trainer 1 second to a month to save"
    if not 1 <= launch.startup_timeout <= _LONGEST_SECS:
        fix = "use 1 second to a month; the default is 600"
        yield f"launch.startup_timeout = {launch.startup_timeout} is out of range", fix
    if not 0 <= launch.step_timeout <= _LONGEST_SECS:
        fix = "use 0 for automatic, or seconds up to a month"
        yield f"launch.step_timeout = {launch.step_timeout} is out of range", fix
    yield from _wrong_nodes(launch)
    yield from _wrong_command(launch)
    for name, value in launch.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            yield f"launch.env: {name!r} is no environment variable", "use letters, digits and _; no zero byte in its value"
        if name.startswith("PERDURE_"):
            yield f"launch.env: {name} is set by Perdure itself", "leave it out"


def _wrong_nodes(launch: LaunchSection) -> Iterator[tuple[str, str]]:
    if not 1 <= launch.nodes <= _MOST_NODES:
        yield f"launch.nodes = {launch.nodes} is out of range", f"use 1 to {_MOST_NODES}"
    if not 1 <= launch.node_timeout <= _LONGEST_SECS:
        yield f"launch.node_timeout = {launch.node_timeout} is out of range", "use 1 second to a month; the default is 30"
    if launch.nodes > 1 and launch.launcher not in ("auto", "torchrun"):
        fix = "leave launch.launcher out: each node starts its own ranks"
        yield f'launch.nodes = {launch.nodes} and launch.launcher = "{launch.launcher}" exclude each other', fix
    if launch.nodes == 1 and not launch.shared_disk:
        yield "launch.shared_disk = false and launch.nodes = 1 exclude each other", "leave launch.shared_disk out"
    if re.search(r"[^\w.-]", launch.address):
        yield f"launch.address = {launch.address!r} is neither a name nor an IPv4 address", "write it without a port"


def _wrong_command(launch: LaunchSection) -> Iterator[tuple[str, str]]:
    words = launch.command
    if launch.launcher != "command":
        if words:
            fix = 'write launch.launcher = "command", or leave launch.command out'
            yield f'launch.command is set, and launch.launcher = "{launch.launcher}" does not use it', fix
        return
    if not any("{module}" in word for word in words):
        fix = 'write for example command = ["mpirun", "-n", "{processes}", "{python}", "-m", "{module}"]'
        yield "launch.command starts no rank: {module} is not in it", fix
    elif not words[0].strip() or any("\0" in word for word in words):
        yield f"launch.command = {list(words)} cannot be started", "begin with a program; use no zero byte"
    for name in (name for word in words for name in _SLOT.findall(word) if name not in SLOTS):
        yield f"launch.command: {{{name}}} means nothing", "use {python}, {module} and {processes}"
