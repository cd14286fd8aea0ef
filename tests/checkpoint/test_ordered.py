"""Work in threads comes back in order, few items ahead, and ends when one fails."""

import threading

import pytest

from perdure.training.checkpoint.ordered import in_order


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("here", [lambda item: False, lambda item: True, lambda item: item % 3 == 0])
def test_results_come_in_order_wherever_they_are_made(threads: int, here: object) -> None:
    found = in_order(lambda item: item * item, range(50), threads=threads, here=here)  # type: ignore[arg-type]
    assert list(found) == [(item, item * item) for item in range(50)]


@pytest.mark.parametrize("threads", [1, 3])
def test_few_items_are_taken_ahead_of_what_is_asked_for(threads: int) -> None:
    taken: list[int] = []

    def items() -> object:
        for item in range(1000):
            taken.append(item)
            yield item

    done = in_order(lambda item: item, items(), threads=threads, here=lambda item: item % 5 == 0)  # type: ignore[arg-type, var-annotated]
    for item, _ in done:
        assert len(taken) - item <= 2 * threads + 2
    assert len(taken) == 1000


def test_small_items_are_worked_on_by_the_caller_itself() -> None:
    def who(_: int) -> int:
        return threading.get_ident()

    told = dict(in_order(who, range(20), threads=2, here=lambda item: item % 2 == 0))
    assert {told[item] == threading.get_ident() for item in range(0, 20, 2)} == {True}
    assert threading.get_ident() not in {told[item] for item in range(1, 20, 2)}


def test_a_failure_comes_out_in_its_place_and_nothing_is_left_running() -> None:
    before = threading.active_count()

    def work(item: int) -> int:
        if item == 7:
            raise ValueError("seven")
        return item

    found = in_order(work, range(100), threads=3, here=lambda _: False)
    assert [next(found)[0] for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(found)
    assert threading.active_count() == before
