"""An S3 bucket as a store (botocore; imported only when an s3:// URL is opened).

The commit marker is always one small conditional PUT. Ranged reads and ETags are never trusted: callers compare digests."""

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from perdure.training import files
from perdure.training.errors import ObjectNotFound, ObjectTooLarge, StoreError
from perdure.training.storage import s3_errors
from perdure.training.storage.cold import ColdStore
from perdure.training.storage.s3_cold import S3Cold, add_copy
from perdure.training.storage.s3_lane import Lane
from perdure.training.storage.s3_session import new_session
from perdure.training.storage.s3_upload import Upload
from perdure.training.storage.store import (
    MAX_LISTED,
    ObjectInfo,
    Progress,
    ShouldStop,
    StoreSettings,
    UploadInfo,
    Watch,
    check_key,
)
from perdure.training.store_settings import NEED_THAW, s3_url

CONNECTIONS = 32
ATTEMPTS = 4
BODY_ATTEMPTS = 3  # botocore does not retry a body that is cut off
DELETE_BATCH = 1000
STREAM_BYTES = 16 << 20
"""Of one request: what is asked for again through boto3 is in memory at once."""


def _clock(answer: Mapping[str, Any]) -> datetime:  # Any: boto3's answer
    """What the server's clock says."""
    try:
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).astimezone(UTC)
    except (KeyError, ValueError):
        return datetime.now(UTC)


