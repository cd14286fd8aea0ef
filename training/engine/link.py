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
        self._with_saver: set[int] = set()
        self._steps = [-1] * len(self.slots)
        """Step of the snapshot in each slot."""
        self.leased = int(self.welcome["lease"])
        self._has_room = False
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
                self._with_saver.discard(int(message["freed"]))
            self._has_room |= bool(message.get("room"))
            self.save_requested |= bool(message.get("save"))
            self.stop_reason = self.stop_reason or str(message.get("stop", ""))
        if self._wire.closed:  # PDEATHSIG is on its way; do not train on meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

    def must_wait(self, step: int) -> bool:
        """Whether a step after `step` may not be trained yet."""
        return step >= self.leased and not self.stop_reason

    def wait_for_lease(self, step: int) -> None:
        """Return when a step after `step` may be trained, or a stop is asked for."""
        if not self.must_wait(step):
            return
        self.say(phase="waiting for lease", step=step)
        while self.must_wait(step):
            self.poll(_WAIT_SECS)
        self._go_on()

    def wait_for_room(self, state_bytes: int) -> None:
        """Say how large the state is; return when its checkpoints have room on the disk, or a stop is asked for."""
        self._has_room = False
        self.say(state_bytes=state_bytes)
        while not self._has_room and not self.stop_reason:
            self.poll(_WAIT_SECS)
        self._last_step = 0.0

    def _go_on(self) -> None:
        self.phase("training")
        self._last_step = 0.0

    def spare_slot(self) -> int | None:
        """Of the slots that the saver does not need, the one with the older snapshot."""
        self.poll()
        return min((slot for slot in range(len(self.slots)) if slot not in self._with_saver), key=self._age, default=None)

    def _age(self, slot: int) -> int:
        return self._steps[slot]

    def holds_newest(self, slot: int) -> bool:
        """Whether the snapshot in `slot` is the newest: to overwrite it is to be without it until the new one is whole."""
        return self._steps[slot] == max(self._steps)

    def take_slot(self, step: int) -> int:
        """As `spare_slot`; waits (and says so) while the saver needs them all."""
        slot = self.spare_slot()
        if slot is not None:
            return slot
        started = time.monotonic()
        self.say(phase="waiting for slot", waiting_for_slot=step)
        while slot is None:
            self.poll(_WAIT_SECS)
            slot = self.spare_slot()
        self.say(waited=round(time.monotonic() - started, 3), waiting_for_slot=step)
        self._go_on()
        return slot

    def submit(self, slot: int, step: int) -> None:
        """Have the saver write the snapshot in `slot`."""
        self._steps[slot] = step
        self._with_saver.add(slot)
        self.say(snapshot=slot, step=step)

    def hold(self, slot: int, step: int) -> None:
        """The snapshot in `slot` is whole; the agent finds it there if this process dies before the next."""
        self._steps[slot] = step
