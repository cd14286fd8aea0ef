"""Packs that are read where they are stored: only what is needed, in ranges of what lies close together.

No claim of a listing or a manifest sizes memory; what is read is compared with its digests by the reader."""

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from perdure.training.checkpoint.source import Extent
from perdure.training.storage.parallel import PARTS
from perdure.training.storage.store import ObjectStore

SPAN_BYTES = 8 << 20
"""Of one request, unless a single blob is larger; less where many packs are read, so that memory does not grow with them."""
GAP_BYTES = 256 << 10
"""What is not needed between two blobs is read as well up to this size: that takes less time than another request."""


class StoreSource:
    """The files of one checkpoint in a store, those whose keys begin with `prefix`. What `expect` was told is fetched ahead,
    the rest when asked for. `count` is told the bytes that are fetched, by several threads."""

    def __init__(self, store: ObjectStore, prefix: str, count: Callable[[int], object] = lambda _: None) -> None:
        self._store, self._prefix, self._count = store, prefix, count
        self._sizes = {item.key.removeprefix(self._prefix): item.size for item in store.list(self._prefix)}
        self._pool = ThreadPoolExecutor(PARTS, thread_name_prefix="perdure-transfer")
        self._spans: list[Extent] = []
        self._ahead = PARTS
        """Spans that are fetched from one on: fewer where several packs are read by turns."""
        self._kept = 2 * PARTS
        """Spans in memory: those on their way, and those that blobs are taken from, one in each pack."""
        self._here: OrderedDict[int, Future[bytes | bytearray]] = OrderedDict()
        """The one last asked for at the end."""
        self._lock = threading.Lock()

    def size(self, file: str) -> int | None:
        return self._sizes.get(file)

    def expect(self, extents: Iterable[Extent]) -> None:
        wanted = sorted(set(extents))
        packs = max(1, len({extent.file for extent in wanted}))
        self._ahead, self._kept = max(1, PARTS // packs), PARTS + max(PARTS, packs)
        self._spans = _spans(wanted, SPAN_BYTES * PARTS // max(PARTS, packs))
        self._here.clear()

    def read(self, file: str, offset: int, length: int) -> bytes:
        return bytes(self._fetch(file, offset, length))

    def _fetch(self, file: str, offset: int, length: int) -> bytes | bytearray:
        self._count(length)
        return self._store.get_range(self._prefix + file, offset, length)

    def read_into(self, file: str, offset: int, out: memoryview) -> int:
        number = bisect.bisect_right(self._spans, (file, offset, self._sizes.get(file, 0))) - 1
        span = self._spans[number] if number >= 0 else Extent("", 0, 0)
        if span.file == file and offset + len(out) <= span.offset + span.length:
            out[:] = memoryview(self._span(number))[offset - span.offset :][: len(out)]
        else:
            out[:] = self._fetch(file, offset, len(out))
        return len(out)

    def _span(self, number: int) -> bytes | bytearray:
        """One span, while those after it are on their way."""
        with self._lock:
            for one in range(number, min(number + self._ahead, len(self._spans))):
                if one not in self._here:
                    self._here[one] = self._pool.submit(self._fetch, *self._spans[one])
            wanted = self._here[number]
            self._here.move_to_end(number)
            while len(self._here) > self._kept:
                self._here.popitem(last=False)
        return wanted.result()

    def distrust(self, file: str) -> bool:
        return False

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _spans(extents: list[Extent], most: int) -> list[Extent]:
    """What lies close together in one of `most` bytes, in order."""
    spans: list[Extent] = []
    for file, offset, length in extents:
        last = spans[-1] if spans else Extent("", 0, 0)
        gap, whole = offset - (last.offset + last.length), offset + length - last.offset
        if last.file == file and gap <= GAP_BYTES and whole <= most:
            spans[-1] = last._replace(length=max(last.length, whole))
        else:
            spans.append(Extent(file, offset, length))
    return spans
