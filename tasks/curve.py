"""The loss of a run as at most some hundred points, read from its metrics files as they grow; bounded memory for any length."""

import json
import math
from dataclasses import dataclass, field

from perdure.training.checkpoint import lineage
from perdure.training.run_dir import CheckpointName, RunDir

MAX_POINTS = 300
_BLOCK = 4 << 20


@dataclass
class Trace:
    """One launch's metrics file, folded."""

    cursor: int = 0
    first_step: int = 0
    first_time: float = 0.0
    last_step: int = 0
    last_time: float = 0.0
    rows: int = 0
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Bucket of steps -> sum and number of its finite losses."""

    @property
    def step_secs(self) -> float:
        """Mean seconds between two rows; the first row has no beginning of its own."""
        return max(0.0, self.last_time - self.first_time) / (self.rows - 1) if self.rows > 1 else 0.0


class Curve:
    """`read` takes in what the metrics files have got since the last time."""

    def __init__(self, run: RunDir, total_steps: int) -> None:
        self._run = run
        self.width = max(1, math.ceil(total_steps / MAX_POINTS))
        """Steps in a bucket."""
        self.traces: dict[int, Trace] = {}

    def read(self) -> None:
        for token in lineage.read_launches(self._run):
            self._follow(token, self.traces.setdefault(token, Trace()))

    def _follow(self, token: int, trace: Trace) -> None:
        try:
            file = open(self._run.metrics(token), "rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(trace.cursor)
            while lines := file.readlines(_BLOCK):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return  # its end is still to come
                    trace.cursor += len(line)
                    self._take_in(line, trace)

    def _take_in(self, line: bytes, trace: Trace) -> None:
        """A line torn by a crash is passed over."""
        try:
            row = json.loads(line)
            step, at = int(row["step"]), float(row["time"])
        except (ValueError, KeyError, TypeError):
            return
        if not trace.rows:
            trace.first_step, trace.first_time = step, at
        trace.last_step, trace.last_time, trace.rows = step, at, trace.rows + 1
        loss = row.get("loss")
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            total, count = trace.losses.get(step // self.width, (0.0, 0))
            trace.losses[step // self.width] = (total + loss, count + 1)

    def points(self) -> list[tuple[int, float]]:
        """(step, mean loss) of the present history: what a launch trained beyond the step the next one resumed from is not
        in it."""
        found: dict[int, tuple[float, int]] = {}
        for token, record in sorted(lineage.read_launches(self._run).items()):
            start = CheckpointName.parse(record.resumed_from or "")
            resumed = start.step if start else 0
            found = {bucket: value for bucket, value in found.items() if resumed and bucket * self.width <= resumed}
            for bucket, (total, count) in self.traces.get(token, Trace()).losses.items():
                before = found.get(bucket, (0.0, 0))
                found[bucket] = (before[0] + total, before[1] + count)
        return [(bucket * self.width, total / count) for bucket, (total, count) in sorted(found.items())]
