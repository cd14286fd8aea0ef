"""A folder as a store (a mounted share, a second disk): every object one file, written by rename or exclusive link."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from perdure.training import files
from perdure.training.errors import ObjectNotFound, ObjectTooLarge, StoreError
from perdure.training.storage.parallel import ranges
from perdure.training.storage.store import (
    MAX_LISTED,
    ObjectInfo,
    Progress,
    ShouldStop,
    StoreSettings,
    TransferStopped,
    UploadInfo,
    Watch,
    check_file_size,
    check_key,
    is_plain_key,
)

COPY_BYTES = 4 << 20
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_FINAL = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR)


@contextlib.contextmanager
def _explained(what: str, path: Path) -> Iterator[None]:
    """Turn the disk's errors into the store's."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in _ABSENT and what == "read":
            raise ObjectNotFound(f"{path} does not exist in the store folder") from None
        hint = (
            "make room on the store's disk"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "check the folder and its rights"
        )
        message = f"store folder: cannot {what} {path}: {error.strerror}"
        raise StoreError(message, retryable=error.errno not in _FINAL, hint=hint) from error


class FolderStore:
    """`file:///folder`."""

    cold = None
    settings = StoreSettings()

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = root.as_uri()

    def _path(self, key: str) -> Path:
        return self._below(check_key(key))

    def _below(self, key: str) -> Path:
        at = self.root
        for part in filter(None, key.split("/")):
            at = at / part
            _refuse_link(at)
        return at

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        path = self._path(key)
        with _explained("write", path):
            files.make_dirs(path.parent)
            if if_absent:
                return files.create_exclusively(path, data)
            files.write_atomically(path, data)
            return True

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        watch: Watch | None = None,
        progress: Progress | None = None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        target = self._path(key)
        with _explained("write", target), open(path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            files.make_dirs(target.parent)
            with files.NewFile(target) as new:
                for offset, length in ranges(size, COPY_BYTES):
                    if should_stop and should_stop():
                        raise TransferStopped(f"copy to {target} stopped on request; the next push starts it again")
                    data = os.pread(source.fileno(), length, offset)
                    if watch:
                        watch(data)
                    new.write(data)
                    if progress:
                        progress(length)
                check_file_size(path, size, new.size)
                new.commit()

    def get(self, key: str, *, limit: int) -> bytes:
        path = self._path(key)
        with _explained("read", path):
            try:
                return files.read_limited(path, limit)
            except ValueError as error:
                raise ObjectTooLarge(f"store folder: {error}") from None

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        path = self._path(key)
        with _explained("read", path), open(path, "rb") as file:
            data = os.pread(file.fileno(), length, offset)
        if len(data) != length:
            raise StoreError(f"{path} ends before byte {offset + length}", retryable=False)
        return data

    def stream(self, key: str, offset: int, length: int) -> Iterator[memoryview]:
        for at, size in ranges(length, COPY_BYTES):
            yield memoryview(self.get_range(key, offset + at, size))

    def size(self, key: str) -> int | None:
        path = self._path(key)
        with _explained("look at", path):
            try:
                return path.stat().st_size if path.is_file() else None
            except FileNotFoundError:
                return None

    def _walk(self, prefix: str, *, temporary: bool) -> Iterator[tuple[str, Path]]:
        parent = prefix.rpartition("/")[0]
        if parent and not is_plain_key(parent):
            raise StoreError(f"prefix {prefix[:200]!r} leaves the store", retryable=False)
        for folder, folders, names in os.walk(self._below(parent), onerror=_unless_missing):
            for path in (Path(folder, name) for name in (*folders, *names)):
                _refuse_link(path)
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.root).as_posix()
                if key.startswith(prefix) and files.is_temporary(name) == temporary:
                    yield key, path

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []
        with _explained("list", self.root / prefix):
            for key, path in self._walk(prefix, temporary=False):
                with contextlib.suppress(FileNotFoundError):
                    about = path.stat()
                    found.append(ObjectInfo(key, about.st_size, time.time() - about.st_mtime))
                if len(found) > MAX_LISTED:
                    raise StoreError(f"{self.url} holds more than {MAX_LISTED} objects under {prefix!r}", retryable=False)
        yield from sorted(found, key=lambda info: info.key.encode(errors="surrogateescape"))

    def delete(self, keys: Sequence[str]) -> None:
        refused: dict[str, OSError] = {}
        for key in keys:
            try:
                files.remove(self._path(key))
            except StoreError:
                raise
            except OSError as error:
                refused[key] = error
        if refused:
            reasons = "; ".join(f"{key} ({error.strerror})" for key, error in list(refused.items())[:5])
            raise StoreError(f"{self.url}: {len(refused)} of {len(keys)} objects were not deleted: {reasons}", retryable=False)

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        """Temporary files: the copies that were cut off."""
        with _explained("list", self.root / prefix):
            for key, path in self._walk(prefix, temporary=True):
                with contextlib.suppress(FileNotFoundError):
                    yield UploadInfo(key, str(path), time.time() - path.stat().st_mtime)

    def abort_uploads(self, prefix: str, older_than_secs: float) -> int:
        old = [upload for upload in self.list_uploads(prefix) if upload.age_secs >= older_than_secs]
        for upload in old:
            with _explained("delete", Path(upload.upload_id)):
                files.remove(Path(upload.upload_id))
        return len(old)


def _refuse_link(path: Path) -> None:
    """The root itself may be a link, which the user chose; below it somebody else may have put one, to anywhere."""
    if os.path.islink(path):
        raise StoreError(
            f"store folder: {path} is a symbolic link, which may lead out of the store",
            retryable=False,
            hint="take it away, or put what it names there itself; the folder of the store may be a link",
        )


def _unless_missing(error: OSError) -> None:
    if error.errno != errno.ENOENT:
        raise error
