"""What Prefect's UI shows of a run, as text and plain values: the report (markdown), the table of checkpoints, the progress.

Pure over what the run directory tells. Texts from elsewhere are cut, escaped and free of secrets."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.tasks import charts
from perdure.tasks.curve import Curve
from perdure.tasks.ledger import Ledger, account
from perdure.training import events
from perdure.training.amounts import counted, size, span
from perdure.training.checkpoint import catalog, facts, lineage
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.lineage import LaunchRecord
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.events import Event
from perdure.training.redact import redact
from perdure.training.run_dir import CheckpointName, RunDir

MAX_CHECKPOINTS = 500
_HAPPENED = ("failed", "stopped", "quarantined", "push_failed", "disk_full", "slow_rank", "completed")
_LAST_EVENTS = 8
_MARKS = 50


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything that is shown at one moment."""

    report: str
    summary: str
    """One short line: a card has room for forty characters."""
    card: str
    """The same, the headline and the picture of the loss."""
    checkpoints: list[dict[str, Any]]  # Any: JSON values
    about_checkpoints: str
    percent: float
    launch: int


def render(run: RunDir, info: RunInfo, curve: Curve, *, links: str, live: bool, now: float | None = None) -> Page:
    """`links` is the report's first line, by which another flow run can replace it later."""
    now = time.time() if now is None else now
    curve.read()
    log, launches, listed = list(events.read(run)), lineage.read_launches(run), catalog.read_catalog(run).listed
    ends = {token: end for token in launches if (end := lineage.read_end(run, token)) is not None}
    launch = max(launches, default=0)
    step = _step(curve, listed, launch)
    headline = _headline(info, step, launch, curve, log, listed)
    loss = _loss(info, curve, launches)
    summary = f"{step:,} of {info.steps:,} steps ({step / info.steps:.0%})"
    sections = [
        links,
        f"## {_text(info.name)}",
        headline,
        loss or "*The training code has logged no loss yet (`session.log(loss=...)`).*",
        *_times(account(launches, ends, curve.traces, log, now=now, live=live)),
        _happened(log),
        f"Run `{_code(info.id)}` in `{_code(str(run.root))}`, as of {_when(now)}. "
        "Dashed lines: where a launch went on. Reload the page to see what is new.",
    ]
    stored = f", store: {redact(info.store_url)}" if info.store_url else ""
    return Page(
        report="\n\n".join(sections),
        summary=summary,
        card="\n\n".join([summary, headline, *([loss] if loss else [])]),
        checkpoints=[_row(one, now) for one in reversed(listed)][:MAX_CHECKPOINTS],
        about_checkpoints=f"{counted(len(listed), 'checkpoint')}, newest first\n\nAs of {_when(now)}{stored}",
        percent=round(min(100.0, 100.0 * step / info.steps), 2),
        launch=launch,
    )


def _loss(info: RunInfo, curve: Curve, launches: Mapping[int, LaunchRecord]) -> str:
    """The picture as markdown; empty when there is nothing to draw."""
    points = curve.points()
    resumed = [CheckpointName.parse(record.resumed_from or "") for record in launches.values()]
    marks = [float(name.step) for name in resumed if name is not None][-_MARKS:]
    chart = charts.line_chart(points, title="Loss by step", x_end=info.steps, marks=marks)
    return f"![loss]({charts.data_uri(chart)})" if points else ""


def _step(curve: Curve, listed: Sequence[Listed], launch: int) -> int:
    committed = max((one.name.step for one in listed if one.in_lineage), default=0)
    return max(committed, curve.traces[launch].last_step) if launch in curve.traces else committed


def _headline(info: RunInfo, step: int, launch: int, curve: Curve, log: Sequence[Event], listed: Sequence[Listed]) -> str:
    chunks = [event.data["loss"] for event in log if event.kind == "chunk_finished" and event.data.get("loss") is not None]
    points = curve.points()
    value = chunks[-1] if chunks else points[-1][1] if points else None
    loss = f", loss {value:.4g}" if isinstance(value, (int, float)) else ""
    good = [one for one in listed if one.in_lineage and one.trust in facts.GOOD]
    newest = f", newest good checkpoint: step {good[-1].name.step:,} ({good[-1].trust})" if good else ", no good checkpoint yet"
    last = next(
        (event.kind for event in reversed(log) if event.kind in ("completed", "failed", "stopped", "chunk_finished")), ""
    )
    word = {"completed": "complete, ", "failed": "after a failure, ", "stopped": "stopped, "}.get(last, "")
    return f"{word}step {step:,} of {info.steps:,} ({step / info.steps:.0%}), launch {launch}{loss}{newest}"


def _bar(ledger: Ledger) -> str:
    shown = [(name, seconds, f"{span(seconds)} ({_share(seconds, ledger)})") for name, seconds in ledger.parts.items()]
    return charts.bar(shown, title=f"Where {span(ledger.wall)} went")


def _times(ledger: Ledger) -> list[str]:
    rows = [f"| {name} | {span(seconds)} | {_share(seconds, ledger)} |" for name, seconds in ledger.parts.items() if seconds]
    table = ["| wall time | | |", "|---|--:|--:|", *rows, f"| **all** | **{span(ledger.wall)}** | |"]
    beside = ", ".join(f"{name} {span(seconds)}" for name, seconds in ledger.beside.items() if seconds)
    picture = f"![where the time went]({charts.data_uri(_bar(ledger))})"
    return [picture, "\n".join(table)] + ([f"Beside training, costing no step: {beside}."] if beside else [])


def _share(seconds: float, ledger: Ledger) -> str:
    return f"{seconds / ledger.wall:.1%}" if ledger.wall else ""


def _happened(log: Sequence[Event]) -> str:
    last = [event for event in log if event.kind in _HAPPENED][-_LAST_EVENTS:]
    if not last:
        return "Nothing went wrong so far."
    rows = [
        f"| {_when(event.time)} | {event.kind.replace('_', ' ')} | {event.data.get('step', '')} | {_said(event)} |"
        for event in last
    ]
    return "\n".join(["| when | what | step | |", "|---|---|--:|---|", *rows])


def _said(event: Event) -> str:
    data = event.data
    said = [data.get(key) for key in ("error_class", "detail", "reason", "error", "text", "next", "name") if data.get(key)]
    return _text("; ".join(map(str, said)), 240)


def _row(one: Listed, now: float) -> dict[str, Any]:  # Any: JSON values
    """A row of the table; texts, as the UI sorts and searches them."""
    kind = f"increment of {one.base.step}" if one.base else "full" if one.manifest else "?"
    created = one.manifest.created if one.manifest else None
    return {
        "step": one.name.step,
        "launch": one.name.token,
        "kind": kind,
        "trust": one.trust if one.in_lineage else f"{one.trust}, not in the present history",
        "size": size(one.bytes_on_disk),
        "where": ", ".join(["disk", *(place for place in one.places if place != facts.LOCAL)]),
        "age": span(max(0.0, now - created)) if created else "?",
        "written": _when(created) if created else "?",
    }


def _text(text: str, limit: int = 120) -> str:
    """One line that can be neither markup nor a table's border."""
    line = " ".join(redact(text).split())
    line = line if len(line) <= limit else line[: limit - 3] + "..."
    return "".join("\\" + c if c in r"\`*_{}[]<>#|!~$" else c for c in line if c.isprintable())


def _code(text: str) -> str:
    return "".join(c for c in redact(text) if c.isprintable() and c != "`")


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(moment))
