"""JSON lines, with descriptors where needed, over a Unix stream socket between agent, ranks and saver."""

import contextlib
import json
import socket
from typing import Any

MAX_FDS = 253
"""Of one message: what the kernel lets through (SCM_MAX_FD)."""
Message = dict[str, Any]  # Any: JSON values


class Wire:
    """One end. `send` writes whole messages; `receive` gives those that have arrived; `closed` once the peer is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.closed = False
        self._buffer = b""
        self.fds: list[int] = []

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        """False when the peer is gone; what it said before is still there to be received."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self.socket.setblocking(True)
            sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
            while sent < len(data):
                sent += self.socket.send(data[sent:])
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def try_send(self, message: Message) -> None:
        """Send only if it can be done without waiting: for news that the next news replaces."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            sent = self.socket.send(data, socket.MSG_DONTWAIT)
            if 0 < sent < len(data):  # never leave half a line behind
                self.socket.setblocking(True)
                self.socket.sendall(data[sent:])

    def receive(self, timeout: float | None = 0.0) -> list[Message]:
        """Messages that are there (0), or arrive within `timeout` seconds (None: wait)."""
        try:
            self.socket.settimeout(timeout)
            data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, MAX_FDS)
        except (BlockingIOError, TimeoutError, InterruptedError):
            return []
        except (ConnectionResetError, BrokenPipeError):
            data, fds = b"", []
        self.fds += fds
        if not data:
            self.closed = True
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.socket.close()
