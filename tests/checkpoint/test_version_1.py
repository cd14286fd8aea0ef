"""A checkpoint of format 1, written by the code of commit cace50a, is read, verified and used as a base."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from forging import blob, forge, leaf, packed, refused
from snapshots import Source, random_bytes, write

from perdure.training.checkpoint import manifest
from perdure.training.checkpoint.layout import ROTATED
from perdure.training.checkpoint.pack import REFERENCE, decode_index
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir

OLD = Path(__file__).with_name("version-1") / "000000000002-0001"
STATE = "5ea082e5bb10150337dc856a2c17d1dde302d0e86e5445e0650a2ad5555744d6"


@pytest.fixture
def folder(run: RunDir) -> Path:
    shutil.copytree(OLD, run.checkpoint(CheckpointName(2, 1)))
    return run.checkpoint(CheckpointName(2, 1))


def test_it_is_whole_and_its_leaves_are_those_that_were_written(folder: Path) -> None:
    assert verify_folder(folder) == verify_folder(folder, deep=False) == []
    found = manifest.read(folder)
    assert (found.version, found.state_digest, found.base) == (1, STATE, None)
    with open_checkpoint(folder) as reader:
        reader.check_state_digest()
        assert bytes(reader.read("all/bfloat16")) == random_bytes("bfloat16", 200) * 3
        assert bytes(reader.read("all/complex64")) == random_bytes("complex64", 800) * 3
        assert bytes(reader.read("model/zeros")) == bytes(8000)
        assert np.frombuffer(reader.read("data/order"), np.int64).tolist() == list(range(2000))
        assert bytes(reader.read("x", 1)) == b"abc"
        assert ROTATED in {blob.layout[0] for entry in reader.entries.values() for blob in entry.blobs}


def test_every_flipped_bit_is_found(folder: Path) -> None:
    for file in ("rank-00000.pack", "rank-00001.pack", "rank-00000.index", "manifest.json"):
        path, data = folder / file, (folder / file).read_bytes()
        for at in range(0, len(data), len(data) // 20):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            assert verify_folder(folder), (file, at)
            path.write_bytes(data)
    assert verify_folder(folder) == []


def test_a_pack_that_is_not_the_one_of_the_manifest_is_found(folder: Path) -> None:
    records = json.loads((folder / "manifest.json").read_bytes())["files"]
    records[0]["digest"] = "xxh3-128:" + "0" * 32
    forge(folder, files=records)
    assert [damage.part for damage in verify_folder(folder)] == ["pack"]


def test_it_has_nothing_that_came_later(folder: Path) -> None:
    base = {"name": "000000000001-0001", "digest": "0" * 64}
    forge(folder, base=base)
    assert "increment" in refused(folder, "manifest")
    forge(folder, base=None, version=2)
    refused(folder, "index")  # its index is of version 1
    records = json.loads((folder / "manifest.json").read_bytes())["files"]
    for record in records:
        record["name"] = record["name"].replace(".", ".full.", 1)
        (folder / record["name"].replace(".full", "")).rename(folder / record["name"])
    forge(folder, version=1, files=records)
    assert "names files" in refused(folder, "manifest")


@pytest.mark.parametrize("transform", [3, 4, 5, 6, 7])
def test_transforms_of_version_2_are_refused_in_it(transform: int) -> None:
    entry = leaf(blob(layout=[transform, [[0, 100]]]))[:-1]
    good = leaf()[:-1]
    assert decode_index(packed([1, [good]]), 100, "here", version=1)[0].path == "w"
    with pytest.raises(CheckpointDamaged):
        decode_index(packed([1, [entry]]), 100, "here", version=1)
    with pytest.raises(CheckpointDamaged):
        decode_index(packed([1, [leaf()]]), 100, "here", version=1)  # eight fields


def test_it_is_a_base_for_increments(run: RunDir, folder: Path) -> None:
    data = random_bytes("bfloat16", 200) * 3
    assert write(run, Source(4).tensor("all/bfloat16", "bfloat16", (300,), data), base=CheckpointName(2, 1)).base is not None
    with open_checkpoint(run.checkpoint(CheckpointName(4, 1))) as reader:
        assert reader.entries["all/bfloat16"].blobs[0].layout[0] == REFERENCE
        assert bytes(reader.read("all/bfloat16")) == data
