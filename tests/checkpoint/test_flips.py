"""One flipped bit, one byte short, one byte more, a file gone: verification finds it, says where, no reader hands it out."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from snapshots import FIRST, Source, random_bytes, small_source, write

from perdure.training.checkpoint import catalog, facts
from perdure.training.checkpoint.codec import decode_blob
from perdure.training.checkpoint.frames import decompress
from perdure.training.checkpoint.layout import CONSTANT, RAW, WHOLE, ZSTD
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import RunDir, rank_index, rank_pack


@pytest.fixture
def folder(run: RunDir) -> Path:
    """A good checkpoint of two ranks."""
    write(run, small_source(seed=0), small_source(seed=1))
    folder = run.checkpoint(FIRST)
    assert verify_folder(folder) == []
    assert verify_folder(folder, deep=False) == []
    return folder


@contextlib.contextmanager
def changed(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(change(before))
    try:
        yield
    finally:
        path.write_bytes(before)


def flip(bit: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at, flipped = bit // 8, bytearray(data)
        flipped[at] ^= 1 << bit % 8
        return bytes(flipped)

    return change


def read_everything(folder: Path) -> None:
    with open_checkpoint(folder) as reader:
        for rank in range(reader.ranks):
            for path in reader.rank_entries(rank):
                reader.read(path, rank)


def bits_of(path: Path, count: int) -> list[int]:
    return random.Random(path.name).sample(range(path.stat().st_size * 8), count)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_flipped_bit_of_a_pack_is_found_names_its_leaf_and_is_never_read(folder: Path, rank: int) -> None:
    path = folder / rank_pack(rank)
    with open_checkpoint(folder) as reader:
        owners = [(blob.offset, entry.path) for entry in reader.rank_entries(rank).values() for blob in entry.blobs]
    for bit in bits_of(path, 60):
        owner = [leaf for offset, leaf in owners if offset <= bit // 8][-1]
        with changed(path, flip(bit)):
            for deep in (True, False):
                found = verify_folder(folder, deep=deep)
                assert [damage.part for damage in found] == [owner]
                assert owner in found[0].detail
                assert str(folder) in found[0].detail
            with pytest.raises(CheckpointDamaged) as error, open_checkpoint(folder) as reader:
                reader.read(owner, rank)
            assert error.value.part == owner


def test_every_flipped_bit_of_an_index_is_found(folder: Path) -> None:
    for rank in (0, 1):
        for bit in bits_of(folder / rank_index(rank), 40):
            with changed(folder / rank_index(rank), flip(bit)):
                assert [damage.part for damage in verify_folder(folder)] == ["index"]
                with pytest.raises(CheckpointDamaged, match="index"):
                    read_everything(folder)


def test_every_flipped_bit_of_the_manifest_is_found(folder: Path) -> None:
    for bit in bits_of(folder / "manifest.json", 200):
        with changed(folder / "manifest.json", flip(bit)):
            assert [damage.part for damage in verify_folder(folder)] == ["manifest"]
            with pytest.raises(CheckpointDamaged) as error:
                open_checkpoint(folder)
            assert error.value.part == "manifest"


@pytest.mark.parametrize(
    "file", ["rank-00000.pack", "rank-00001.pack", "rank-00000.index", "rank-00001.index", "manifest.json"]
)
@pytest.mark.parametrize("harm", ["a byte short", "half", "empty", "a byte more", "junk more", "zeros", "another's"])
def test_a_file_of_other_length_or_content_is_found_by_its_kind(folder: Path, file: str, harm: str) -> None:
    kind = file.rpartition(".")[2] if file != "manifest.json" else "manifest"
    harms: dict[str, Callable[[bytes], bytes]] = {
        "a byte short": lambda data: data[:-1],
        "half": lambda data: data[: len(data) // 2],
        "empty": lambda data: b"",
        "a byte more": lambda data: data + b"\0",
        "junk more": lambda data: data + random_bytes(1, 5000),
        "zeros": lambda data: bytes(len(data)),
        "another's": lambda data: random_bytes(2, len(data)),
    }
    with changed(folder / file, harms[harm]):
        found = verify_folder(folder)
        if harm in ("zeros", "another's") and kind == "pack":
            with open_checkpoint(folder) as reader:
                stored = [entry.path for entry in reader.entries.values() if entry.blobs]
            good = ["model/zeros"] if harm == "zeros" else []  # stored as the one byte that is still there
            assert [damage.part for damage in found] == [path for path in stored if path not in good]
        else:
            assert [damage.part for damage in found] == [kind]
        with pytest.raises(CheckpointDamaged):
            read_everything(folder)


def test_a_missing_file_is_found(folder: Path) -> None:
    for file in ("rank-00001.pack", "rank-00000.index"):
        data = (folder / file).read_bytes()
        (folder / file).unlink()
        assert [damage.part for damage in verify_folder(folder)] == [file.rpartition(".")[2]]
        assert "missing" in verify_folder(folder)[0].detail
        (folder / file).write_bytes(data)


def test_all_damage_is_told_not_just_the_first(folder: Path) -> None:
    with open_checkpoint(folder) as reader:
        at = {path: entry.blobs[0].offset for path, entry in reader.entries.items() if entry.blobs}
    with changed(folder / rank_pack(0), lambda data: flip(at["data/order"] * 8)(flip(at["model"] * 8)(data))):
        (folder / rank_index(1)).write_bytes(b"")
        assert [damage.part for damage in verify_folder(folder)] == ["model", "data/order", "index"]


def test_swapped_ranks_are_found(run: RunDir) -> None:
    write(run, small_source(seed=0), small_source(seed=1))
    folder = run.checkpoint(FIRST)
    for file in (rank_pack, rank_index):
        one, other = (folder / file(0)).read_bytes(), (folder / file(1)).read_bytes()
        (folder / file(0)).write_bytes(other)
        (folder / file(1)).write_bytes(one)
    assert {damage.part for damage in verify_folder(folder)} == {"index"}


def test_the_check_is_recorded_and_a_damaged_one_is_no_candidate(run: RunDir, folder: Path) -> None:
    assert facts.trust(run, FIRST) == "written"
    assert check(run, FIRST).result == "good"
    assert facts.trust(run, FIRST) == "verified"
    with changed(folder / rank_pack(0), flip(8)):
        fact = check(run, FIRST)
        assert (fact.result, fact.copy) == ("damaged", "local")
        assert fact == facts.read_fact(run, FIRST, "local")
        assert fact.damage[0].startswith("model: ")
        assert facts.trust(run, FIRST) == "quarantined"
        assert FIRST not in catalog.candidates(run)
    assert check(run, FIRST).result == "good"


def test_a_thousand_damaged_leaves_make_a_fact_that_can_still_be_read(run: RunDir) -> None:
    source = Source()
    for number in range(3000):
        source.tensor(f"{'long' * 100}/{number}", "uint8", (8,), random_bytes(number, 8))
    write(run, source)
    pack = run.checkpoint(FIRST) / rank_pack(0)
    with changed(pack, lambda data: bytes(len(data))):
        fact = check(run, FIRST)
        assert len(verify_folder(run.checkpoint(FIRST))) == 3000
    assert fact.damage[-1] == "and 2900 more"
    assert facts.trust(run, FIRST) == "quarantined"


def test_progress_ends_at_all_stored_bytes_and_never_goes_back(folder: Path) -> None:
    for change in (lambda data: data, flip(8)):
        told: list[tuple[int, int]] = []
        with changed(folder / rank_pack(0), change):
            verify_folder(folder, progress=lambda done, total, told=told: told.append((done, total)))  # type: ignore[misc]
        stored = sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")
        assert told == sorted(told)
        assert told[-1] == (stored, stored)


# frames of one blob

CONTENT = random_bytes("content", 700) * 3 + random_bytes("more", 1000)


def frame(data: bytes = CONTENT, **settings: bool) -> bytes:
    return zstandard.ZstdCompressor(level=3, **{"write_checksum": True, **settings}).compress(data)


def streamed(data: bytes = CONTENT) -> bytes:
    """As the zstd tool makes of a pipe: the frame does not know its size."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    out = compressor.compress(data) + compressor.flush()
    assert zstandard.get_frame_parameters(out).content_size == zstandard.CONTENTSIZE_UNKNOWN
    return out


