"""Room on the disk before training: the rank says how large its state is, and goes on when its checkpoints fit. Too little is
answered by deleting what may go, else by waiting, said once; never by training on unsaved."""

import time

from perdure.training import events
from perdure.training.agent.rank import Rank
from perdure.training.checkpoint import space
from perdure.training.config import RunConfig
from perdure.training.run_dir import RunDir

RETRY_SECS = 2.0
IN_FLIGHT = 2
"""Checkpoints: one being written, one in the other slot."""


class Room:
    """`ask` when the rank says its size, `work` once in a while."""

    def __init__(self, run: RunDir, config: RunConfig, token: int) -> None:
        self._run, self._config, self._token = run, config, token
        self._state_bytes = 0
        self._not_before = 0.0
        self.waiting = False
        """The rank waits for room that is not there."""

    def ask(self, state_bytes: int, rank: Rank) -> None:
        self._state_bytes, self._not_before = state_bytes, 0.0
        self.work(rank)

    def work(self, rank: Rank) -> None:
        """Answer the rank, if it waits and there is room."""
        if not self._state_bytes or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + RETRY_SECS
        problem = self._make_room()
        if problem and not self.waiting:
            text = f"training waits for room on the disk: {problem}; it goes on by itself when there is enough"
            events.record(self._run, "disk_full", token=self._token, step=rank.step, path=str(self._run.checkpoints), text=text)
        if not problem:
            if self.waiting:
                events.record(self._run, "notice", text="there is room on the disk again; training goes on", token=self._token)
            self._state_bytes = 0
            rank.send({"room": True})
        self.waiting = bool(problem)

    def _make_room(self) -> str:
        """Delete what may go if that is needed; what is still wrong after it, "" for nothing."""
        problem = space.shortage(self._run, self._state_bytes, saves=self._saves)
        if problem:
            keep, stored = self._config.retention, bool(self._config.store_url)
            space.make_room(self._run, keep, self._state_bytes, saves=self._saves, stored=stored)
            problem = space.shortage(self._run, self._state_bytes, saves=self._saves)
        return problem

    @property
    def _saves(self) -> int:
        return IN_FLIGHT + bool(self._config.checkpoint.full_every)  # and the base of the increments
