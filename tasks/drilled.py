"""What is told of a drill: its lines, the trend against the last ones, the page in Prefect with pictures that show offline.

`keep` is the one place that writes a result: the record beside the run, then the event that Slack is told of."""

import time
from collections.abc import Sequence

from perdure.tasks import charts
from perdure.training import events
from perdure.training.amounts import counted, size, span
from perdure.training.drill.record import Drill, append_drill, read_drills
from perdure.training.redact import redact
from perdure.training.run_dir import RunDir

_TREND = 4
"""Drills before the last that the trend names."""
_DRAWN = 60
_MAX_TEXT = 2500


def keep(run: RunDir, held: Drill) -> list[Drill]:
    """Write it down beside the run, if that is here; all drills, oldest first."""
    if not run.run_json.exists():
        return [held]
    append_drill(run, held)
    found = read_drills(run)
    events.record(run, "drilled", passed=held.passed, text="\n".join(lines(found))[:_MAX_TEXT])
    return found


def title(held: Drill) -> str:
    return f"Drill {'passed' if held.passed else 'FAILED'}: {held.newest or 'nothing'} came back from the store"


def lines(drills: Sequence[Drill]) -> list[str]:
    """The last one in short lines, no table that a telephone cannot show."""
    held, before = drills[-1], drills[:-1][-_TREND:]
    found = [f"- {problem}" for problem in held.problems]
    found += [f"- passed over: {skipped}" for skipped in held.skipped]
    target = "not judged, it was asked for" if held.asked else f"target {span(held.target_point_secs)}"
    found += [f"- recovery point: {_point(held)} ({target}{_trend(before, 'point_secs')})"]
    found += [f"- recovery time: {_time(held)} (target {span(held.target_time_secs)}{_trend(before, 'recovery_secs')})"]
    if held.identical is not None:
        word = "the same bits as undisturbed" if held.identical else "NOT the same bits"
        killed = ", ".join(held.kills) or "nothing was killed in time"
        found.append(f"- {held.steps} steps from {held.resumed}, killed: {killed}: {word}")
    found += [f"- note: {note}" for note in held.notes]
    return [redact(line) for line in found]


def _point(held: Drill) -> str:
    if held.point_secs is None:
        return "nothing came back"
    if held.point_steps is None:
        return f"at most {span(held.point_secs)} of training (the run directory is not here)"
    return (
        f"{counted(held.point_steps, 'step')}, {span(held.point_secs)} of training" if held.point_steps else "nothing is lost"
    )


def _time(held: Drill) -> str:
    if held.recovery_secs is None:
        return "not reached"
    parts = (("pull", held.pull_secs), ("prove", held.prove_secs), ("to the first step", held.start_secs))
    told = ", ".join(f"{word} {secs:.1f} s" for word, secs in parts if secs is not None)
    return f"{span(held.recovery_secs)}: {told}; {size(held.bytes)}"


def _trend(before: Sequence[Drill], name: str) -> str:
    values = [getattr(one, name) for one in before]
    told = [span(value) if value is not None else "failed" for value in values]
    return f"; before: {', '.join(told)}" if told else ""


def markdown(drills: Sequence[Drill], name: str) -> str:
    """The page in Prefect: the last drill, the curves of both measures, a row for each drill."""
    held = drills[-1]
    rows = [
        f"| {_when(one)} | {'passed' if one.passed else '**failed**'} | {one.newest} | {_short(one.point_secs)} "
        f"| {_short(one.recovery_secs)} | {len(one.skipped)} |"
        for one in reversed(drills[-_DRAWN:])
    ]
    table = ["| when | result | checkpoint | point | time | passed over |", "|---|---|---|--:|--:|--:|", *rows]
    head = f"## {name}: {title(held)}"
    return "\n\n".join([head, "\n".join(lines(drills)), *_pictures(drills), redact("\n".join(table))]) + "\n"


def _pictures(drills: Sequence[Drill]) -> list[str]:
    """Nothing while there is one drill."""
    drawn, found = drills[-_DRAWN:], []
    for name, words in (("recovery_secs", "Recovery time in seconds"), ("point_secs", "Recovery point in seconds")):
        values = ((float(number), getattr(one, name)) for number, one in enumerate(drawn, 1))
        points = [(number, float(value)) for number, value in values if value is not None]
        if len(points) > 1:
            chart = charts.line_chart(points, title=f"{words}, by drill", x_end=float(len(drawn)), height=180)
            found.append(f"![{words}]({charts.data_uri(chart)})")
    return found


def _short(secs: float | None) -> str:
    return "-" if secs is None else span(secs)


def _when(one: Drill) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(one.time))
