"""Storage classes: sent with files only; one that has to be thawed is entered after the proof; unknown ones are named."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import S3Server
from storage.proxy import Reply, proxy_to

from perdure.training.errors import StoreError
from perdure.training.storage import s3_cold
from perdure.training.storage.s3 import S3Store

PART = 5 << 20
OpenS3 = Callable[..., S3Store]


@pytest.fixture
def sizes(tmp_path: Path) -> dict[str, Path]:
    """A file that goes in one request, and one that goes in parts."""
    paths = {"small": tmp_path / "small", "big": tmp_path / "big"}
    paths["small"].write_bytes(b"x")
    paths["big"].write_bytes(bytes(range(256)) * (PART // 256) + b"end")
    return paths


def classes(store: S3Store) -> dict[str, str]:
    listed = store.client.list_objects_v2(Bucket=store.bucket, Prefix=store.full_key("x")[:-1])["Contents"]
    for item in listed:
        head = store.head(item["Key"].removeprefix(store.full_key("x")[:-1]))
        assert head is not None
        assert head.get("StorageClass", "STANDARD") == item["StorageClass"]
    return {item["Key"].rpartition("/")[2]: item["StorageClass"] for item in listed}


def test_files_get_the_class_and_small_objects_stay_standard(open_s3: OpenS3, sizes: dict[str, Path]) -> None:
    store = open_s3(storage_class="STANDARD_IA", tags={"team": "nlp"})
    for name, path in sizes.items():
        store.put_file(name, path)
        assert store.cold.settle(name, "blake3:0") == "", "it can be read as it is"
    store.put("manifest", b"{}", if_absent=True)
    assert classes(store) == {"small": "STANDARD_IA", "big": "STANDARD_IA", "manifest": "STANDARD"}


def test_a_class_that_has_to_be_thawed_is_entered_by_a_copy_in_place(
    open_s3: OpenS3, sizes: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_cold, "LARGEST_COPY", PART)  # of 5 GiB: more is copied in parts
    monkeypatch.setattr(s3_cold, "_PART", PART)
    store = open_s3(storage_class="DEEP_ARCHIVE", tags={"team": "nlp"}, sse="AES256")
    for name, path in sizes.items():
        store.put_file(name, path)
        assert store.cold.settled_in(name, "blake3:1") == ""
        assert store.cold.settle(name, "blake3:1") == "DEEP_ARCHIVE"
        assert store.cold.settled_in(name, "blake3:1") == "DEEP_ARCHIVE"
        assert store.cold.settled_in(name, "blake3:2") == "", "proven to be something else"
        assert store.get_range(name, 0, 1) == path.read_bytes()[:1]
        about = store.head(name)
        assert about is not None
        assert about["ServerSideEncryption"] == "AES256"
        tags = store.raw("get_object_tagging", name, Key=store.full_key(name))["TagSet"]
        assert tags == [{"Key": "team", "Value": "nlp"}]
    assert store.get("big", limit=2 * PART) == sizes["big"].read_bytes()
    assert classes(store) == {"small": "DEEP_ARCHIVE", "big": "DEEP_ARCHIVE"}


def test_a_copy_in_place_that_was_cut_off_is_no_upload_to_go_on_with(
    open_s3: OpenS3, sizes: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, listed = open_s3(storage_class="DEEP_ARCHIVE"), S3Store.uploads_of
    left = store.write("create_multipart_upload", "big", StorageClass="DEEP_ARCHIVE", Metadata={"perdure-digest": "blake3:1"})

    def as_aws(self: S3Store, prefix: str) -> Iterator[dict[str, Any]]:
        """This server's listing does not say the class."""
        return ({**item, "StorageClass": "DEEP_ARCHIVE"} for item in listed(self, prefix))

    monkeypatch.setattr(S3Store, "uploads_of", as_aws)
    store.put_file("big", sizes["big"])
    assert store.cold.settled_in("big", "blake3:1") == "", "nobody has proven these bytes"
    assert [item.upload_id for item in store.list_uploads("big")] == [left["UploadId"]]


def test_a_class_that_the_server_does_not_know_is_one_sentence(
    open_s3: OpenS3, s3_keys: S3Server, sizes: dict[str, Path]
) -> None:
    with pytest.raises(StoreError, match="InvalidStorageClass") as caught:
        open_s3(storage_class="FRIDGE").put_file("x", sizes["small"])
    assert 'has no class "FRIDGE": correct storage_class' in caught.value.hint
    assert not caught.value.retryable
    with proxy_to(s3_keys.endpoint) as proxy:
        store = open_s3(endpoint=proxy.endpoint, storage_class="GLACIER")
        store.put_file("x", sizes["small"])
        proxy.rule = lambda seen: Reply(answer_headers={"x-amz-storage-class": "STANDARD"}) if seen.method == "HEAD" else None
        with pytest.raises(StoreError, match="copied into the class GLACIER, but does not lie there"):
            store.cold.settle("x", "blake3:1")
        proxy.rule = lambda seen: Reply(501, "NotImplemented") if "x-amz-copy-source" in seen.headers else None
        with pytest.raises(StoreError, match="NotImplemented") as refused:
            store.cold.settle("x", "blake3:2")
        assert 'storage_class = "GLACIER"' in refused.value.hint
