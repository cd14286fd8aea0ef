"""Deadlines of a launch: how long it may take to the first step, and how long a step may take after that."""

import time

from perdure.training.agent.ranks import Ranks
from perdure.training.config import RunConfig

AUTOMATIC_FACTOR = 5.0
AUTOMATIC_LEAST_SECS = 120.0
"""facts/operations.md: a hang is no progress for 5 x the longest step seen. A minute in one step, the GIL held, is none."""
_BLIND_SECS = 5.0
"""From one look to the next the agent itself stood still: a file system did not answer, say. What it did not see is no hang."""


class Deadlines:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._started = time.monotonic()
        self._waited_until = self._looked = self._started
        self._longest = 0.0

    def problem(self, ranks: Ranks, paused: bool) -> str:
        """What hangs, in words; empty while all is well. Time spent waiting for a lease, a slot or the disk does not count."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        if paused or since > _BLIND_SECS:
            self._started += since
            self._waited_until = max(self._waited_until, ranks.last_news) + since
        launch = self._config.launch
        if not ranks.made_a_step and ranks.phase != "leaving":
            late = now - self._started > launch.startup_timeout
            return f"no first step within launch.startup_timeout = {launch.startup_timeout:g} s" if late else ""
        if paused or ranks.phase != "training":
            self._waited_until = now
        self._longest = max(self._longest, ranks.longest_step)
        limit = launch.step_timeout or max(AUTOMATIC_LEAST_SECS, AUTOMATIC_FACTOR * self._longest)
        if ranks.phase == "evaluation":
            limit, self._waited_until = max(limit, launch.startup_timeout), 0.0
        quiet = now - max(ranks.last_news, self._waited_until)
        return f"no finished step for {quiet:.0f} s (limit {limit:.0f} s) after step {ranks.step}" if quiet > limit else ""
