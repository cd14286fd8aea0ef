"""What a launch command starts for each rank: learns from its environment which one it is, ties itself to the life of its
parent, and becomes the rank."""

import os
import socket
import sys

from perdure.training.wire import Wire

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""torch's, Open MPI's, MPICH's, Slurm's; the first that is set counts (mpirun in a Slurm job may hand on Slurm's)."""
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
UNKNOWN_RANK = -1


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if name in os.environ), None)


def main() -> None:
    path = os.environ.get("PERDURE_AGENT_SOCKET", "")
    if not path:
        sys.exit("perdure: the launch command must hand its environment on: PERDURE_AGENT_SOCKET is not in it")
    if not os.path.exists(path):
        sys.exit(f"perdure: no agent on {socket.gethostname()}: the launch command must start all ranks on the agent's machine")
    rank = _first(RANKS)
    if rank is None or not rank.isdecimal():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        Wire(connection).send({"rank": UNKNOWN_RANK})
        sys.exit(f"perdure: no rank: none of {', '.join(RANKS)} is a number")
    os.environ.update(RANK=rank, LOCAL_RANK=_first(LOCAL_RANKS) or rank, PERDURE_AGENT_PID=str(os.getppid()))
    os.execv(sys.executable, [sys.executable, "-m", "perdure.training.engine.main"])


if __name__ == "__main__":
    main()
