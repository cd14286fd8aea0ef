"""Plain data that we did not write is refused, in bounded memory."""

import pickle
import tracemalloc

import msgspec
import pytest
from forging import MIB, Exploding
from snapshots import random_bytes

from perdure.training.checkpoint.plain import MAX_DEPTH, MAX_PLAIN, pack_plain, unpack_plain
from perdure.training.errors import CheckpointDamaged

E = msgspec.msgpack.encode
BAD_PLAIN: dict[str, bytes] = {
    "empty": b"",
    "pickle": pickle.dumps(Exploding()),
    "random": random_bytes("plain", 1000),
    "map": E({"a": 1}),
    "date": b"\xd6\xff\0\0\0\0",
    "extension": b"\xc7\x03\x05abc",
    "empty list": E([]),
    "no kind": E([1, 2]),
    "unknown kind": E(["x", 2]),
    "kind of hostile length": E(["l" * 100_000]),
    "two values": E(1) + E(2),
    "deep": b"\x92\xa1l" * 100_000 + b"\xc0",
    "deep in mappings": b"\x93\xa1d\xa1k" * 100_000 + b"\xc0",
    "one too deep": b"\x92\xa1l" * (MAX_DEPTH + 1) + b"\xc0",
    "count of four thousand million": b"\xdd\xff\xff\xff\xff",
    "counts within counts": b"\xdd\x7f\xff\xff\xff" * 500,
    "text of four gigabytes": b"\xdb\xff\xff\xff\xffab",
    "key without value": E(["d", 1]),
    "key twice": E(["d", 1, 2, 1, 3]),
    "key that cannot be one": E(["d", ["l"], 1]),
    "member that cannot be one": E(["s", ["l"]]),
    "integer of no text": E(["i", 5]),
    "integer of decimal text": E(["i", "5"]),
    "integer that fits": E(["i", "0x5"]),
    "integer with signs": E(["i", "0x1_0000_0000_0000_0000"]),
    "integer missing": E(["i"]),
    "complex of texts": E(["c", "1", "2"]),
    "complex of one": E(["c", 1.0]),
    "not unicode": b"\xa1\xff",
}


@pytest.mark.parametrize("what", BAD_PLAIN)
def test_plain_data_that_we_did_not_write_is_refused_in_bounded_memory(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamaged) as error:
            unpack_plain(BAD_PLAIN[what])
        assert error.value.part == "plain"
        assert tracemalloc.get_traced_memory()[1] < 32 * MIB
    finally:
        tracemalloc.stop()


def test_plain_data_beyond_the_bound_is_refused_unread() -> None:
    with pytest.raises(CheckpointDamaged, match="too large"):
        unpack_plain(memoryview(bytes(MAX_PLAIN + 1)))


def test_plain_data_cut_anywhere_is_refused() -> None:
    whole = pack_plain({"a": [1, 2.0, (None, b"x")], "b": {3, 4}, "c": 1 << 80, "d": "text"}, "x")
    for length in range(len(whole)):
        with pytest.raises(CheckpointDamaged):
            unpack_plain(whole[:length])