def decode(stored: bytes, size: int = len(CONTENT)) -> bytes:
    out = bytearray(size)
    decode_blob(memoryview(stored), (WHOLE, ((ZSTD, len(stored)),)), "uint8", memoryview(out))
    return bytes(out)


def test_a_frame_of_known_and_one_of_unknown_size_decode() -> None:
    assert decode(frame()) == decode(streamed()) == decode(frame(write_checksum=False)) == CONTENT
    decompress(frame(b""), memoryview(bytearray()))


def test_a_frame_cut_anywhere_is_refused() -> None:
    for whole in (frame(), streamed(), frame(write_checksum=False)):
        for length in [len(whole) * tenth // 10 for tenth in range(10)] + [len(whole) - 1, len(whole) - 4, len(whole) - 1000]:
            with pytest.raises(ValueError):
                decode(whole[:length])


def test_two_frames_and_junk_after_or_before_one_are_refused() -> None:
    half = len(CONTENT) // 2
    for stored in (
        frame(CONTENT[:half]) + frame(CONTENT[half:]),
        streamed(CONTENT[:half]) + streamed(CONTENT[half:]),
        frame() + frame(b""),
        frame() + b"ten bytes!",
        streamed() + b"\0",
        b"\x50\x2a\x4d\x18\x04\0\0\0junk" + frame(),
        frame() + b"\x50\x2a\x4d\x18\x04\0\0\0junk",
    ):
        with pytest.raises(ValueError):
            decode(stored)


def test_a_frame_of_more_or_less_than_said_is_refused() -> None:
    for stored in (frame(), streamed()):
        for size in (len(CONTENT) - 1, len(CONTENT) + 1, 1, 1 << 20):
            with pytest.raises(ValueError):
                decode(stored, size)


def test_every_flipped_bit_of_a_checksummed_frame_is_refused_or_changes_nothing() -> None:
    whole = frame()
    for bit in random.Random(5).sample(range(len(whole) * 8), 100):
        try:
            assert decode(flip(bit)(whole)) == CONTENT
        except ValueError:
            continue


def test_layouts_that_do_not_fit_are_refused() -> None:
    stored = memoryview(CONTENT[:1000])
    for layout in [
        (WHOLE, ((RAW, 999),)),
        (WHOLE, ((RAW, 1000), (RAW, 0))),
        (WHOLE, ()),
        (WHOLE, ((7, 1000),)),
        (WHOLE, ((CONSTANT, 1000),)),
        (1, ((RAW, 1000),)),
        (9, ((RAW, 1000),)),
        (2, ((RAW, 500), (RAW, 500))),
    ]:
        with pytest.raises(ValueError):
            decode_blob(stored, layout, "uint8", memoryview(bytearray(1000)))
    with pytest.raises(ValueError):
        decode_blob(stored, (2, ((RAW, 1000),)), "float32", memoryview(bytearray(4000)))
