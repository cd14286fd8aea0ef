"""S3's storage classes that have to be thawed: an object is moved there once it is proven, asked back, and looked at."""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from perdure.training.errors import ObjectNotFound, StoreError
from perdure.training.storage import s3_errors
from perdure.training.storage.cold import Access, Speed
from perdure.training.store_settings import NEED_THAW

if TYPE_CHECKING:
    from perdure.training.storage.s3 import S3Store

LARGEST_COPY = 5 << 30
"""Bytes that one request may copy; more is copied in parts."""
_PART = 1 << 30
_PROOF = "perdure-digest"
"""In an object's metadata: what its bytes were proven to be before it was moved."""


def add_copy(**client_class: Any) -> None:  # Any: botocore's event
    """Gives a client that is being made boto3's `copy`."""
    from boto3.s3.inject import inject_s3_transfer_methods

    inject_s3_transfer_methods(**client_class)


class S3Cold:
    def __init__(self, store: "S3Store", storage_class: str, on_write: Mapping[str, str]) -> None:
        self._store, self._on_write = store, on_write
        self._class = storage_class if storage_class in NEED_THAW else ""

    def settle(self, key: str, digest: str) -> str:
        """Copied in place by the server: what has to be thawed cannot be read back, so the proof came before."""
        if self._class and self.settled_in(key, digest) != self._class:
            self._copy(key, digest)
            if self.settled_in(key, digest) != self._class:
                raise StoreError(
                    f"{self._store.url}/{key} was copied into the class {self._class}, but does not lie there",
                    retryable=False,
                    hint="leave storage_class out: the server does not know classes",
                )
        return self._class

    def _copy(self, key: str, digest: str) -> None:
        from boto3.s3.transfer import TransferConfig

        full = self._store.full_key(key)
        wanted = {"StorageClass": self._class, "MetadataDirective": "REPLACE", "Metadata": {_PROOF: digest}, **self._on_write}
        if "Tagging" in wanted:
            wanted["TaggingDirective"] = "REPLACE"
        try:
            self._store.raw(
                "copy",
                key,
                Key=full,
                CopySource={"Bucket": self._store.bucket, "Key": full},
                ExtraArgs=wanted,
                Config=TransferConfig(multipart_threshold=LARGEST_COPY, multipart_chunksize=_PART),
            )
        except ClientError as error:
            raise self._store.explain(error, key) from error

    def settled_in(self, key: str, digest: str) -> str:
        head = self._store.head(key) or {}
        return str(head["StorageClass"]) if _is_cold(head) and head.get("Metadata", {}).get(_PROOF) == digest else ""

    def access(self, key: str) -> Access:
        head = self._store.head(key)
        if head is None:
            raise ObjectNotFound(f"{self._store.url}/{key} does not exist")
        restore = str(head.get("Restore", ""))
        if not _is_cold(head):
            return Access(state="readable")
        if 'ongoing-request="false"' in restore:
            return Access(state="readable", until=_expiry(restore))
        return Access(state="thawing" if restore else "frozen")

    def thaw(self, key: str, days: int, speed: Speed) -> None:
        wanted = {"Days": days, "GlacierJobParameters": {"Tier": speed}}
        try:
            self._store.raw("restore_object", key, Key=self._store.full_key(key), RestoreRequest=wanted)
        except ClientError as error:
            if s3_errors.code_of(error) != "RestoreAlreadyInProgress":
                raise self._store.explain(error, key) from error


def _is_cold(head: Mapping[str, Any]) -> bool:  # Any: boto3's answer
    return head.get("StorageClass") in NEED_THAW


def _expiry(restore: str) -> float:
    match = re.search(r'expiry-date="([^"]+)"', restore)
    try:
        return parsedate_to_datetime(match[1]).timestamp() if match else 0.0
    except ValueError:
        return 0.0
