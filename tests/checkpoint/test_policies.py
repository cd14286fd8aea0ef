"""Each policy keeps what its words say, as tables; histories made by crashes and odd clocks; settings that are refused."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.training.checkpoint import retention
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.policies import KEEP_ALL, KeepBest, KeepEvery, KeepLast, KeepPer, KeepWithin, policies_of
from perdure.training.retention_settings import RetentionSection, parse_age, wrong_retention
from perdure.training.run_dir import CheckpointName

START = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
"""A Monday."""
HOUR, DAY = 3600.0, 86400.0


def made(step: int, created: float = START, loss: dict[str, Any] | None = None, token: int = 1, **metrics: float) -> Listed:
    manifest = Manifest(
        format="perdure-checkpoint", version=2, run="r", step=step, token=token, created=created, state_digest="", raw_bytes=0,
        stored_bytes=0, leaves=0, files=(), world={}, data={}, environment={}, code={}, config={}, loss=loss or {}, exact=True,
        exact_reasons=(), metrics=metrics or msgspec.UNSET,
    )  # fmt: skip
    name = CheckpointName(step, token)
    return Listed(name=name, in_lineage=True, trust="verified", manifest=manifest, problem="", bytes_on_disk=100)


def steps(policy: Any, *rows: Listed) -> list[int]:
    newest_first = sorted(rows, key=lambda one: one.name, reverse=True)
    return sorted(name.step for name in policy(newest_first))


def at(**times: float) -> list[Listed]:
    """`at(s10=0.5)`: step 10, half an hour after the start."""
    return [made(int(key[1:]), START + hours * HOUR) for key, hours in times.items()]


@pytest.mark.parametrize(("number", "expected"), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40])])
def test_last_are_the_newest_of_the_history(number: int, expected: list[int]) -> None:
    assert steps(KeepLast(number), *map(made, (10, 20, 30, 40))) == expected


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 10, 15, 20, 40]), (20, [0, 20, 40]), (15, [0, 15]), (99, [0])])
def test_every_goes_by_steps_and_not_by_count(every: int, expected: list[int]) -> None:
    assert steps(KeepEvery(every), *map(made, (0, 10, 15, 20, 40))) == expected


@pytest.mark.parametrize(
    ("number", "word", "expected"),
    [
        (1, "hour", [60]),
        (2, "hour", [40, 60]),
        (9, "hour", [20, 30, 40, 60]),
        (1, "day", [60]),
        (2, "day", [30, 60]),
        (1, "week", [60]),
        (2, "week", [30, 60]),
    ],
)
def test_of_each_period_that_has_one_the_newest(number: int, word: str, expected: list[int]) -> None:
    """Sunday evening: 10, 20 at 22 h, 30 at 23 h; Monday: 40 at 0 h, 50 and 60 at 7 h. Hours without one do not count."""
    rows = at(s10=-1.9, s20=-1.1, s30=-0.1, s40=0.5, s50=7.1, s60=7.9)
    assert steps(KeepPer(number, word), *rows) == expected


@settings(max_examples=200, deadline=None)
@given(st.integers(-3000, 3000), st.integers(0, 86399))
def test_weeks_begin_on_monday_and_days_at_midnight(days: int, second: int) -> None:
    """As the calendar has it: two moments share a period when its week or date is the same."""
    first, moment = START, START + days * DAY + second
    one, other = datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(moment, UTC)
    rows = [made(1, moment), made(2, first)]
    assert (steps(KeepPer(2, "week"), *rows) == [2]) == (one.isocalendar()[:2] == other.isocalendar()[:2])
    assert (steps(KeepPer(2, "day"), *rows) == [2]) == (one.date() == other.date())
    assert (steps(KeepPer(2, "hour"), *rows) == [2]) == (one <= other < one + timedelta(hours=1))


def test_of_a_clock_that_was_set_back_the_history_says_which_is_newest() -> None:
    rows = at(s10=5.1, s20=3.2, s30=3.1)
    assert steps(KeepPer(1, "hour"), *rows) == [30]
    assert steps(KeepPer(2, "hour"), *rows) == [10, 30]


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, [40]), (HOUR, [30, 40]), (24 * HOUR, [20, 30, 40])])
def test_within_an_age_counts_back_from_the_newest_and_not_from_now(seconds: float, expected: list[int]) -> None:
    assert steps(KeepWithin(seconds, "so long"), *at(s10=-30, s20=-20, s30=1.5, s40=2.5)) == expected


LOSSES = [
    made(10, loss={"smoothed": 3.0, "last": 1.0, "least": 0.9}),
    made(20, loss={"smoothed": 2.0, "last": 2.5, "least": 0.8}),
    made(30, loss={"smoothed": 2.0, "last": 2.0, "least": 0.7}),
    made(40, loss={"smoothed": float("nan"), "last": float("inf")}),
    made(50),
    made(60, loss={"smoothed": "low", "last": True}),
]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (KeepBest(1, "loss"), [30]),
        (KeepBest(2, "loss"), [20, 30]),
        (KeepBest(9, "loss"), [10, 20, 30]),
        (KeepBest(1, "loss", "max"), [10]),
        (KeepBest(1, "last"), [10]),
        (KeepBest(2, "last", "max"), [20, 30]),
        (KeepBest(1, "least"), [30]),
    ],
)
def test_the_best_by_a_finite_loss_and_of_equals_the_newest(policy: KeepBest, expected: list[int]) -> None:
    assert steps(policy, *LOSSES) == expected


def test_the_best_by_what_the_code_logged_where_no_number_and_no_value_never_count() -> None:
    rows = [made(10, accuracy=0.7), made(20, accuracy=0.9), made(30, last=5.0), made(40, accuracy=float("nan")), made(50)]
    assert steps(KeepBest(1, "accuracy", "max"), *rows) == [20]
    assert steps(KeepBest(9, "accuracy", "min"), *rows) == [10, 20]
    assert steps(KeepBest(1, "last"), *rows) == [], "three names are those of the loss"


def test_while_none_has_a_value_of_what_is_to_be_best_all_stay() -> None:
    section = RetentionSection(keep_last=1, keep_best=1, best="acuracy", best_mode="max")
    rows = [made(step, accuracy=step / 100) for step in (10, 20, 30)]
    plan = retention.plan(rows, section, False)
    assert plan.remove == ()
    assert plan.verdicts[0].reasons == ("no checkpoint has a value of acuracy yet",)
    assert [one.name.step for one in retention.plan([*rows, made(40, acuracy=0.1)], section, False).keep] == [40]


def test_a_reason_says_which_and_how_many() -> None:
    rows = [made(10, loss={"smoothed": 2.0})]
    said = [
        policy(rows)[rows[0].name] for policy in (KeepBest(1, "loss"), KeepWithin(DAY, "1d"), KeepPer(3, "day"), KeepEvery(5))
    ]
    assert said == [
        "one of the best 1 by loss: 2",
        "within 1d of the newest",
        "newest of its day, one of 3",
        "step is a multiple of 5",
    ]


def test_policies_add_up_and_each_reason_is_told() -> None:
    rows = at(s10=-60, s20=-30, s25=-29, s30=1, s40=2)
    plan = retention.plan(rows, RetentionSection(keep_last=1, keep_every=20, keep_daily=2), False)
    told = {one.name.step: one.reasons for one in plan.verdicts}
    assert [one.name.step for one in plan.remove] == [10, 30]
    assert told[40] == (
        "one of the newest 1", "step is a multiple of 20", "newest of its day, one of 2", "the newest verified",
    )  # fmt: skip
    assert told[25] == ("newest of its day, one of 2",)
    assert told[10] == ("older than what is kept",)


def test_nothing_set_keeps_all_whatever_best_says() -> None:
    plan = retention.plan(list(map(made, (10, 20))), RetentionSection(best="last", best_mode="max"), False)
    assert plan.remove == ()
    assert {one.reasons[0] for one in plan.verdicts} == {KEEP_ALL}


@pytest.mark.parametrize(("number", "left"), [("all", 3), (None, 3), (1, 1), (10**9, 3)])
def test_odd_numbers_never_delete_everything(number: Any, left: int) -> None:
    """Case H9."""
    plan = retention.plan(list(map(made, (2, 4, 6))), RetentionSection(keep_last=number), False)
    assert len(plan.keep) == left


def test_no_clock_and_no_lower_step_of_an_older_launch_makes_the_newest_go() -> None:
    """Case H3 (a) to (c): the lineage says what is newest, neither time nor step alone."""
    rows = [made(2, START + 9), made(4, START + 8), made(6, START - 10 * DAY)]
    assert [one.name.step for one in retention.plan(rows, RetentionSection(keep_last=1), False).keep] == [6]
    rows = [made(2), *(Listed(**{**vars(made(step)), "in_lineage": False}) for step in (4, 6)), made(4, token=2)]
    plan = retention.plan(rows, RetentionSection(keep_last=1), False)
    assert [one.name for one in plan.keep] == [CheckpointName(4, 2)]


@pytest.mark.parametrize(("text", "seconds"), [("36h", 36 * HOUR), ("7d", 7 * DAY), ("2w", 14 * DAY), ("1d12h", 36 * HOUR)])
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize(
    "given",
    [{"keep_within": text} for text in ("7", "d", "7m", "-1d", "1d x", "0h")]
    + [{"keep_daily": -1}, {"keep_best": 0}, {"best": ""}],
)
def test_what_cannot_be_is_refused_by_its_name(given: dict[str, Any]) -> None:
    ((problem, fix),) = wrong_retention(RetentionSection(**given))
    assert problem.startswith(f"retention.{next(iter(given))} = ")
    assert fix


@st.composite
def histories(draw: st.DrawFn) -> list[Listed]:
    chosen = draw(st.lists(st.integers(0, 400), unique=True, max_size=25))
    hours = draw(st.lists(st.floats(-2000, 2000), min_size=len(chosen), max_size=len(chosen)))
    losses = draw(st.lists(st.floats(allow_nan=True), min_size=len(chosen), max_size=len(chosen)))
    return [made(step, START + h * HOUR, {"smoothed": v}) for step, h, v in zip(sorted(chosen), hours, losses, strict=True)]


few = st.none() | st.integers(1, 4)
sections = st.builds(
    RetentionSection, keep_last=few, keep_every=st.none() | st.integers(1, 50), keep_hourly=few, keep_daily=few,
    keep_weekly=few, keep_best=few, keep_within=st.sampled_from(["", "36h", "7d"]), best_mode=st.sampled_from(["min", "max"]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(histories(), sections)
def test_any_settings_keep_the_union_and_pruning_again_changes_nothing(rows: list[Listed], section: RetentionSection) -> None:
    plan = retention.plan(rows, section, False)
    newest_first = sorted(rows, key=lambda one: one.name, reverse=True)
    wanted = {name for policy in policies_of(section) for name in policy(newest_first)} | {one.name for one in newest_first[:1]}
    assert {one.name for one in plan.keep} == wanted
    again = retention.plan([one for one in rows if one.name in wanted], section, False)
    assert again.remove == ()


@settings(max_examples=200, deadline=None)
@given(histories(), sections, sections)
def test_more_policies_never_keep_less(rows: list[Listed], one: RetentionSection, other: RetentionSection) -> None:
    policies = [*policies_of(one), *policies_of(other)]
    both = {verdict.name for verdict in retention.decide(rows, policies, False).keep}
    assert both >= {verdict.name for verdict in retention.decide(rows, policies_of(one), False).keep}


def test_ten_thousand_checkpoints_are_planned_with_every_policy_at_once() -> None:
    """The time is told by benchmarks/retention.py; here, that each is decided on."""
    rows = [made(step, START + step * 60, {"smoothed": 1 / (step + 1)}) for step in range(10_000)]
    section = RetentionSection(
        keep_last=5, keep_every=1000, keep_hourly=24, keep_daily=7, keep_weekly=4, keep_best=3, keep_within="2h"
    )
    began = time.process_time()
    plan = retention.plan(rows, section, False)
    print(f"{time.process_time() - began:.3f} s of CPU")
    assert len(plan.verdicts) == 10_000
    assert {one.name.step for one in plan.keep} >= {*range(9879, 10_000), *range(0, 10_000, 1000)}
    assert len(plan.keep) < 200
