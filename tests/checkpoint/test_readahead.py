"""Leaves asked for in any order are the right ones; a bounded number is decoded ahead; damage is said of the leaf it is in."""

import random

import numpy as np
import pytest
from snapshots import FIRST, Source, random_bytes, small_source, write

from perdure.training.checkpoint import readahead
from perdure.training.checkpoint.pack import BLOB_BYTES
from perdure.training.checkpoint.readahead import ReadAhead
from perdure.training.checkpoint.reader import CheckpointReader, open_checkpoint
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import RunDir, rank_pack


def source() -> Source:
    made = small_source().tensor("large", "uint8", (2 * BLOB_BYTES + 3,), random_bytes("large", 2 * BLOB_BYTES + 3))
    master = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    made.array("master", master).array("twin", master)
    for number in range(20):
        made.tensor(f"w{number}", "uint8", (100_000,), random_bytes(number, 100_000))
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threads", [1, 3])
def test_leaves_come_back_in_whatever_order_they_are_asked_for_even_twice(run: RunDir, seed: int, threads: int) -> None:
    made = source()
    write(run, made)
    paths = list(made.bytes) * (1 + seed % 2)
    if seed:
        random.Random(seed).shuffle(paths)
    with open_checkpoint(run.checkpoint(FIRST)) as reader, ReadAhead(reader, threads) as ahead:
        assert [(path, bytes(ahead.read(path))) for path in paths] == [(path, made.bytes[path]) for path in paths]
        with pytest.raises(KeyError):
            ahead.read("nowhere")


def test_each_blob_is_decoded_once_and_a_bounded_number_ahead(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, source())
    monkeypatch.setattr(readahead, "_AHEAD", 300_000)
    decoded: list[str] = []
    real = CheckpointReader.blob
    monkeypatch.setattr(
        CheckpointReader, "blob", lambda self, entry, *rest: decoded.append(entry.path) or real(self, entry, *rest)
    )
    with open_checkpoint(run.checkpoint(FIRST)) as reader, ReadAhead(reader, 1) as ahead:
        ahead.read("w0")
        for number in range(1, 20):
            assert set(decoded) <= {f"w{one}" for one in range(number + 3)}
            ahead.read(f"w{number}")
    assert sorted(decoded) == sorted(f"w{number}" for number in range(20))


def test_damage_is_said_when_the_leaf_is_asked_for_and_only_then(run: RunDir) -> None:
    made = source()
    write(run, made)
    pack = run.checkpoint(FIRST) / rank_pack(0)
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        at = reader.entries["w7"].blobs[0].offset
    data = bytearray(pack.read_bytes())
    data[at] ^= 1
    pack.write_bytes(data)
    with open_checkpoint(run.checkpoint(FIRST)) as reader, ReadAhead(reader, 2) as ahead:
        for path in made.bytes:
            if path == "w7":
                with pytest.raises(CheckpointDamaged) as error:
                    ahead.read(path)
                assert error.value.part == "w7"
            else:
                assert bytes(ahead.read(path)) == made.bytes[path]


def test_small_leaves_are_not_handed_to_threads_nor_looked_at_again_and_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Source()
    for number in range(2000):
        made.tensor(f"w{number}", "uint8", (8,), number.to_bytes(8, "little"))
    write(run, made)
    looked: list[int] = []
    real = ReadAhead._is_worth_it
    monkeypatch.setattr(ReadAhead, "_is_worth_it", lambda self, place: looked.append(place) or real(self, place))
    with open_checkpoint(run.checkpoint(FIRST)) as reader, ReadAhead(reader, 2) as ahead:
        assert all(ahead.read(path) == data for path, data in made.bytes.items())
    assert len(looked) <= 2 * 2000 + 2
