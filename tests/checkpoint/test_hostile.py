"""Foreign and forged files in place of ours: refused as CheckpointDamaged, the part named, in bounded memory."""

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest
import zstandard
from forging import Exploding, forge, refused, write_fields
from snapshots import FIRST, random_bytes, small_source, write

from perdure.training.checkpoint import catalog, manifest
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir


def archive() -> bytes:
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(Exploding()))
        return buffer.getvalue()


FOREIGN = {
    "empty": b"",
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(50),
    "pickle": pickle.dumps(Exploding()),
    "torch zip": archive(),
    "random": random_bytes("foreign", 4096),
    "null": b"null",
    "list": b"[]\n",
    "object": b"{}\n",
    "deep json": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "not unicode": b'{"format":"\xff"}',
    "nothing framed": zstandard.compress(b""),
    "zeros framed": zstandard.compress(bytes(1000)),
}


@pytest.fixture
def folder(run: RunDir) -> Path:
    write(run, small_source())
    return run.checkpoint(FIRST)


@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index", "manifest.json"])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_refused(folder: Path, file: str, what: str) -> None:
    (folder / file).write_bytes(FOREIGN[what])
    detail = refused(folder, "manifest" if file == "manifest.json" else file.rpartition(".")[2])
    assert str(folder) in detail


@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index", "manifest.json"])
@pytest.mark.parametrize("what", ["folder", "pipe", "dangling link", "link to itself"])
def test_what_is_no_regular_file_is_refused_without_waiting_for_it(run: RunDir, folder: Path, file: str, what: str) -> None:
    path = folder / file
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if what == "link to itself" else folder / "nowhere")
    refused(folder, "manifest" if file == "manifest.json" else file.rpartition(".")[2])
    assert all(listed.manifest is None or file != "manifest.json" for listed in catalog.list_checkpoints(run))


@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index"])
def test_links_are_not_followed_even_to_the_right_bytes(folder: Path, file: str) -> None:
    (folder / file).rename(folder.parent / "moved")
    (folder / file).symlink_to(folder.parent / "moved")
    refused(folder, file.rpartition(".")[2])


def test_a_manifest_of_gigabytes_is_refused_unread(folder: Path) -> None:
    with open(folder / "manifest.json", "ab") as file:
        file.truncate(4 << 30)  # sparse
    refused(folder, "manifest")


# forged manifests


