"""Work in threads comes back in order, few bytes ahead, and ends when one fails."""

import threading
from collections.abc import Iterator

import pytest

from perdure.training.checkpoint.ordered import AHEAD, INLINE, in_order

SMALL, LARGE = INLINE, INLINE + 1


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("large", [1, 3, 1000])
def test_results_come_in_order_wherever_they_are_made(threads: int, large: int) -> None:
    found = in_order(lambda item: item * item, range(50), threads=threads, nbytes=lambda item: SMALL if item % large else LARGE)
    assert list(found) == [(item, item * item) for item in range(50)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, LARGE, AHEAD // 4, AHEAD])
def test_so_many_bytes_are_ahead_of_what_is_asked_for_or_a_few_items_that_are_larger(threads: int, size: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    most, furthest = max(2 * threads + 2, -(-AHEAD // max(size, INLINE))), 0
    for item, _ in in_order(lambda item: item, items(), threads=threads, nbytes=lambda item: size if item % 5 else LARGE):
        furthest = max(furthest, len(taken) - item)
    assert furthest <= most + 1  # the one that is being handed out
    assert furthest >= min(most, 2 * threads + 2)
    assert len(taken) == 1000


def test_small_items_are_worked_on_by_the_caller_itself() -> None:
    def who(_: int) -> int:
        return threading.get_ident()

    told = dict(in_order(who, range(20), threads=2, nbytes=lambda item: LARGE if item % 2 else SMALL))
    assert {told[item] == threading.get_ident() for item in range(0, 20, 2)} == {True}
    assert threading.get_ident() not in {told[item] for item in range(1, 20, 2)}


def test_a_failure_comes_out_in_its_place_and_nothing_is_left_running() -> None:
    ran: set[threading.Thread] = set()

    def work(item: int) -> int:
        ran.add(threading.current_thread())
        if item == 7:
            raise ValueError("seven")
        return item

    found = in_order(work, range(100), threads=3, nbytes=lambda _: LARGE)
    assert [next(found)[0] for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(found)
    assert ran
    assert not any(thread.is_alive() for thread in ran)
