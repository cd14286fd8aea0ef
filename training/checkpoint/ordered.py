"""Work on blobs in a few threads, results in order. A bounded number of bytes is ahead, so memory stays bounded."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
INLINE = 1 << 16
"""Raw bytes up to which work is done on the spot: handing it to a thread would cost more."""
AHEAD = 32 << 20
"""Raw bytes ahead of what is asked for, so that threads have work while the caller writes; and two items a thread and two more,
however large they are."""


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, nbytes: Callable[[Item], int]
) -> Generator[tuple[Item, Result], None, None]:
    """Yield each item with `work(item)`, in order; `nbytes` says how large one is, and small ones are worked on in the caller's
    thread.

    When one raises, what runs is waited for and the rest never starts."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="perdure-blobs")
    ahead: deque[tuple[Item, Callable[[], Result], int]] = deque()
    taken = 0
    try:
        for item in items:
            size = max(nbytes(item), INLINE)
            if size > INLINE:
                ahead.append((item, pool.submit(work, item).result, size))
            elif ahead:
                done = work(item)
                ahead.append((item, lambda done=done: done, size))  # type: ignore[misc]  # a default binds this one
            else:
                yield item, work(item)
                continue
            taken += size
            while taken >= AHEAD and len(ahead) >= 2 * threads + 2:
                item, result, size = ahead.popleft()
                taken -= size
                yield item, result()
        while ahead:
            item, result, _ = ahead.popleft()
            yield item, result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
