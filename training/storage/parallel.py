"""Work in a few threads, results in order: at most `width` items are in flight, so memory stays at `width` parts."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], *, width: int) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order. When one raises, what runs is waited for and the rest never starts."""
    pool = ThreadPoolExecutor(max_workers=width, thread_name_prefix="perdure-transfer")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= width:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ranges(size: int, part: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the parts of `size` bytes."""
    for offset in range(0, size, part):
        yield offset, min(part, size - offset)
