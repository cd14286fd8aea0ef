"""A glance finds what can be seen without reading a pack, and calls nothing damaged that is only on its way out."""

import shutil
from collections.abc import Callable

import msgspec
import pytest
from snapshots import RUN_ID, small_source, write

from perdure.training.checkpoint import glance as glances
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.glance import glance
from perdure.training.checkpoint.lineage import committed
from perdure.training.run_dir import CheckpointName, RunDir, rank_index, rank_pack


def name(step: int) -> CheckpointName:
    return CheckpointName(step, 1)


@pytest.fixture
def two(run: RunDir) -> RunDir:
    for step in (10, 20):
        write(run, small_source(step))
    return run


def parts(run: RunDir, run_id: str = RUN_ID) -> dict[int, list[str]]:
    return {one.step: [item.part for item in damage] for one, damage in glance(run, committed(run), run_id).items()}


def truncate(run: RunDir) -> None:
    with open(run.checkpoint(name(20)) / rank_pack(0), "r+b") as file:
        file.truncate(100)


def remove_index(run: RunDir) -> None:
    (run.checkpoint(name(20)) / rank_index(0)).unlink()


def flip_manifest(run: RunDir) -> None:
    data = bytearray(run.manifest(name(20)).read_bytes())
    data[len(data) // 2] ^= 1
    run.manifest(name(20)).write_bytes(data)


def copy_manifest(run: RunDir) -> None:
    shutil.copy(run.manifest(name(10)), run.manifest(name(20)))


def foreign(run: RunDir) -> None:
    found = manifests.read(run.checkpoint(name(20)))
    run.manifest(name(20)).write_bytes(manifests.seal(msgspec.structs.replace(found, run="another")))


def empty_pack_and_no_index(run: RunDir) -> None:
    (run.checkpoint(name(20)) / rank_pack(0)).write_bytes(b"")
    remove_index(run)


def test_good_ones_are_good(two: RunDir) -> None:
    assert parts(two) == {10: [], 20: []}


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (truncate, ["pack"]),
        (remove_index, ["index"]),
        (flip_manifest, ["manifest"]),
        (copy_manifest, ["manifest"]),
        (foreign, ["manifest"]),
        (empty_pack_and_no_index, ["pack", "index"]),
    ],
)
def test_what_is_wrong_is_named(two: RunDir, harm: Callable[[RunDir], None], expected: list[str]) -> None:
    harm(two)
    assert parts(two) == {10: [], 20: expected}
    (found, *_) = glance(two, [name(20)], RUN_ID)[name(20)]
    assert str(two.checkpoint(name(20))) in found.detail


def test_another_run_s_directory_is_all_wrong(two: RunDir) -> None:
    assert parts(two, "other-1234") == {10: ["manifest"], 20: ["manifest"]}


def test_one_that_is_deleted_while_we_look_is_left_out(two: RunDir) -> None:
    names = committed(two)
    shutil.rmtree(two.checkpoint(name(10)))
    assert list(glance(two, names, RUN_ID)) == [name(20)]


def test_one_whose_files_are_replaced_while_we_look_is_looked_at_again(two: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a roll-up ends between our look at the manifest and that at the files."""
    folder, real, looks = two.checkpoint(name(20)), glances.sizes_in, []

    def late(of: object) -> dict[str, int]:
        looks.append(of)
        return {} if looks.count(folder) == 1 and of == folder else real(folder if of == folder else two.checkpoint(name(10)))

    monkeypatch.setattr(glances, "sizes_in", late)
    assert parts(two) == {10: [], 20: []}
    assert looks.count(folder) == 2


def test_a_base_that_is_a_file_is_a_missing_base(run: RunDir) -> None:
    for step, base in ((10, None), (20, name(10))):
        write(run, small_source(step), base=base)
    assert manifests.read(run.checkpoint(name(20))).base_name == name(10)
    shutil.rmtree(run.checkpoint(name(10)))
    run.checkpoint(name(10)).write_bytes(b"")
    assert parts(run) == {20: ["base"]}
