"""What each launcher does first: it ends with the agent, and gives its ranks a place to meet on the loopback interface (rank 0
does, where a command started them). torch's own ways to meet listen on all interfaces, and c10d unpickles what anybody who gets
there has put."""

import contextlib
import os
import socket
from collections.abc import Iterator

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported all the same

from perdure.training.process import die_with_parent

HOST = "127.0.0.1"


def become_launcher() -> None:
    """End with the agent, and be the parent that the ranks look for."""
    die_with_parent(int(os.environ["PERDURE_AGENT_PID"]))
    os.environ["PERDURE_AGENT_PID"] = str(os.getpid())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def meeting_place(host: str = HOST, port: int = 0) -> TCPStore:
    """A store in this process, at that port or a free one."""
    listener = socket.create_server((host, port))
    return TCPStore(host, listener.getsockname()[1], is_master=True, master_listen_fd=listener.detach())


@contextlib.contextmanager
def hosted() -> Iterator[None]:
    """In rank 0 of a launch command: have the place where it says that the ranks meet."""
    store = None
    if "PERDURE_MEETING" in os.environ and os.environ["RANK"] == "0":
        store = meeting_place(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    yield
    del store
