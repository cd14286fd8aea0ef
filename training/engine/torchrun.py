"""What the agent starts for several ranks: torchrun, which only starts them. Watching them and starting again is ours."""

import sys

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported all the same
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from perdure.training.engine.loopback import HOST, become_launcher, meeting_place

_NEVER = "86400"
"""Seconds between its looks at the ranks. The agent watches them, and must be the one to learn how they ended."""


class _ThisMachine(RendezvousHandler):
    def __init__(self, parameters: RendezvousParameters) -> None:
        self._id = parameters.run_id
        self._store = meeting_place()

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._id, self._store), 0, 1, RendezvousStoreInfo(HOST, self._store.port))

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
    become_launcher()
    rendezvous_handler_registry.register("perdure", _ThisMachine)
    local = ["--nnodes=1", "--rdzv-backend=perdure", f"--rdzv-endpoint={HOST}", f"--local-addr={HOST}", "--max-restarts=0"]
    torchrun([*local, f"--nproc-per-node={sys.argv[1]}", f"--monitor-interval={_NEVER}", "-m", "perdure.training.engine.main"])


if __name__ == "__main__":
    main()
