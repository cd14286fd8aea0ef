"""Where a run's time went: every second between its creation and now is in exactly one part, so the parts add up.

From launch records, their ends, the event log and the metrics files. What is not recorded (a wait for a lease, a snapshot's
copy) is part of training; saving, proving and pushing happen beside it and are listed apart."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perdure.tasks.curve import Trace
from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord
from perdure.training.events import Event
from perdure.training.run_dir import CheckpointName

TRAINING, AGAIN, SLOT, LEASE = "training", "trained again after a death", "waiting for a slot", "waiting for a lease"
STARTING, LEAVING, RESTARTING, STOPPED = "starting up", "saving and leaving", "down and restarting", "stopped or preempted"
PARTS = (TRAINING, AGAIN, SLOT, LEASE, STARTING, LEAVING, RESTARTING, STOPPED)
BESIDE = {"checkpoint_committed": "saving", "verified": "verifying", "pushed": "pushing"}
_WAITS = {"waiting_for_slot": SLOT, "waiting_for_lease": LEASE}


@dataclass(kw_only=True)
class Ledger:
    began: float
    ended: float
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    beside: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BESIDE.values(), 0.0))
    """Seconds of work beside training: no part of the wall time."""

    @property
    def wall(self) -> float:
        return self.ended - self.began


def account(
    launches: Mapping[int, LaunchRecord],
    ends: Mapping[int, LaunchEnd],
    traces: Mapping[int, Trace],
    log: Sequence[Event],
    *,
    now: float,
    live: bool,
) -> Ledger:
    """`live`: the newest launch is under way. Clocks that jump back cost a part its length, never the sum."""
    finished = [event.time for event in log if event.kind == "completed"]
    began = min([event.time for event in log[:1]] + [record.created for record in launches.values()], default=now)
    ledger = Ledger(began=began, ended=max(began, finished[0] if finished and not live else now))
    resumed = {
        token: start.step if (start := CheckpointName.parse(r.resumed_from or "")) else 0 for token, r in launches.items()
    }
    of_launch: dict[int, list[Event]] = {token: [] for token in launches}
    for event in log:
        by_time = _launch_at(event.time, launches) if event.kind == "stopped" else 0
        of_launch.get(event.data.get("token", by_time), []).append(event)
    tokens, at, pause = sorted(launches), began, STARTING
    for token, following in itertools.zip_longest(tokens, tokens[1:]):
        begin = _within(launches[token].created, at, ledger.ended)
        ledger.parts[pause] += begin - at
        limit = ledger.ended if following is None else _within(launches[following].created, begin, ledger.ended)
        going = live and following is None
        at = limit if going else _within(_last_sign(token, ends, traces, of_launch[token]), begin, limit)
        again = max(0, traces[token].last_step - resumed[following]) if following in resumed and token in traces else 0
        _divide(ledger, begin, at, traces.get(token, Trace()), of_launch[token], again, going)
        end = ends.get(token)
        pause = LEAVING if end and end.reason == "complete" else RESTARTING
        if any(event.kind == "stopped" for event in of_launch[token]):  # said by a flow that lived to say it
            pause = STOPPED
    ledger.parts[pause] += ledger.ended - at
    for event in log:
        if event.kind in BESIDE:
            ledger.beside[BESIDE[event.kind]] += _seconds(event)
    return ledger


def _launch_at(moment: float, launches: Mapping[int, LaunchRecord]) -> int:
    """For what a hook says without knowing of launches; 0 before the first."""
    return max((token for token, record in launches.items() if record.created <= moment), default=0)


def _divide(ledger: Ledger, begin: float, end: float, trace: Trace, log: Sequence[Event], again: int, going: bool) -> None:
    """One launch, from `begin` to `end`: before its first step, its steps, after its last one."""
    if not trace.rows:  # code that logs nothing: what there is between two signs of life counts as training
        starts = [event.time for event in log if event.kind == "checkpoint_committed"]
        ledger.parts[TRAINING if starts else STARTING] += end - begin
        return
    first = _within(trace.first_time - trace.step_secs, begin, end)
    last = end if going else _within(trace.last_time, first, end)
    ledger.parts[STARTING] += first - begin
    ledger.parts[LEAVING] += end - last
    left = last - first
    for event in log:
        if event.kind in _WAITS:
            waited = min(_seconds(event), left)
            ledger.parts[_WAITS[event.kind]] += waited
            left -= waited
    lost = left * min(1.0, again / max(1, trace.last_step - trace.first_step + 1))
    ledger.parts[AGAIN] += lost
    ledger.parts[TRAINING] += left - lost


def _last_sign(token: int, ends: Mapping[int, LaunchEnd], traces: Mapping[int, Trace], log: Sequence[Event]) -> float:
    """When a launch was last seen: its agent's own word, else its last step or event."""
    if token in ends:
        return ends[token].ended
    seen = [event.time for event in log if event.kind != "failed"]
    return max([traces[token].last_time if token in traces else 0.0, *seen])


def _seconds(event: Event) -> float:
    seconds = event.data.get("seconds")
    return max(0.0, float(seconds)) if isinstance(seconds, (int, float)) else 0.0


def _within(moment: float, low: float, high: float) -> float:
    return min(max(moment, low), high)
