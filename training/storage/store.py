"""ObjectStore: what Perdure asks of a place for copies, the same for a folder and an S3 bucket; and the rules on keys.

An object is there whole or not there; `put(..., if_absent=True)` has exactly one winner."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from perdure.training import files
from perdure.training.errors import ConfigError, StoreError
from perdure.training.storage.cold import ColdStore
from perdure.training.store_settings import StoreSettings as StoreSettings

MAX_KEY = 900
MAX_SEGMENT = 200  # of 255 bytes; the rest is for the temporary name beside it
MAX_LISTED = 1_000_000
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")
Progress = Callable[[int], None]
"""Called with the number of bytes that were just moved."""
ShouldStop = Callable[[], bool]
Watch = Callable[[bytes], None]
"""Called with the bytes of a file, in order, before they are sent. What it raises ends the transfer, and no object appears."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int
    age_secs: float
    """By the store's own clock; of a folder by this machine's."""
    storage_class: str = ""
    """S3's word for it; empty of a folder, and of a server that says none."""


@dataclass(frozen=True)
class UploadInfo:
    """An upload that was begun and neither finished nor aborted; it is no object, but it takes room."""

    key: str
    upload_id: str
    age_secs: float
    """By the store's own clock."""


class TransferStopped(StoreError):
    """Asked to stop between two parts; what was sent stays, and the next try goes on from it."""


class ObjectStore(Protocol):
    """Keys are relative to `url`. Everything raises StoreError; ObjectNotFound where a key that is read is missing."""

    @property
    def url(self) -> str: ...

    @property
    def settings(self) -> StoreSettings:
        """How it is reached."""
        ...

    @property
    def cold(self) -> ColdStore | None:
        """For classes that have to be thawed; None where there are none."""
        ...

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small object. With `if_absent`, False (and nothing changed) when there is one already."""
        ...

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        watch: Watch | None = None,
        progress: Progress | None = None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        """Store a file of any size, read once. Killed or stopped on the way, no object appears and the next call goes on."""
        ...

    def get(self, key: str, *, limit: int) -> bytes:
        """A small object; ObjectTooLarge when it is larger than `limit`."""
        ...

    def get_range(self, key: str, offset: int, length: int) -> bytes | bytearray:
        """Exactly these bytes, or StoreError. No store checks a part of an object: compare your own digest."""
        ...

    def stream(self, key: str, offset: int, length: int) -> Iterator[memoryview]:
        """As `get_range`, in pieces as they arrive; each is gone when the next is asked for."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of the object, None when there is none."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, sorted by key."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are fine. StoreError names what was refused."""
        ...

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        """Unfinished uploads under `prefix`."""
        ...

    def abort_uploads(self, prefix: str, older_than_secs: float) -> int:
        """Drop unfinished uploads under `prefix` that are at least this old; returns how many."""
        ...


def check_key(key: str) -> str:
    """`key` itself when it is a plain relative name. Keys may come from a hostile listing or manifest."""
    segments = key.split("/")
    problem = ""
    if not key or any(not segment for segment in segments):
        problem = "has an empty part"
    elif any(segment in (".", "..") for segment in segments):
        problem = "has a . or .. part"
    elif _CONTROL.search(key):
        problem = "has a control character"
    elif "\\" in key:  # some servers make a slash of it
        problem = "has a backslash"
    elif any(files.is_temporary(segment) for segment in segments):
        problem = "looks like a temporary file"
    elif len(key.encode()) > MAX_KEY or any(len(segment.encode()) > MAX_SEGMENT for segment in segments):
        problem = f"is longer than {MAX_KEY} bytes, or a part of it than {MAX_SEGMENT}"
    if problem:
        raise StoreError(f"key {key[:200]!r} {problem}", retryable=False, hint="use plain relative names")
    return key


def is_plain_key(key: str) -> bool:
    try:
        return bool(check_key(key))
    except StoreError:
        return False


def check_file_size(path: Path, expected: int, found: int) -> None:
    if expected != found:
        raise StoreError(f"{path} changed from {expected} to {found} bytes while it was copied", retryable=False)


def open_store(url: str, settings: StoreSettings | None = None) -> ObjectStore:
    """The store at `file:///folder` or `s3://bucket/prefix`. Opening contacts nobody."""
    parts = urlsplit(url)
    whole = "?" not in url and "#" not in url
    if whole and parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        from perdure.training.storage.folder import FolderStore

        return FolderStore(Path(unquote(parts.path)))
    if whole and parts.scheme == "s3" and parts.netloc:
        return _open_s3(parts.netloc, unquote(parts.path).strip("/"), settings or StoreSettings())
    raise ConfigError(
        f"store URL {url!r} is not a store", "use file:///absolute/folder or s3://bucket/prefix; %23 for #, %3F for ?"
    )


def _open_s3(bucket: str, prefix: str, settings: StoreSettings) -> ObjectStore:
    try:
        from perdure.training.storage.s3 import S3Store
    except ModuleNotFoundError as error:
        raise ConfigError(f"s3:// stores need {error.name}, which is not installed", "pip install 'perdure[s3]'") from None
    if prefix:
        check_key(prefix)
    return S3Store(bucket, prefix, settings)
