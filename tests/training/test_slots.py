"""Slots: what one process copied in is what another maps, and a snapshot cut off by a kill is never taken for whole."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.training.slots import (
    CONTROL_BYTES,
    DATA_ALIGN,
    HEADER_ROOM,
    About,
    Entry,
    Header,
    MappedSlots,
    SlotWriter,
    Snapshot,
    aligned,
    create_slot,
    encode_entries,
)


@pytest.fixture
def fd() -> Iterator[int]:
    slot = create_slot("test")
    yield slot
    os.close(slot)


def about(step: int = 7, **more: Any) -> About:
    empty: dict[str, Any] = {}
    facts = dict.fromkeys(("world", "data", "environment", "code", "config", "loss"), empty) | more
    return About(step=step, **facts)


def entry(path: str, offset: int, nbytes: int) -> Entry:
    return Entry(path=path, kind="tensor", dtype="uint8", shape=(nbytes,), offset=offset, nbytes=nbytes)


def header(*entries: Entry, step: int = 7, **more: Any) -> Header:
    return Header(about=about(step, **more), entries=entries)


def fill(writer: SlotWriter, data: bytes, step: int = 7) -> None:
    space, base = writer.begin(header(entry("x", 0, len(data)), step=step), len(data))
    space[base : base + len(data)] = data
    writer.finish()


def read(fd: int) -> tuple[bool, int, bytes]:
    """Whether it is whole, its step, and its only leaf."""
    snapshot = Snapshot(fd)
    data = bytes(snapshot.data(snapshot.entries[0])) if snapshot.whole else b""
    found = snapshot.whole, snapshot.step, data
    snapshot.close()
    return found


def test_what_was_copied_in_is_mapped_back(fd: int) -> None:
    entries = entry("a/b", 0, 5), entry("empty", 64, 0), entry("c", 64, 3)
    writer = SlotWriter(fd)
    space, base = writer.begin(header(*entries), 67)
    space[base : base + 5], space[base + 64 : base + 67] = b"hello", b"you"
    writer.finish()
    snapshot = Snapshot(fd)
    assert snapshot.entries == entries
    assert [bytes(snapshot.data(one)) for one in entries] == [b"hello", b"", b"you"]
    snapshot.close()


def test_about_arrives_word_for_word(fd: int) -> None:
    said = about(
        12, data={"samples": 3}, exact=False, exact_reasons=("other threads",), loss={"last": 0.5}, code={"dirty": None}
    )
    writer = SlotWriter(fd)
    writer.begin(Header(about=said, entries=()), 0)
    writer.finish()
    snapshot = Snapshot(fd)
    assert (snapshot.about, snapshot.step, snapshot.entries) == (said, 12, ())
    snapshot.close()


def test_new_slot_holds_no_snapshot(fd: int) -> None:
    assert read(fd) == (False, 0, b"")


def test_snapshot_in_the_making_is_torn_by_its_odd_generation(fd: int) -> None:
    writer = SlotWriter(fd)
    fill(writer, b"first", step=1)
    assert read(fd) == (True, 1, b"first")
    assert writer.generation == 2
    writer.begin(header(entry("x", 0, 6), step=2), 6)
    assert writer.generation == 3
    assert not read(fd)[0]
    writer.finish()
    assert read(fd)[:2] == (True, 2)


def test_begun_twice_is_still_torn_and_then_whole(fd: int) -> None:
    """A copy that failed half way is begun again."""
    writer = SlotWriter(fd)
    writer.begin(header(entry("x", 0, 1)), 1)
    writer.begin(header(entry("x", 0, 1)), 1)
    assert writer.generation % 2 == 1
    assert not read(fd)[0]
    fill(writer, b"z")
    assert read(fd) == (True, 7, b"z")


KILLED = """
import os, signal, sys
from perdure.training.slots import About, Entry, Header, SlotWriter
writer = SlotWriter(int(sys.argv[1]))
entry = Entry(path="x", kind="tensor", dtype="uint8", shape=(4,), offset=0, nbytes=4)
nothing = dict.fromkeys(("world", "data", "environment", "code", "config", "loss"), {})
space, base = writer.begin(Header(about=About(step=9, **nothing), entries=(entry,)), 4)
space[base : base + 2] = b"ha"
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("before", [b"", b"good"])
def test_writer_killed_in_the_copy_leaves_a_torn_snapshot_to_whoever_maps_it(before: bytes, fd: int) -> None:
    if before:
        fill(SlotWriter(fd), before)
    done = subprocess.run([sys.executable, "-c", KILLED, str(fd)], pass_fds=(fd,), check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not read(fd)[0]


def test_slot_grows_in_whole_pages_and_keeps_what_it_holds(fd: int) -> None:
    writer = SlotWriter(fd)
    fill(writer, b"abc")
    assert writer.reserve(1_000_000)
    assert os.fstat(fd).st_size == aligned(1_000_000) == 1_003_520
    assert not writer.reserve(1_003_520), "already that large"
    assert read(fd) == (True, 7, b"abc")


def test_larger_state_than_before_is_whole_and_a_smaller_one_hides_the_rest(fd: int) -> None:
    writer = SlotWriter(fd)
    for number, size in enumerate((10, 1_000_000, 3, 2_000_001)):
        fill(writer, bytes([number + 1]) * size, step=number)
        assert read(fd) == (True, number, bytes([number + 1]) * size)


def test_reader_of_the_old_size_sees_its_snapshot_while_the_slot_grows(fd: int) -> None:
    writer = SlotWriter(fd)
    fill(writer, b"old")
    snapshot = Snapshot(fd)
    writer.reserve(10_000_000)
    assert bytes(snapshot.data(snapshot.entries[0])) == b"old"
    snapshot.close()


def test_many_leaves_move_the_data_area_behind_the_header(fd: int) -> None:
    entries = tuple(entry(f"layer.{number}/{'x' * 50}", number * 64, 64) for number in range(500))
    writer = SlotWriter(fd)
    space, base = writer.begin(header(*entries), 64 * 500)
    assert base % DATA_ALIGN == 0
    for number in range(500):
        space[base + number * 64 : base + number * 64 + 64] = bytes([number % 251]) * 64
    writer.finish()
    snapshot = Snapshot(fd)
    assert all(bytes(snapshot.data(one)) == bytes([number % 251]) * 64 for number, one in enumerate(snapshot.entries))
    assert len(snapshot.entries) == 500
    snapshot.close()


def test_fixed_entries_come_first_and_stay_while_the_header_changes(fd: int) -> None:
    fixed = encode_entries([entry("weights", 0, 4), entry("bias", 64, 1)])
    writer = SlotWriter(fd)
    bases = set()
    for step, text in enumerate((b"a", b"bcd", b"ef")):
        space, base = writer.begin(header(entry("plain", 128, len(text)), step=step), 128 + len(text), fixed)
        bases.add(base)
        space[base : base + 4], space[base + 128 : base + 128 + len(text)] = b"%04d" % step, text
        writer.finish()
        snapshot = Snapshot(fd)
        assert [one.path for one in snapshot.entries] == ["weights", "bias", "plain"]
        assert (bytes(snapshot.data(snapshot.entries[0])), bytes(snapshot.data(snapshot.entries[2]))) == (b"%04d" % step, text)
        snapshot.close()
    assert len(bases) == 1, "the data area does not move when only the header changes"


def test_header_longer_than_its_room_moves_the_data_area(fd: int) -> None:
    writer = SlotWriter(fd)
    fill(writer, b"short")
    said = about(8, config={"text": "x" * HEADER_ROOM})
    space, base = writer.begin(Header(about=said, entries=(entry("x", 0, 5),)), 5)
    space[base : base + 5] = b"still"
    writer.finish()
    assert read(fd) == (True, 8, b"still")


@pytest.mark.parametrize("where", ["fixed", "header"])
def test_header_scribbled_over_by_a_rank_gone_mad_is_no_snapshot(where: str, fd: int) -> None:
    fixed = encode_entries([entry("weights", 0, 4)])
    writer = SlotWriter(fd)
    writer.begin(header(), 4, fixed)
    writer.finish()
    assert read(fd)[0]
    at = CONTROL_BYTES + (0 if where == "fixed" else len(fixed))
    writer.map[at : at + 4] = b"\xc1\xc1\xc1\xc1"
    assert not read(fd)[0]


@pytest.mark.parametrize("junk", [b"\x00" * 64, b"PRDSLOT3" + b"\x02" * 56, b"\xff" * 64], ids=["zeros", "other", "ones"])
def test_foreign_memory_is_no_snapshot(junk: bytes, fd: int) -> None:
    with mmap.mmap(fd, DATA_ALIGN) as space:
        space[:64] = junk
    assert not read(fd)[0]


def test_snapshot_outlives_its_writer(fd: int) -> None:
    code = KILLED.replace('b"ha"\n', 'b"ha"\nspace[base + 2 : base + 4] = b"lf"\nwriter.finish()\n')
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=(fd,), check=False, timeout=60)
    assert read(fd) == (True, 9, b"half")


def test_a_kept_mapping_shows_what_was_copied_later_and_follows_a_slot_that_grows(fd: int) -> None:
    writer, kept, large = SlotWriter(fd), MappedSlots(), b"z" * (3 * DATA_ALIGN)
    for step, data in enumerate((b"one", b"two", large, b"end")):
        fill(writer, data, step)
        again = os.dup(fd)  # as the saver gets it: another descriptor each time
        snapshot = kept.snapshot(again)
        assert (snapshot.whole, snapshot.step, bytes(snapshot.data(snapshot.entries[0]))) == (True, step, data)
        snapshot.close()
        os.close(again)
