"""Which Prefect flow runs drove a run, by its own directory: who they were, their reports, and whether their rows are closed.

A dead process cannot close its rows. Whoever drives the run next knows from here which process is gone."""

import os
import time

import msgspec

from perdure.training import files
from perdure.training.process import ProcessId, identify
from perdure.training.run_dir import RunDir

MAX_RECORD = 64 * 1024
KEPT = 100


class FlowRunRecord(msgspec.Struct, kw_only=True):
    id: str
    process: ProcessId
    began: float
    ended: float = 0.0
    """When its process was done with the run; 0 while it works, and for ever when it was killed."""
    closed: bool = False
    """Its rows in Prefect were seen in an end state, or are gone."""
    report: str = ""
    """Id of its report artifact."""
    page: str = ""
    """URL in Prefect's UI, as that process knew it."""

    def is_over(self) -> bool:
        """Asked by the holder of the run's lock: another host's process has lost the run, whatever became of it."""
        return not self.process.is_alive()


def enter(run: RunDir, flow_run_id: str, page: str = "") -> FlowRunRecord:
    """Write down that this process drives the run, which it holds the lock of; the oldest records go."""
    files.make_dirs(run.flow_runs)
    for old in read(run)[: -KEPT + 1]:
        (run.flow_runs / f"{old.id}.json").unlink(missing_ok=True)
    record = FlowRunRecord(id=flow_run_id, process=identify(os.getpid()), began=time.time(), page=page)
    write(run, record)
    return record


def write(run: RunDir, record: FlowRunRecord) -> None:
    files.publish(run.flow_runs / f"{record.id}.json", msgspec.json.encode(record))


def read(run: RunDir) -> list[FlowRunRecord]:
    """By beginning, oldest first; what cannot be read is passed over."""
    found = []
    for path in run.flow_runs.glob("*.json") if run.flow_runs.is_dir() else ():
        try:
            found.append(msgspec.json.decode(files.read_limited(path, MAX_RECORD), type=FlowRunRecord))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda record: record.began)


def over(run: RunDir) -> list[FlowRunRecord]:
    """Flow runs whose process is gone and whose rows have not been looked at since."""
    return [record for record in read(run) if not record.closed and record.is_over()]


def died(run: RunDir) -> list[FlowRunRecord]:
    """Those among them that left without a word: their rows say Running for certain."""
    return [record for record in over(run) if not record.ended]
