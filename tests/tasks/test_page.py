"""The curve, the ledger and the pictures: honest sums, bounded sizes, and nothing that a foreign text could break."""

import base64
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.tasks import charts, ledger, page
from perdure.tasks.curve import MAX_POINTS, Curve, Trace
from perdure.training import events
from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord, create_launch
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.events import Event
from perdure.training.run_dir import RunDir


def launched(token: int, created: float, resumed: int = 0) -> LaunchRecord:
    start = f"{resumed:012d}-{token - 1:04d}" if resumed else None
    return LaunchRecord(token=token, resumed_from=start, created=created, host="h", pid=1, run="r", owner="o")


def ended(token: int, at: float, reason: str = "failed") -> LaunchEnd:
    return LaunchEnd(token=token, reason=reason, error_class="", step=0, detail="", log_tail="", ended=at)


def traced(first: tuple[int, float], last: tuple[int, float]) -> Trace:
    rows = last[0] - first[0] + 1
    return Trace(first_step=first[0], first_time=first[1], last_step=last[0], last_time=last[1], rows=rows)


def happened(at: float, kind: str, **data: object) -> Event:
    return Event(kind=kind, time=at, data=data)


def test_a_death_a_wait_and_a_stop_are_each_in_their_part() -> None:
    """Launch 1 trains steps 1-100 from second 10 on and is killed; launch 2 goes on from 80, and somebody stops it."""
    launches = {1: launched(1, 2.0), 2: launched(2, 130.0, resumed=80)}
    traces = {1: traced((1, 11.0), (100, 110.0)), 2: traced((81, 141.0), (120, 180.0))}
    log = [
        happened(0.0, "run_created"),
        happened(60.0, "waiting_for_slot", token=1, seconds=20.0),
        happened(61.0, "checkpoint_committed", token=1, seconds=3.0),
        happened(62.0, "verified", seconds=2.0),
        happened(185.0, "stopped", token=2),
    ]
    found = ledger.account(launches, {2: ended(2, 184.0, "stopped")}, traces, log, now=200.0, live=False)
    assert found.parts == pytest.approx(
        {
            ledger.TRAINING: 80 * 0.8 + 40,
            ledger.AGAIN: 80 * 0.2,
            ledger.SLOT: 20,
            ledger.LEASE: 0,
            ledger.STARTING: 10 + 10,
            ledger.LEAVING: 4,
            ledger.RESTARTING: 20,
            ledger.STOPPED: 16,
        }
    )
    assert found.beside == {"saving": 3.0, "verifying": 2.0, "pushing": 0.0}


def test_a_launch_under_way_trains_until_now_and_a_cancelled_one_is_stopped() -> None:
    trace = {1: traced((1, 11.0), (50, 60.0))}
    going = ledger.account({1: launched(1, 0.0)}, {}, trace, [], now=70.0, live=True)
    assert going.parts[ledger.TRAINING] == pytest.approx(60)
    log = [happened(62.0, "stopped", reason="cancelled in Prefect")]
    left = ledger.account({1: launched(1, 0.0)}, {1: ended(1, 61.0, "stopped")}, trace, log, now=70.0, live=False)
    assert left.parts[ledger.STOPPED] == pytest.approx(9)
    assert left.parts[ledger.RESTARTING] == 0


moments = st.floats(0, 1000)


@given(st.data())
def test_parts_add_up_to_the_wall_time_whatever_the_clocks_say(data: st.DataObject) -> None:
    tokens = range(1, data.draw(st.integers(0, 5)) + 1)
    launches = {token: launched(token, data.draw(moments), data.draw(st.integers(0, 50))) for token in tokens}
    ends = {token: ended(token, data.draw(moments)) for token in tokens if data.draw(st.booleans())}
    traces = {
        token: traced((1, data.draw(moments)), (data.draw(st.integers(1, 90)), data.draw(moments)))
        for token in tokens
        if data.draw(st.booleans())
    }
    kinds = st.sampled_from(["waiting_for_slot", "stopped", "completed", "failed", "verified"])
    number = st.integers(0, 6)
    log = [
        happened(data.draw(moments), data.draw(kinds), token=data.draw(number), seconds=data.draw(moments)) for _ in range(4)
    ]
    found = ledger.account(launches, ends, traces, log, now=data.draw(moments), live=data.draw(st.booleans()))
    assert sum(found.parts.values()) == pytest.approx(found.wall, abs=1e-6)
    assert min(found.parts.values()) >= 0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.metrics(1).parent.mkdir(parents=True)
    create_launch(run, launched(1, 100.0))
    return run


