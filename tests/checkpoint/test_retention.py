"""What may go, as tables and as laws: a reason for every checkpoint, and three kinds of them never on the list."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.training.checkpoint import retention
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.retention import Plan
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName

TRUSTS = ("written", "verified", "replicated", "quarantined")


def name(step: int, token: int = 1) -> CheckpointName:
    return CheckpointName(step, token)


def listed(step: int, trust: str = "verified", base: int | None = None, *, ours: bool = True) -> Listed:
    return Listed(
        name=name(step), in_lineage=ours, trust=trust, manifest=None, problem="", bytes_on_disk=10 * step,
        base=None if base is None else name(base),
    )  # fmt: skip


def plan(rows: list[Listed], keep_last: int | None, stored: bool, *, history_known: bool = True) -> Plan:
    return retention.plan(rows, RetentionSection(keep_last=keep_last), stored, history_known=history_known)


def kept(decided: Plan) -> list[int]:
    return [verdict.name.step for verdict in decided.keep]


def reasons(decided: Plan, step: int) -> str:
    (found,) = [verdict.reasons for verdict in decided.verdicts if verdict.name.step == step]
    return "; ".join(found)


FULLS = [listed(step) for step in (10, 20, 30, 40)]
CHAIN = [listed(100), *(listed(step, base=100) for step in (110, 120, 130))]


@pytest.mark.parametrize(
    ("what", "keep_last", "stored", "expected"),
    [
        ("of fulls the newest two stay", 2, False, [30, 40]),
        ("more than there are", 9, False, [10, 20, 30, 40]),
        ("nothing is in the store: nothing counts, nothing goes", 1, True, [10, 20, 30, 40]),
    ],
)
def test_keep_last_of_fulls(what: str, keep_last: int | None, stored: bool, expected: list[int]) -> None:
    assert kept(plan(FULLS, keep_last, stored)) == expected, what


def test_a_base_stays_while_an_increment_of_it_stays() -> None:
    decided = plan(CHAIN, 1, False)
    assert kept(decided) == [100, 130]
    assert reasons(decided, 100) == f"base of {name(130)}"
    assert reasons(decided, 110) == "older than what is kept"
    assert decided.freed == 1100 + 1200


def test_a_base_tells_how_many_need_it() -> None:
    assert reasons(plan(CHAIN, 3, False), 100) == f"base of {name(130)} and 2 more"


def test_a_base_goes_after_all_that_need_it() -> None:
    decided = plan([*CHAIN, listed(200)], 1, False)
    assert [verdict.name.step for verdict in decided.remove] == [110, 120, 130, 100]


def test_oldest_go_first_and_a_base_only_waits_for_its_own() -> None:
    rows = [listed(100), listed(200), listed(210, base=200), listed(150, base=100), listed(300)]
    assert [verdict.name.step for verdict in plan(rows, 1, False).remove] == [150, 100, 210, 200]


def test_only_what_is_in_the_store_counts_and_goes_where_there_is_one() -> None:
    rows = [
        listed(10, "replicated"),
        listed(20, "verified"),
        listed(30, "replicated"),
        listed(40, "verified"),
        listed(50, "written"),
    ]
    decided = plan(rows, 1, True)
    assert kept(decided) == [20, 30, 40, 50]
    assert reasons(decided, 20) == "not in the store yet"
    assert reasons(decided, 40) == "the newest verified; not in the store yet"
    assert reasons(decided, 50) == "not verified yet"
    assert kept(plan(rows, 1, False)) == [40, 50]


def test_damaged_ones_do_not_count_and_stay_with_their_base() -> None:
    rows = [listed(10), listed(20, "quarantined", base=10), listed(30), listed(40, "quarantined"), listed(50, "written")]
    decided = plan(rows, 1, False)
    assert kept(decided) == [10, 20, 30, 40, 50]
    assert reasons(decided, 30) == "one of the newest 1; the newest verified"
    assert reasons(decided, 10) == f"base of {name(20)}"
    assert decided.anchor == name(30)


def test_what_lies_outside_the_history_goes_only_when_the_history_is_known() -> None:
    rows = [listed(10), listed(20), listed(30, "written", ours=False), listed(40, ours=False)]
    assert kept(plan(rows, 2, False)) == [10, 20]
    assert kept(plan(rows, 2, False, history_known=False)) == [10, 20, 30, 40]
    assert kept(plan(rows, None, False)) == [10, 20, 30, 40]
    assert reasons(plan(rows, 2, False), 40) == "outside the present history"


def test_a_newer_one_outside_the_history_is_not_the_newest_verified() -> None:
    decided = plan([listed(10), listed(20), listed(40, ours=False)], 1, False)
    assert (kept(decided), decided.anchor) == ([20], name(20))


def test_nothing_at_all_is_a_plan_too() -> None:
    decided = plan([], 3, False)
    assert (decided.verdicts, decided.remove, decided.freed, decided.anchor) == ((), (), 0, None)


def _history(rng: random.Random) -> list[Listed]:
    rows: list[Listed] = []
    for step in range(1, rng.randint(1, 25)):
        fulls = [row.name.step for row in rows if row.base is None]
        base = rng.choice(fulls) if fulls and rng.random() < 0.6 else None
        rows.append(listed(step, rng.choice(TRUSTS), base, ours=rng.random() < 0.9))
    rng.shuffle(rows)
    return rows


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.none() | st.integers(1, 6), st.booleans(), st.booleans())
def test_whatever_the_history_what_must_stay_stays(
    rng: random.Random, keep_last: int | None, stored: bool, known: bool
) -> None:
    rows = _history(rng)
    decided = plan(rows, keep_last, stored, history_known=known)
    by_name = {row.name: row for row in rows}
    stays = {verdict.name for verdict in decided.keep}
    assert [verdict.name for verdict in decided.verdicts] == sorted(by_name)
    assert all(verdict.reasons for verdict in decided.verdicts)
    assert {verdict.name for verdict in decided.remove} == set(by_name) - stays
    counts = ("replicated",) if stored else ("verified", "replicated")
    counted = sorted((row.name for row in rows if row.in_lineage and row.trust in counts), reverse=True)
    assert stays >= set(counted[:keep_last])
    for row in rows:
        if row.name in stays:
            assert row.base is None or row.base in stays
        elif row.in_lineage:
            assert row.trust in counts
            assert row.name in counted[keep_last:]
            assert keep_last
    good = sorted(row.name for row in rows if row.in_lineage and row.trust in ("verified", "replicated"))
    assert not good or good[-1] in stays
    order = [verdict.name for verdict in decided.remove]
    for verdict in decided.remove:
        assert verdict.base not in order or order.index(verdict.name) < order.index(verdict.base)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.booleans())
def test_after_the_plan_was_carried_out_there_is_nothing_left_to_do(
    rng: random.Random, keep_last: int | None, stored: bool
) -> None:
    rows = _history(rng)
    stays = {verdict.name for verdict in plan(rows, keep_last, stored).keep}
    again = plan([row for row in rows if row.name in stays], keep_last, stored)
    assert again.remove == ()


@pytest.mark.parametrize("base", [[listed(100, "quarantined")], []], ids=["damaged", "gone"])
def test_increments_that_lost_their_base_count_for_nothing(base: list[Listed]) -> None:
    decided = plan([listed(50), *base, listed(110, base=100), listed(120, base=100)], 2, False)
    assert decided.remove == ()
    assert decided.anchor == name(50)
    assert reasons(decided, 120) == "damaged: not counted, kept to be looked at"
