"""A checkpoint of two hundred thousand tensors; by default of a tenth of them."""

import numpy as np
import pytest
from snapshots import Source, write

from perdure.training.checkpoint.pack import REFERENCE
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.run_dir import RunDir


@pytest.mark.parametrize("count", [20_000, pytest.param(200_000, marks=pytest.mark.chaos)])  # a minute
def test_so_many_tensors_come_back_from_a_full_and_an_increment(run: RunDir, count: int) -> None:
    values = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    source, later = Source(2), Source(4)
    for number in range(count):
        source.tensor(f"layer.{number}/weight", "float32", (3,), values[number].tobytes())
    values[::1000] += 1
    for number in range(count):
        later.tensor(f"layer.{number}/weight", "float32", (3,), values[number].tobytes())
    full = write(run, source)
    found = write(run, later, base=full.name)
    assert (full.leaves, found.leaves) == (count, count)
    assert found.files[0].bytes == count // 1000 * 12
    folder = run.checkpoint(found.name)
    assert verify_folder(folder, threads=2) == []  # and the base, of which nearly all is used
    with open_checkpoint(folder) as reader:
        assert {path: bytes(reader.read(path)) for path in reader.entries} == later.bytes
        references = [entry for entry in reader.entries.values() if entry.blobs[0].layout[0] == REFERENCE]
        assert len(references) == count - count // 1000
