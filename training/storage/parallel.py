"""Work in a few threads; a bounded number of items is in flight, so memory stays bounded."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
SMALL = 8 << 20
_SMALL_WIDTH, _LARGE_WIDTH = 8, 2
"""Files under way at once, up to SMALL bytes and larger ones. Of a small one all is in memory, of a large one PARTS parts."""
PARTS = 4  # 8 and 16 were no faster (facts/s3.md)


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


def by_size(function: Callable[[Item], object], items: Sequence[Item], size: Callable[[Item], int]) -> None:
    """`function` of each file, in any order, several at once. When one raises, what runs is waited for and the rest never
    starts."""
    for some, width in (
        ([item for item in items if size(item) > SMALL], _LARGE_WIDTH),
        ([item for item in items if size(item) <= SMALL], _SMALL_WIDTH),
    ):
        with ThreadPoolExecutor(max_workers=width, thread_name_prefix="perdure-transfer") as pool:
            for _ in pool.map(function, some):
                pass
