"""One multipart upload: parts read from the file and sent a few at a time; a killed one is found again and gone on with.

A part that is there already counts only when its size and MD5 are those of our bytes."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from perdure.training.errors import CheckpointDamaged, StoreError
from perdure.training.storage import s3_errors
from perdure.training.storage.parallel import PARTS, in_order, ranges
from perdure.training.storage.store import Progress, ShouldStop, TransferStopped, Watch, check_file_size
from perdure.training.store_settings import NEED_THAW

if TYPE_CHECKING:
    from perdure.training.storage.s3 import S3Store

MAX_PARTS = 10_000
_START_AGAIN = {"InvalidPart", "InvalidPartOrder", "NoSuchUpload"}
Stored = dict[int, tuple[int, str]]
"""Part number -> size and ETag, as the server lists them."""


class _Broken(Exception):
    """This upload cannot be finished (parts or the upload are gone); a fresh one can."""


class Upload:
    """`run` returns when the object is there with the right size."""

    def __init__(
        self,
        store: "S3Store",
        key: str,
        path: Path,
        *,
        watch: Watch | None,
        progress: Progress | None,
        should_stop: ShouldStop | None,
    ) -> None:
        self._store, self._key, self._path = store, key, path
        self._watch, self._progress, self._should_stop = watch, progress, should_stop
        self._size = path.stat().st_size
        self._part = max(store.part_bytes, -(-self._size // MAX_PARTS))
        self._id = ""
        self._fd = -1
        self._seen = 0
        """Bytes that were watched: a second attempt shows none twice."""

    def run(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                self._attempt(*self._earlier())
            except _Broken:
                self._abort()
                self._attempt("", {})
        except _Broken as error:
            self._abort()
            raise self._explained(error) from error.__cause__
        except TransferStopped:
            raise
        except CheckpointDamaged:  # whoever watches found it
            self._abort()
            raise
        except (StoreError, OSError) as error:
            if not getattr(error, "retryable", False):  # else the parts wait for the next try
                self._abort()
            raise
        finally:
            os.close(self._fd)

    def _explained(self, broken: _Broken) -> StoreError:
        cause = broken.__cause__
        assert isinstance(cause, ClientError)
        return self._store.explain(cause, self._key)

    def _attempt(self, upload_id: str, stored: Stored) -> None:
        self._id = upload_id or self._create()
        parts: list[dict[str, Any]] = []  # Any: boto3's shape of a part
        for part in in_order(lambda item: self._send(*item, stored), self._read(), width=PARTS):
            parts.append({"PartNumber": part[0], "ETag": part[1]})
            if self._progress:
                self._progress(part[2])
        check_file_size(self._path, self._size, os.fstat(self._fd).st_size)
        self._complete(parts)

    def _read(self) -> Iterator[tuple[int, bytes]]:
        """Each part by number, in order and once: whoever watches sees the bytes that are sent."""
        for number, (offset, length) in enumerate(ranges(self._size, self._part), start=1):
            if self._should_stop and self._should_stop():
                raise TransferStopped(f"upload of {self._key} to {self._store.url} stopped on request; the next push goes on")
            data = os.pread(self._fd, length, offset)
            check_file_size(self._path, length, len(data))
            if self._watch and offset >= self._seen:
                self._watch(data)
                self._seen = offset + length
            yield number, data

    def _earlier(self) -> tuple[str, Stored]:
        """Our own upload of this key that was cut off, newest first, with the parts it has."""
        try:
            full = self._store.full_key(self._key)
            found = [
                item
                for item in self._store.uploads_of(self._key)
                if item["Key"] == full and item.get("StorageClass") not in NEED_THAW  # a copy in place that was cut off
            ]
            for item in sorted(found, key=lambda item: float(item["Age"])):
                return str(item["UploadId"]), self._parts_of(str(item["UploadId"]))
        except StoreError as error:
            if error.retryable:
                raise
        return "", {}  # also where the key may not list uploads

    def _parts_of(self, upload_id: str) -> Stored:
        stored: Stored = {}
        marker: dict[str, int] = {}
        while True:
            try:
                page = self._store.raw(
                    "list_parts", self._key, Key=self._store.full_key(self._key), UploadId=upload_id, **marker
                )
            except ClientError as error:
                raise self._store.explain(error, self._key) from error
            for part in page.get("Parts", ()):
                stored[int(part["PartNumber"])] = (int(part["Size"]), str(part["ETag"]))
            following = int(page.get("NextPartNumberMarker") or 0)
            if not page.get("IsTruncated") or following <= marker.get("PartNumberMarker", 0):
                return stored
            marker = {"PartNumberMarker": following}

    def _create(self) -> str:
        checksum = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if self._store.checksums else {}
        try:
            answer = self._store.write("create_multipart_upload", self._key, **self._store.file_class, **checksum)
            return str(answer["UploadId"])
        except ClientError as error:
            raise self._store.explain(error, self._key) from error

    def _send(self, number: int, data: bytes, stored: Stored) -> tuple[int, str, int]:
        size, etag = stored.get(number, (0, ""))
        if size == len(data) and etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest():
            return number, etag, size
        quick = self._store.send(self._key, data, uploadId=self._id, partNumber=number)
        if quick is not None:
            return number, quick, len(data)
        checksum = {"ChecksumAlgorithm": "CRC32"} if self._store.checksums else {}
        answer = self._raw("upload_part", UploadId=self._id, PartNumber=number, Body=data, **checksum)
        return number, str(answer["ETag"]), len(data)

    def _raw(self, operation: str, **arguments: Any) -> Any:  # Any: boto3's own arguments and answers
        try:
            return self._store.raw(operation, self._key, Key=self._store.full_key(self._key), **arguments)
        except ClientError as error:
            if s3_errors.code_of(error) in _START_AGAIN:
                raise _Broken from error
            raise self._store.explain(error, self._key) from error

    def _complete(self, parts: list[dict[str, Any]]) -> None:  # Any: as in _attempt
        """A lost or wrong answer to "complete" is settled by looking: a new object of the right size is what we wanted."""
        before = self._state()
        try:
            self._raw("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})
        except (_Broken, StoreError):
            after = self._state()
            if after is None or after == before or after[0] != self._size:
                raise
            return
        after = self._state()
        if after is None or after[0] != self._size:
            found = "nothing" if after is None else f"{after[0]} bytes"
            raise StoreError(f"{self._store.url}/{self._key}: completed with {self._size} bytes, but there is {found}")

    def _state(self) -> tuple[int, str, str] | None:
        """Size, and what changes when the object is replaced."""
        answer = self._store.head(self._key)
        if answer is None:
            return None
        return int(answer["ContentLength"]), str(answer.get("ETag")), str(answer.get("LastModified"))

    def _abort(self) -> None:
        """Parts cost money until they are dropped. Best effort: `abort_uploads` sweeps what stays."""
        if self._id:
            with contextlib.suppress(StoreError):
                self._store.abort(self._key, self._id)
