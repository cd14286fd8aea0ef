"""The run's event log: one JSON line per thing that happened. It is what a person reads first and the outbox of Slack."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from perdure.training import files
from perdure.training.redact import redact
from perdure.training.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: str
    """Past tense: run_created, launch_started, checkpoint_committed, verified, quarantined, pushed, push_failed, pruned,
    copy_pruned, archived, archive_failed, rolled_up, repaired, scrubbed, restarted, reported, drilled, chunk_finished, failed,
    recovered, stopped, completed, waiting_for_slot, waiting_for_lease, save_failed, disk_full, slow_rank, notice."""
    time: float
    """Unix seconds."""
    data: dict[str, Any] = field(default_factory=dict)  # Any: JSON values
    end: int = 0
    """Byte offset after this line: a reader's cursor."""


def record(run: RunDir, kind: str, **data: Any) -> None:
    """Append one event; whole or not at all. Values are plain JSON; long texts are cut by the caller, secrets here."""
    shown = {key: redact(value) if isinstance(value, str) else value for key, value in data.items()}
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, **shown}, separators=(",", ":"))
    files.append(run.events, line.encode() + b"\n")


def read(run: RunDir, cursor: int = 0) -> Iterator[Event]:
    """Events after the byte offset `cursor`; a torn line (a crash in mid-write) is passed over, a torn tail waits."""
    try:
        file = open(run.events, "rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(cursor)
        for line in file:
            cursor += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                data = json.loads(line)
                kind, at = data.pop("kind"), float(data.pop("time"))
            except (ValueError, KeyError, AttributeError, TypeError):
                continue
            yield Event(kind=str(kind), time=at, data=data, end=cursor)
