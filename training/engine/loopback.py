"""What each launcher does first: it ends with the agent, and gives its ranks a place to meet on the loopback interface.
torch's own ways to meet listen on all interfaces, and c10d unpickles what anybody who gets there has put."""

import os
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported all the same

from perdure.training.process import die_with_parent

HOST = "127.0.0.1"


def become_launcher() -> None:
    """End with the agent, and be the parent that the ranks look for."""
    die_with_parent(int(os.environ["PERDURE_AGENT_PID"]))
    os.environ["PERDURE_AGENT_PID"] = str(os.getpid())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def meeting_place() -> TCPStore:
    """A store in this process, at a free port."""
    listener = socket.create_server((HOST, 0))
    return TCPStore(HOST, listener.getsockname()[1], is_master=True, master_listen_fd=listener.detach())
