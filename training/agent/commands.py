"""A launch command of the user's own, or srun: what is started, with which environment, and whether it can be. What it starts
is join.py, once for each rank."""

import shutil
import socket
import sys
from collections.abc import Mapping

from perdure.training.agent import roster
from perdure.training.agent.join import LOCAL_RANKS, RANKS
from perdure.training.config import RunConfig
from perdure.training.errors import ConfigError
from perdure.training.launch_settings import LaunchSection

_SRUN = (
    *("srun", "--nodes=1", "--ntasks={processes}", "--export=ALL", "--kill-on-bad-exit=1"),
    *("{python}", "-m", "{module}"),
)
COMMANDS = ("srun", "command")
"""Launchers that are words to be started, not a module of ours."""
_MODULE = "perdure.training.agent.join"
_STORE_OF_RANK_0 = {"PERDURE_MEETING": "rank 0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
"""engine/loopback.py opens it, and torch uses it in place of one that listens on all interfaces."""


def words(launch: LaunchSection) -> list[str]:
    """What to start."""
    slots = {"{python}": sys.executable, "{module}": _MODULE, "{processes}": str(launch.processes)}
    found = list(_SRUN if launch.launcher == "srun" else launch.command)
    for slot, value in slots.items():
        found = [word.replace(slot, value) for word in found]
    return found


def environment(inherited: Mapping[str, str], processes: int) -> dict[str, str]:
    """For the command: where the ranks meet, unless it says otherwise; without the rank that we may have ourselves."""
    own = {name: value for name, value in inherited.items() if name not in (*RANKS, *LOCAL_RANKS)}
    world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), **_STORE_OF_RANK_0}
    return {"GLOO_SOCKET_IFNAME": "lo", **own, **world, **meeting}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refuse_what_cannot_start(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Raises ConfigError."""
    launch = config.launch
    if launch.nodes > 1:
        roster.listen(launch).close()
    if launch.started_by not in COMMANDS:
        return
    seen = {**environment, **launch.env}
    if launch.launcher == "srun" and "SLURM_JOB_ID" not in seen:
        raise ConfigError(
            'launch.launcher = "srun", but this is no Slurm job',
            "start `perdure run` by sbatch or in salloc; see docs/slurm.md",
        )
    program = words(launch)[0]
    at = str(config.path.resolve().parent / program) if "/" in program else program
    if shutil.which(at, path=seen.get("PATH")) is None:
        raise ConfigError(f"the launch command starts {program!r}, which is not there", "install it, or name its path")
