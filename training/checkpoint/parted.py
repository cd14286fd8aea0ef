"""A run whose nodes share no disk: each has in its directory what it wrote itself, and the whole checkpoint is in the store.

What is here is read here, everything else in ranges from the store. What is missing here is no damage then."""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.run_info import read_run_info, run_store
from perdure.training.checkpoint.source import ByteSource, Extent, FolderSource
from perdure.training.checkpoint.store_source import StoreSource
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir


def holds_parts(run: RunDir) -> bool:
    """Whether checkpoints in this directory need not be whole."""
    try:
        return read_run_info(run).in_parts
    except (CheckpointNotFound, CheckpointDamaged):
        return False


def is_part(run: RunDir, name: CheckpointName) -> bool:
    """Whether this directory has only a part of that checkpoint, and may."""
    try:
        found = manifests.read(run.checkpoint(name))
    except (CheckpointNotFound, CheckpointDamaged):
        return False
    return _lacks_files(found, run.checkpoint(name)) and holds_parts(run)


def _lacks_files(manifest: Manifest, folder: Path) -> bool:
    return any(_size(folder / record.name) != record.bytes for record in manifest.files)


def _size(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return -1


def completed(manifest: Manifest, here: FolderSource, folder: Path) -> ByteSource:
    """The same source, or where the folder may hold a part only, one that has the rest too."""
    if not _lacks_files(manifest, folder) or folder.parent.name != "checkpoints":
        return here
    run = RunDir(folder.parent.parent)
    if not holds_parts(run):
        return here

    def the_rest(count: Callable[[int], object]) -> StoreSource:
        return StoreSource(run_store(run), RunDir.checkpoint_key(manifest.name, ""), count)

    return PartedSource({record.name: record.bytes for record in manifest.files}, here, the_rest)


class PartedSource:
    """The files of a checkpoint, here where they are whole, else in the store, which is opened once it is needed."""

    def __init__(
        self, sizes: dict[str, int], here: FolderSource, the_rest: Callable[[Callable[[int], object]], StoreSource]
    ) -> None:
        self._here, self._open_rest = here, the_rest
        self._is_here = {name: here.size(name) == size for name, size in sizes.items()}
        self._rest: StoreSource | None = None
        self._lock = threading.Lock()
        self.fetched = 0
        """Bytes that were read from the store."""

    def _source(self, file: str) -> ByteSource:
        if self._is_here.get(file):
            return self._here
        with self._lock:
            if self._rest is None:
                self._rest = self._open_rest(self._count)
            return self._rest

    def _count(self, size: int) -> None:
        with self._lock:
            self.fetched += size

    def size(self, file: str) -> int | None:
        return self._source(file).size(file)

    def expect(self, extents: Iterable[Extent]) -> None:
        afar = [extent for extent in extents if not self._is_here.get(extent.file)]
        if afar:
            self._source(afar[0].file).expect(afar)

    def read(self, file: str, offset: int, length: int) -> bytes:
        return self._source(file).read(file, offset, length)

    def read_into(self, file: str, offset: int, out: memoryview) -> int:
        return self._source(file).read_into(file, offset, out)

    def distrust(self, file: str) -> bool:
        was_here, self._is_here[file] = self._is_here.get(file, False), False
        return was_here

    def close(self) -> None:
        self._here.close()
        if self._rest is not None:
            self._rest.close()
