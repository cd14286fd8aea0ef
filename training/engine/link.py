"""The rank's side of the socket to its agent: orders in, snapshots and progress out. What is asked of this rank counts only
once all ranks have agreed (`agree`), so that every one cuts and stops at the same step."""

import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from perdure.training.engine import signals
from perdure.training.slots import SlotWriter
from perdure.training.wire import Message, Wire

_PROGRESS_SECS = 0.05
_WAIT_SECS = 0.2
"""A signal handler that sets `stop_reason` is noticed within this time even while waiting."""


class Link:
    """Connects at construction; `welcome` holds what the agent wants trained, `slots` the shared memory."""

    def __init__(self, path: str, rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._wire = Wire(connection)
        self.rank = rank
        self.say(rank=rank)
        self.welcome: Message = {}
        while not self.welcome:
            for message in self._wire.receive(None):
                self.welcome = message
            if self._wire.closed:
                raise ConnectionError("the agent is gone")
        self.slots = [SlotWriter(fd) for fd in self._wire.fds]
        self._with_saver: set[int] = set()
        """Slots that count as taken: until all ranks know that the saver is done with them."""
        self._freed: set[int] = set()
        """Those of which this rank knows."""
        self._steps = [-1] * len(self.slots)
        """Step of the snapshot in each slot."""
        self.leased = self._own_lease = int(self.welcome["lease"])
        self._has_room = False
        self.stop_reason = ""
        self.save_requested = False
        self._asked_to_stop = ""
        self._asked_to_save = False
        self._said = 0.0
        self._longest = 0.0
        self._last_step = 0.0

    def close(self) -> None:
        self._wire.close()

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
                self._own_lease = max(self._own_lease, int(message["lease"]))
            if "freed" in message:
                self._freed.add(int(message["freed"]))
            self._has_room |= bool(message.get("room"))
            self._asked_to_save |= bool(message.get("save"))
            self._asked_to_stop = self._asked_to_stop or str(message.get("stop", ""))
        if self._wire.closed:  # PDEATHSIG is on its way; do not train on meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

    def ask_to_save(self) -> None:
        """As if the agent had asked: for a checkpoint after the step under way."""
        self._asked_to_save = True

    # what all ranks agree on

    def wishes(self) -> list[int]:
        """What this rank was asked or knows, as numbers of which the largest of all ranks counts."""
        asked, self._asked_to_save = self._asked_to_save, False
        return [self._stops, asked, -self._own_lease, *(slot in self._taken for slot in range(len(self.slots)))]

    def agree(self, wishes: Sequence[int]) -> None:
        """From here on this counts; `wishes` are the largest of all ranks."""
        stop, save, lease, *taken = wishes
        if stop and not self.stop_reason:
            asked = "SIGTERM" if signals.received else "another rank was asked to stop"
            self.stop_reason = self._asked_to_stop or asked
        self.save_requested |= bool(save)
        self.leased = max(self.leased, -lease)
        done = {slot for slot in self._freed if not taken[slot]}
        self._with_saver -= done
        self._freed -= done

    @property
    def _stops(self) -> bool:
        return bool(self._asked_to_stop) or signals.received

    @property
    def _taken(self) -> set[int]:
        return self._with_saver - self._freed

    def must_wait(self, step: int) -> bool:
        """Whether a step after `step` may not be trained yet."""
        return step >= self.leased and not self.stop_reason

    def wait_for_lease(self, step: int) -> None:
        """Return when this rank knows that a step after `step` may be trained, or is asked to stop."""
        if step < self._own_lease or self._stops:
            return
        started = time.monotonic()
        self.say(phase="waiting for lease", step=step)
        while step >= self._own_lease and not self._stops:
            self.poll(_WAIT_SECS)
        self.say(waited=round(time.monotonic() - started, 3), waited_for_lease=step)
        self._go_on()

    def wait_for_room(self, state_bytes: int, pieces: int) -> None:
        """Say how large the state is, and how much of it are pieces that no other rank has; return when its checkpoints have
        room on the disk, or a stop is asked for."""
        self._has_room = False
        self.say(state_bytes=state_bytes, pieces=pieces)
        while not self._has_room and not self._stops:
            self.poll(_WAIT_SECS)
        self._last_step = 0.0

    def _go_on(self) -> None:
        self.phase("training")
        self._last_step = 0.0

    def spare_slot(self) -> int | None:
        """Of the slots that the saver does not need, the one with the older snapshot; the same in every rank."""
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
            slot = min(self._freed, key=self._age, default=None)
        self._with_saver.discard(slot)
        self._freed.discard(slot)
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
