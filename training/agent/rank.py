"""The agent's side of one rank: its socket, its process, what it last said."""

import os
import select
import time

from perdure.training.wire import Message, Wire


class Rank:
    def __init__(self, number: int, step: int) -> None:
        self.number = number
        self.wire: Wire | None = None
        self._pidfd = -1
        self._gone = False
        self.pid = 0
        """0 until it is known."""
        self.phase = "starting"
        """starting, setup, training, evaluation, waiting for lease, waiting for slot, leaving."""
        self.step = step
        self.made_a_step = False
        """In this launch; the first one may compile, import and warm up for long."""
        self.longest_step = 0.0
        self.last_news = time.monotonic()
        self.finished = False
        self.stopped = False
        self.failure: tuple[str, str] = ("", "")
        self.status = 0
        """How it ended by itself; negative: the signal that killed it."""
        self.vanished = False
        """It ended by itself, before its time, and only its parent knows how."""

    def is_process(self, pid: int) -> None:
        if not self.pid:
            self.pid, self._pidfd = pid, os.pidfd_open(pid)

    @property
    def gone(self) -> bool:
        """Its process has ended (end of file on the socket would not say so: a forked child can hold it open)."""
        self._gone = self._gone or (self._pidfd >= 0 and bool(select.select([self._pidfd], [], [], 0)[0]))
        return self._gone

    @property
    def sources(self) -> list[int]:
        """What becomes readable when there is news of it."""
        heard = [self.wire.socket.fileno()] if self.wire and not self.wire.closed else []
        return heard if self._pidfd < 0 or self.gone else [*heard, self._pidfd]

    def receive(self) -> list[Message]:
        """New messages; what they say of progress is taken in here."""
        messages: list[Message] = []
        while self.wire and not self.wire.closed and (news := self.wire.receive()):
            messages += news
        for message in messages:
            self._take_in(message)
        return messages

    def _take_in(self, message: Message) -> None:
        if "phase" in message:
            self.phase = str(message["phase"])
        if "step" in message:
            self.step = int(message["step"])
            self.last_news = time.monotonic()
        if "longest" in message:
            self.made_a_step = True
            self.longest_step = max(self.longest_step, float(message["longest"]))
        self.finished |= bool(message.get("finished"))
        self.stopped |= bool(message.get("stopped"))
        if "failed" in message:
            self.failure = (str(message["failed"]), str(message.get("detail", "")))

    def send(self, message: Message) -> None:
        if self.wire and not self.wire.closed:
            self.wire.send(message)

    def close(self) -> None:
        if self.wire:
            self.wire.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