def log_steps(run: RunDir, token: int, first: int, last: int, loss: float) -> None:
    with open(run.metrics(token), "a") as file:
        file.writelines(json.dumps({"step": s, "time": 100.0 + s, "loss": loss}) + "\n" for s in range(first, last + 1))


def test_curve_follows_growing_files_and_forgets_what_a_death_undid(run: RunDir) -> None:
    curve = Curve(run, 300)
    log_steps(run, 1, 1, 50, 4.0)
    with open(run.metrics(1), "a") as file:
        file.write('{"step": 51, "ti')
    curve.read()
    assert curve.points() == [(step, 4.0) for step in range(1, 51)]
    with open(run.metrics(1), "a") as file:
        file.write('me": 151, "loss": NaN}\nnot json\n[]\n')
    log_steps(run, 1, 52, 60, 4.0)
    create_launch(run, launched(2, 200.0, resumed=40))
    log_steps(run, 2, 41, 45, 2.0)
    curve.read()
    assert curve.points() == [(step, 4.0) for step in range(1, 41)] + [(step, 2.0) for step in range(41, 46)]


def test_long_runs_have_small_pictures(run: RunDir) -> None:
    log_steps(run, 1, 1, 20_000, 4.0)
    info = RunInfo(id="r-1", name="r", created=0.0, steps=20_000, chunk=10)
    shown = page.render(run, info, Curve(run, info.steps), links="", live=True, now=30_000.0)
    assert len(Curve(run, 20_000).points()) <= MAX_POINTS + 1
    assert len(shown.report) < 40_000
    assert len(shown.card) < 40_000


def pictures(text: str) -> list[ET.Element]:
    found = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", text)
    return [ET.fromstring(base64.b64decode(one)) for one in found]


def test_foreign_texts_are_neither_markup_nor_secrets(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:planted-secret")
    hostile = "|x|\n# [a](javascript:b) <img src=x> `c` ![](http://d) admin:planted-secret"
    events.record(run, "failed", token=1, error_class="user", detail=hostile, step=3, next="stop")
    info = RunInfo(id="r-1", name="a|b*<svg>", created=0.0, steps=10, chunk=5)
    shown = page.render(run, info, Curve(run, 10), links="", live=False, now=300.0)
    assert "planted-secret" not in shown.report
    row = next(line for line in shown.report.splitlines() if "javascript" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 5, "the table keeps its four columns"
    assert not re.search(r"(?<!\\)[<\[`]", row)
    assert "a\\|b\\*\\<svg\\>" in shown.report


@pytest.mark.parametrize("values", [[], [1.0], [0.0, 0.0], [-5.0, 3.0], [1e-9, 1e9], [1e300, -1e300]])
def test_any_values_make_a_picture_that_is_well_formed(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    svg = ET.fromstring(charts.line_chart(points, title="<&>", x_end=10, marks=[3.0]))
    numbers = [float(n) for path in svg.iter() if (d := path.get("d")) for n in re.findall(r"-?[0-9.]+(?:e-?\d+)?", d)]
    assert all(0 <= number <= charts.WIDTH for number in numbers)
    (bar,) = pictures(charts.data_uri(charts.bar([("a", 0.0, "-"), ("b & c", 3.0, "3 s")], title="t")))
    assert [text.text for text in bar.iter("{http://www.w3.org/2000/svg}text")] == ["t", "b & c: 3 s"]
