"""What the agent starts for several ranks: torchrun, which only starts them. Watching them and starting again is ours."""

import os
import sys
from functools import partial
from typing import NamedTuple

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported all the same
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from perdure.training.engine.interfaces import interface_towards
from perdure.training.engine.loopback import HOST, become_launcher, meeting_place

_NEVER = "86400"
"""Seconds between its looks at the ranks. The agent watches them, and must be the one to learn how they ended."""


class _Place(NamedTuple):
    """This node, and where the ranks of all nodes meet; node 0 listens there."""

    node: int = 0
    nodes: int = 1
    host: str = HOST
    port: int = 0
    listener: int = -1

    def store(self) -> TCPStore:
        if self.nodes == 1:
            return meeting_place()
        if self.listener < 0:
            return TCPStore(self.host, self.port)
        return TCPStore(self.host, self.port, is_master=True, master_listen_fd=self.listener)


class _Settled(RendezvousHandler):
    """Nothing is left to be agreed on: every node knows its number, and those of its ranks follow from that."""

    def __init__(self, place: _Place, parameters: RendezvousParameters) -> None:
        self._place, self._id, self._store = place, parameters.run_id, place.store()

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        place, store = self._place, PrefixStore(self._id, self._store)
        return RendezvousInfo(store, place.node, place.nodes, RendezvousStoreInfo(place.host, self._store.port))

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
    processes, *words = sys.argv[1:]
    place = _Place()
    if words:
        node, nodes, host, port, listener = words
        place = _Place(int(node), int(nodes), host, int(port), int(listener))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(host))
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks are numbered without asking other nodes
    become_launcher()
    rendezvous_handler_registry.register("perdure", partial(_Settled, place))
    ours = [f"--nnodes={place.nodes}", "--rdzv-backend=perdure", f"--rdzv-endpoint={place.host}", "--max-restarts=0"]
    ours += [f"--local-addr={place.host}"] if place.node == 0 else []
    torchrun([*ours, f"--nproc-per-node={processes}", f"--monitor-interval={_NEVER}", "-m", "perdure.training.engine.main"])


if __name__ == "__main__":
    main()