def test_the_forger_of_these_tests_makes_manifests_that_pass(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    forge(folder)
    assert (folder / "manifest.json").read_bytes() == before
    forge(folder, code={"commit": "caf\u00e9"}, loss={"mean": 0.25})
    assert verify_folder(folder) == []


NAMES = ["../../../etc/passwd", "/etc/passwd", "rank-00000.pack/../x", "rank-00000.pack\0", "rank-00000.pack\n", "rank-0.pack"]
NAMES += ["rank-0000\u0660.pack", "RANK-00000.pack", "", ".", "manifest.json", "rank-00001.pack", "rank-00000.index"]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_out_of_the_folder_or_to_another_file(folder: Path, name: str) -> None:
    records = json.loads((folder / "manifest.json").read_bytes())["files"]
    records[0]["name"] = name
    forge(folder, files=records)
    assert "names files" in refused(folder, "manifest")


@pytest.mark.parametrize("keep", [[], [0], [1], [1, 0], [0, 1, 0, 1], [0, 1, 0]])
def test_files_left_out_swapped_or_named_twice_are_refused(folder: Path, keep: list[int]) -> None:
    records = json.loads((folder / "manifest.json").read_bytes())["files"]
    forge(folder, files=[records[number] for number in keep], stored_bytes=sum(records[number]["bytes"] for number in keep))
    assert "names files" in refused(folder, "manifest")


ODD: list[Any] = [None, True, -1, 1.5, 10**30, "1", [], {}, ["a"], {"a": 1}]


@pytest.mark.parametrize("field", [field for field in manifest.Manifest.__struct_fields__ if field != "digest"])
def test_no_value_of_a_manifest_field_does_more_than_be_refused(folder: Path, field: str) -> None:
    for value in ODD:
        forge(folder, **{field: value})
        for damage in verify_folder(folder):
            assert damage.part in ("manifest", "index")
    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields[field]
    write_fields(folder, fields)
    if field not in ("base", "milestone", "metrics"):  # absent where there is none
        refused(folder, "manifest")


@pytest.mark.parametrize("depth", [10, 100, 300, *range(700, 1100, 7), 3000, 20_000])
def test_a_manifest_of_any_depth_is_read_or_refused(folder: Path, depth: int) -> None:
    bare = (folder / "manifest.json").read_bytes()
    digest = json.loads(bare)["digest"].encode()
    bare = bare.replace(digest, b"").replace(b'"code":{}', b'"code":' + b'{"a":' * depth + b"1" + b"}" * depth)
    sealed = bare.replace(b'"digest":""', b'"digest":"' + blake3.blake3(bare).hexdigest().encode() + b'"')
    (folder / "manifest.json").write_bytes(sealed)
    assert [damage.part for damage in verify_folder(folder)] in ([], ["manifest"])
    if depth <= 100:
        assert verify_folder(folder) == []


def test_numbers_that_lie_about_the_files_are_refused(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_bytes())
    for field, part in [("raw_bytes", "index"), ("leaves", "index"), ("stored_bytes", "manifest")]:
        forge(folder, **{field: fields[field] + 1})
        assert [damage.part for damage in verify_folder(folder)] == [part]
        forge(folder, **{field: fields[field]})
    forge(folder, state_digest="0" * 64)
    refused(folder, "index")


@pytest.mark.parametrize("size", [0, 1, 1 << 40, 1 << 62, 10**25])
def test_file_sizes_that_lie_are_refused(folder: Path, size: int) -> None:
    for number in (0, 1):
        records = json.loads((folder / "manifest.json").read_bytes())["files"]
        records[number]["bytes"] = size
        forge(folder, files=records, stored_bytes=sum(record["bytes"] for record in records))
        assert verify_folder(folder)[0].part in ("manifest", "index", "pack")


def test_an_index_file_of_terabytes_is_refused_unread(folder: Path) -> None:
    records = json.loads((folder / "manifest.json").read_bytes())["files"]
    records[1]["bytes"] = 1 << 40
    os.truncate(folder / "rank-00000.index", 1 << 40)  # sparse
    forge(folder, files=records, stored_bytes=records[0]["bytes"] + (1 << 40))
    assert "too many" in refused(folder, "index")


def test_any_other_spelling_of_the_same_manifest_is_refused(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_bytes())
    write_fields(folder, fields, indent=1)
    refused(folder, "manifest")
    write_fields(folder, dict(reversed(fields.items())), sort=False)
    refused(folder, "manifest")
    write_fields(folder, {**fields, "surprise": 1})
    refused(folder, "manifest")
    text = manifest.seal(msgspec.convert(fields, manifest.Manifest))
    for spelling in (text[:-1], text + b"\n", b" " + text, text.replace(b'"step":2', b'"step":1,"step":2')):
        (folder / "manifest.json").write_bytes(spelling)
        refused(folder, "manifest")
    (folder / "manifest.json").write_bytes(text)
    assert verify_folder(folder) == []


def test_a_manifest_of_another_checkpoint_is_refused(run: RunDir, folder: Path) -> None:
    write(run, small_source(step=4))
    (folder / "manifest.json").write_bytes(run.manifest(CheckpointName(4, 1)).read_bytes())
    assert "000000000004-0001" in refused(folder, "manifest")


@pytest.mark.parametrize("extra", [{}, {"shards": [1, 2]}, {"files": "elsewhere"}])
def test_a_newer_version_is_named_as_such_and_nothing_is_written(folder: Path, extra: dict[str, Any]) -> None:
    forge(folder, version=manifest.VERSION + 1, **extra)
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    assert "written by a newer version" in refused(folder, "manifest")
    with pytest.raises(CheckpointDamaged) as error:
        open_checkpoint(folder)
    assert error.value.hint == "upgrade perdure"
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before


@pytest.mark.parametrize("version", [0, -1, "1", 1.5, None, True, [1]])
def test_other_versions_and_formats_are_refused(folder: Path, version: Any) -> None:
    forge(folder, version=version)
    refused(folder, "manifest")
    forge(folder, version=1, format="somebody-elses")
    refused(folder, "manifest")
