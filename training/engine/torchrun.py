"""What the agent starts for several ranks: torchrun, which ends with the agent and only starts them. Watching them and starting
again is ours."""

import os
import socket
import sys

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported all the same
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from perdure.training.process import die_with_parent

_NEVER = "86400"
"""Seconds between its looks at the ranks. The agent watches them, and must be the one to learn how they ended."""
_HOST = "127.0.0.1"


class _ThisMachine(RendezvousHandler):
    """The ranks meet at a port of the loopback interface. torch's own ways to meet listen on all interfaces, and c10d unpickles
    what anybody who gets there has put."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._id = parameters.run_id
        listener = socket.create_server((_HOST, 0))
        self._port = listener.getsockname()[1]
        self._store = TCPStore(_HOST, self._port, is_master=True, master_listen_fd=listener.detach())

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._id, self._store), 0, 1, RendezvousStoreInfo(_HOST, self._port))

    def get_backend(self) -> str:
        return "perdure"

    def get_run_id(self) -> str:
        return self._id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def main() -> None:
    die_with_parent(int(os.environ["PERDURE_AGENT_PID"]))
    os.environ["PERDURE_AGENT_PID"] = str(os.getpid())  # the parent that the ranks are to look for
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rendezvous_handler_registry.register("perdure", _ThisMachine)
    local = ["--nnodes=1", "--rdzv-backend=perdure", f"--rdzv-endpoint={_HOST}", f"--local-addr={_HOST}", "--max-restarts=0"]
    torchrun([*local, f"--nproc-per-node={sys.argv[1]}", f"--monitor-interval={_NEVER}", "-m", "perdure.training.engine.main"])


if __name__ == "__main__":
    main()
