"""Work on blobs in a few threads, results in order. A bounded number is ahead, so memory stays bounded."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
INLINE = 1 << 16
"""Raw bytes up to which work is done on the spot: handing it to a thread would cost more."""


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, here: Callable[[Item], bool]
) -> Generator[tuple[Item, Result], None, None]:
    """Yield each item with `work(item)`, in order; items of which `here` is true are worked on in the caller's thread.

    When one raises, what runs is waited for and the rest never starts."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="perdure-blobs")
    ahead: deque[tuple[Item, Callable[[], Result]]] = deque()
    try:
        for item in items:
            if here(item):
                if not ahead:
                    yield item, work(item)
                    continue
                done = work(item)
                ahead.append((item, lambda done=done: done))  # type: ignore[misc]  # a default binds this one
            else:
                ahead.append((item, pool.submit(work, item).result))
            if len(ahead) >= 2 * threads + 2:
                item, result = ahead.popleft()
                yield item, result()
        while ahead:
            item, result = ahead.popleft()
            yield item, result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
