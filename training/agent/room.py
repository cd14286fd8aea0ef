"""Room on the disk before training: each rank says how large its state is, and goes on when the checkpoints fit. Too little is
answered by deleting what may go, else by waiting, said once; never by training on unsaved."""

import time

from perdure.training import events
from perdure.training.agent.ranks import Ranks
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
        self._told: dict[int, tuple[int, int]] = {}
        """Of each rank that has said it: bytes of its state, and of what of that no other rank has."""
        self._asked: set[int] = set()
        """Ranks that wait for an answer."""
        self._not_before = 0.0
        self.waiting = False
        """Ranks wait for room that is not there."""

    def ask(self, rank: int, state_bytes: int, pieces: int, ranks: Ranks) -> None:
        self._told[rank] = (state_bytes, pieces)
        self._asked.add(rank)
        self._not_before = 0.0
        self.work(ranks)

    def work(self, ranks: Ranks) -> None:
        """Answer the ranks, if they wait and there is room."""
        if not self._asked or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + RETRY_SECS
        problem = self._make_room()
        if problem and not self.waiting:
            text = f"training waits for room on the disk: {problem}; it goes on by itself when there is enough"
            events.record(
                self._run, "disk_full", token=self._token, step=ranks.step, path=str(self._run.checkpoints), text=text
            )
        if not problem:
            if self.waiting:
                events.record(self._run, "notice", text="there is room on the disk again; training goes on", token=self._token)
            for rank in self._asked:
                ranks.ranks[rank].send({"room": True})
            self._asked.clear()
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
    def _state_bytes(self) -> int:
        """Of a checkpoint, as far as that is known before one is written: what ranks have in common is stored once. Other nodes
        on this disk are taken to have as many pieces."""
        pieces = self._config.launch.nodes_here * sum(pieces for _, pieces in self._told.values())
        return max(state - pieces for state, pieces in self._told.values()) + pieces

    @property
    def _saves(self) -> int:
        return IN_FLIGHT + bool(self._config.checkpoint.full_every)  # and the base of the increments