class S3Store:
    """`s3://bucket/prefix`; credentials come from the standard AWS chain (environment, profile, instance)."""

    def __init__(self, bucket: str, prefix: str, settings: StoreSettings) -> None:
        self.bucket = bucket
        self.url = s3_url(bucket, prefix)
        self.part_bytes = settings.part_mib << 20
        self._prefix = f"{prefix}/" if prefix else ""
        self.settings = settings
        self._custom = bool(
            settings.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )
        self.checksums = settings.checksums == "always" or (settings.checksums == "auto" and not self._custom)
        """Whether requests carry S3 checksums."""

    @functools.cached_property
    def client(self) -> Any:  # Any: boto3 builds its clients at run time
        """Explicit time limits: the read limit is also that of a whole part's upload, so it grows with the part."""
        policy: Literal["when_supported", "when_required"] = "when_supported" if self.checksums else "when_required"
        config = Config(
            connect_timeout=5,
            read_timeout=60 + self.settings.part_mib * 4,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=CONNECTIONS,
            request_checksum_calculation=policy,
            response_checksum_validation=policy,
            s3=None if self.settings.addressing == "auto" else {"addressing_style": self.settings.addressing},
        )
        try:
            return self._session.create_client(
                "s3", endpoint_url=self.settings.endpoint_url or None, region_name=self.settings.region or None, config=config
            )
        except BotoCoreError as error:
            raise s3_errors.from_client(error, self.url, self.settings.endpoint_url or "AWS") from None
        except ValueError as error:
            raise StoreError(f"{self.url}: {error}", retryable=False, hint="correct store.endpoint_url") from None

    @functools.cached_property
    def _session(self) -> Any:  # Any: botocore's type stubs are a package of their own
        session = new_session()
        if self.settings.storage_class in NEED_THAW:
            session.register("creating-client-class.s3", add_copy)
        with s3_errors.credentials_explained(self.url):
            session.get_credentials()
        return session

    @functools.cached_property
    def _lane(self) -> Lane:
        client, keys, trusted = self.client, self._session.get_credentials(), self._session.get_config_variable("ca_bundle")
        return Lane(client, keys, self.bucket, checksums=self.checksums, ca_bundle=trusted)

    @functools.cached_property
    def _on_write(self) -> dict[str, str]:
        """What every new object gets."""
        wanted = {
            "ServerSideEncryption": self.settings.sse,
            "SSEKMSKeyId": self.settings.sse_kms_key,
            "Tagging": urlencode(self.settings.tags),
        }
        return {name: value for name, value in wanted.items() if value}

    def _where(self, key: str) -> str:
        return f"s3://{self.bucket}/{self._prefix}{key}"

    @property
    def _endpoint(self) -> str:
        parts = urlsplit(self.client.meta.endpoint_url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def raw(self, operation: str, key: str, **arguments: Any) -> Any:  # Any: boto3's own arguments and answers
        """One request; ClientError is left to the caller, a lost connection becomes StoreError."""
        files.fail_point(f"s3:{operation}", key)
        client = self.client
        if (keys := self._session.get_credentials()) is not None:
            with s3_errors.credentials_explained(self._where(key)):
                keys.get_frozen_credentials()  # renewed here when they are about to expire
        try:
            return getattr(client, operation)(Bucket=self.bucket, **arguments)
        except BotoCoreError as error:
            raise s3_errors.from_client(error, self._where(key), self._endpoint) from error

    def write(self, operation: str, key: str, **arguments: Any) -> Any:  # Any: as `raw`
        """The request that makes an object, as the settings want it."""
        return self.raw(operation, key, Key=self.full_key(key), **self._on_write, **arguments)

    def _check_encrypted(self, key: str, answer: Mapping[str, Any]) -> None:  # Any: boto3's answer
        """A server that does not know encryption may store all the same."""
        done = answer.get("ServerSideEncryption", "")
        if self.settings.sse and done != self.settings.sse:
            raise StoreError(
                f"{self._where(key)} was stored, but {self._endpoint} did not encrypt it with {self.settings.sse}",
                retryable=False,
                hint="use a server that does, or leave store.sse out; delete the object if nobody may read it",
            )

    def explain(self, error: ClientError, key: str) -> StoreError:
        return s3_errors.from_answer(error, self._where(key), self._endpoint, checksums=self.checksums, settings=self.settings)

    def _call(self, operation: str, key: str, **arguments: Any) -> Any:  # Any: as `raw`
        try:
            return self.raw(operation, key, **arguments)
        except ClientError as error:
            raise self.explain(error, key) from error

    def full_key(self, key: str) -> str:
        return self._prefix + check_key(key)

    @property
    def cold(self) -> ColdStore:
        return S3Cold(self, self.settings.storage_class, self._on_write)

    @property
    def file_class(self) -> dict[str, str]:
        """The class that a file is put in; one that has to be thawed comes after the proof (s3_cold.py)."""
        wanted = self.settings.storage_class
        return {"StorageClass": wanted} if wanted and wanted not in NEED_THAW else {}

    # writing
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        return self._put(key, data, {"IfNoneMatch": "*"} if if_absent else {})

    def _put(self, key: str, data: bytes, arguments: Mapping[str, str]) -> bool:
        if_absent = "IfNoneMatch" in arguments
        for attempt in range(ATTEMPTS):
            try:
                self._check_encrypted(key, self.write("put_object", key, Body=data, **arguments))
                return True
            except ClientError as error:
                if if_absent and s3_errors.status_of(error) == 412:
                    return s3_errors.was_retried(error) and self._is_ours(key, data)
                if s3_errors.status_of(error) != 409 or attempt == ATTEMPTS - 1:
                    raise self.explain(error, key) from error
                time.sleep(0.1 * 2**attempt)  # AWS: another conditional write of this key is in progress
        raise AssertionError("unreachable")

    def _is_ours(self, key: str, data: bytes) -> bool:
        """The answer to our own first try was lost on the way if the object holds exactly our bytes."""
        try:
            return self.get(key, limit=len(data)) == data
        except StoreError as error:
            if error.retryable:
                raise
            return False

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        watch: Watch | None = None,
        progress: Progress | None = None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        size = path.stat().st_size
        if size > self.part_bytes:
            Upload(self, key, path, watch=watch, progress=progress, should_stop=should_stop).run()
            if self.settings.sse:
                self._check_encrypted(key, self.head(key) or {})
            return
        data = path.read_bytes()
        if watch:
            watch(data)
        if self._on_write or self.file_class or self.send(key, data) is None:
            self._put(key, data, self.file_class)
        if progress:
            progress(size)

    def send(self, key: str, data: bytes, **part: str | int) -> str | None:
        """Store the body of a file, or a part of it, by the quick lane: its ETag, or None where that does not work."""
        files.fail_point("s3:upload_part" if part else "s3:put_object", key)
        return self._lane.put(self.full_key(key), data, part)

    # reading
    def _read(self, key: str, limit: int, **arguments: Any) -> tuple[bytes, Any]:  # Any: as `raw`
        """At most `limit` + 1 bytes of the body and the answer's fields; a cut body is asked for again."""
        for attempt in range(BODY_ATTEMPTS):
            answer = self._call("get_object", key, Key=self.full_key(key), **arguments)
            expected = min(int(answer["ContentLength"]), limit + 1)
            try:
                with answer["Body"] as body:
                    data: bytes = body.read(expected)
                if len(data) == expected:  # botocore itself does not notice that a read with a limit came up short
                    return data, answer
                problem = StoreError(f"{self._where(key)}: the answer of {self._endpoint} ended early")
            except BotoCoreError as error:
                problem = s3_errors.from_client(error, self._where(key), self._endpoint)
            if attempt == BODY_ATTEMPTS - 1:
                raise problem
        raise AssertionError("unreachable")

    def get(self, key: str, *, limit: int) -> bytes:
        quick = self._lane.get(self.full_key(key), limit)
        if quick is not None:
            return quick
        data, _ = self._read(key, limit)
        if len(data) > limit:
            raise ObjectTooLarge(f"{self._where(key)} is larger than {limit} bytes")
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytearray:
        out, at = bytearray(length), 0
        for data in self.stream(key, offset, length):
            out[at : at + len(data)] = data
            at += len(data)
        return out

    def stream(self, key: str, offset: int, length: int) -> Iterator[memoryview]:
        full, end = self.full_key(key), offset + length
        while offset < end:
            following = min(offset + STREAM_BYTES, end)
            for data in self._lane.stream(full, offset, following - offset):
                offset += len(data)
                yield data
            if offset < following:
                yield memoryview(self._get_range(key, offset, following - offset))
                offset = following

    def _get_range(self, key: str, offset: int, length: int) -> bytes:
        try:
            data, answer = self._read(key, length, Range=f"bytes={offset}-{offset + length - 1}")
        except ObjectNotFound:
            raise
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, ClientError) and s3_errors.status_of(cause) == 416:
                raise StoreError(f"{self._where(key)} ends before byte {offset + length}", retryable=False) from None
            raise
        whole = "ContentRange" not in answer and offset == 0
        if len(data) != length or not (whole or str(answer.get("ContentRange", "")).startswith(f"bytes {offset}-")):
            raise StoreError(f"{self._where(key)} did not give bytes {offset} to {offset + length - 1}", retryable=False)
        return data

    def head(self, key: str) -> dict[str, Any] | None:  # Any: boto3's answer
        try:
            answer: dict[str, Any] = self.raw("head_object", key, Key=self.full_key(key))
            return answer
        except ClientError as error:
            if s3_errors.is_missing(error):
                return None
            raise self.explain(error, key) from error

    def size(self, key: str) -> int | None:
        answer = self.head(key)
        return None if answer is None else int(answer["ContentLength"])

    # listing and deleting
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All pages, then sorted: not every server lists in the order of whole keys."""
        found: list[ObjectInfo] = []
        token: str | None = None
        while True:
            more = {"ContinuationToken": token} if token else {}
            page = self._call("list_objects_v2", prefix, Prefix=self._prefix + prefix, **more)
            now = _clock(page)
            for item in page.get("Contents", ()):
                if not item["Key"].startswith(self._prefix + prefix):
                    raise StoreError(f"{self._where(prefix)}: {self._endpoint} lists keys of other prefixes", retryable=False)
                age = (now - item.get("LastModified", now)).total_seconds()
                key, storage_class = item["Key"][len(self._prefix) :], str(item.get("StorageClass", ""))
                found.append(ObjectInfo(key, int(item["Size"]), age, storage_class))
            before, token = token, page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                break
            if token == before or len(found) > MAX_LISTED:
                raise StoreError(f"{self._where(prefix)}: the listing does not end", retryable=False)
        yield from sorted(found, key=lambda info: info.key.encode())

    def delete(self, keys: Sequence[str]) -> None:
        refused: list[str] = []
        for start in range(0, len(keys), DELETE_BATCH):
            batch = [{"Key": self.full_key(key)} for key in keys[start : start + DELETE_BATCH]]
            answer = self._call("delete_objects", keys[start], Delete={"Objects": batch, "Quiet": True})
            for error in answer.get("Errors", ()):  # a refused delete is HTTP 200
                refused.append(f"{str(error.get('Key'))[len(self._prefix) :]} ({error.get('Code')})")
        if refused:
            message = f"{self.url}: {len(refused)} of {len(keys)} objects were not deleted: {'; '.join(refused[:5])}"
            raise StoreError(message, retryable=False, hint="the key needs s3:DeleteObject for this")

    def uploads_of(self, prefix: str) -> Iterator[dict[str, Any]]:  # Any: boto3's answer
        """Unfinished multipart uploads, newest page order as the server gives it."""
        marker: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", prefix, Prefix=self._prefix + prefix, **marker)
            now = _clock(page)
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(self._prefix + prefix):
                    yield {**item, "Age": (now - item["Initiated"]).total_seconds()}
            following = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            before, marker = marker, {name: value for name, value in following.items() if value}
            if not page.get("IsTruncated") or not marker or marker == before:
                return

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        for item in self.uploads_of(prefix):
            yield UploadInfo(item["Key"][len(self._prefix) :], item["UploadId"], item["Age"])

    def abort_uploads(self, prefix: str, older_than_secs: float) -> int:
        old = [upload for upload in self.list_uploads(prefix) if upload.age_secs >= older_than_secs]
        for upload in old:
            self.abort(upload.key, upload.upload_id)
        return len(old)

    def abort(self, key: str, upload_id: str) -> None:
        try:
            self.raw("abort_multipart_upload", key, Key=self._prefix + key, UploadId=upload_id)
        except ClientError as error:
            if s3_errors.code_of(error) != "NoSuchUpload":
                raise self.explain(error, key) from error
