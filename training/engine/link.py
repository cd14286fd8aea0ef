"""The rank's side of the socket to its agent: orders in, snapshots and progress out."""

import os
import signal
import socket
import time
from typing import Any

from perdure.training.slots import SlotWriter
from perdure.training.wire import Message, Wire

_PROGRESS_SECS = 0.05
_WAIT_SECS = 0.2
"""A signal handler that sets `stop_reason` is noticed within this time even while waiting."""


class Link:
    """Connects at construction; `welcome` holds what the agent wants trained, `slots` the shared memory."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._wire = Wire(connection)
        self.welcome: Message = {}
        while not self.welcome:
            for message in self._wire.receive(None):
                self.welcome = message
            if self._wire.closed:
                raise ConnectionError("the agent is gone")
        self.slots = [SlotWriter(fd) for fd in self._wire.fds]
        self._free = list(range(len(self.slots)))
        self.leased = int(self.welcome["lease"])
        self.stop_reason = ""
        self.save_requested = False
        self._said = 0.0
        self._longest = 0.0
        self._last_step = 0.0

    def say(self, **message: Any) -> None:  # Any: JSON values
        self._wire.send(message)

    def phase(self, phase: str) -> None:
        self.say(phase=phase)

    def finished_step(self, step: int) -> None:
        """Tell the agent, at most twenty times a second and never waiting."""
        now = time.monotonic()
        if self._last_step:
            self._longest = max(self._longest, now - self._last_step)
        self._last_step = now
        if now - self._said >= _PROGRESS_SECS:
            self._said = now
            self._wire.try_send({"step": step, "longest": round(self._longest, 3)})

    def poll(self, timeout: float | None = 0.0) -> None:
        """Take in the orders that have arrived."""
        for message in self._wire.receive(timeout):
            if "lease" in message:
                self.leased = max(self.leased, int(message["lease"]))
            if "freed" in message:
                self._free.append(int(message["freed"]))
            self.save_requested |= bool(message.get("save"))
            self.stop_reason = self.stop_reason or str(message.get("stop", ""))
        if self._wire.closed:  # PDEATHSIG is on its way; do not train on meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_lease(self, step: int) -> None:
        """Return when a step after `step` may be trained, or a stop is asked for."""
        if step < self.leased or self.stop_reason:
            return
        self.say(phase="waiting for lease", step=step)
        while step >= self.leased and not self.stop_reason:
            self.poll(_WAIT_SECS)
        self.phase("training")
        self._last_step = 0.0

    def take_slot(self) -> int:
        """A free slot; waits (and says so) while all are still being written."""
        self.poll()
        if not self._free:
            self.phase("waiting for slot")
            while not self._free:
                self.poll(_WAIT_SECS)
            self.phase("training")
            self._last_step = 0.0
        return self._free.pop(0)

    def submit(self, slot: int, step: int) -> None:
        self.say(snapshot=slot, step=step)
