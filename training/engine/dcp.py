"""Storage for torch.distributed.checkpoint in Perdure's format: `dcp.save(state, storage_writer=PerdureWriter(url))` and
`dcp.load(state, storage_reader=PerdureReader(url))`, in any script. A URL holds one checkpoint: there, or not there.

Each rank writes its pack, the manifest comes last. A reader fetches the blobs it needs and checks them."""

import contextlib
import io
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from perdure.training import files
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.ordered import in_order
from perdure.training.checkpoint.pack import IndexEntry
from perdure.training.checkpoint.pieces import alone, blobs_with, piece_path
from perdure.training.checkpoint.plain import pack_plain, unpack_plain
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.checkpoint.store_source import StoreSource
from perdure.training.checkpoint.writer import Way, Written, make_manifest, write_part
from perdure.training.engine import environment
from perdure.training.engine.leaves import LoadedLeaf, dtype_name, escape
from perdure.training.engine.shards import local
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, ObjectNotFound, PerdureError
from perdure.training.run_dir import MANIFEST, CheckpointName
from perdure.training.slots import About, Entry
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore, open_store
from perdure.training.store_settings import StoreSettings

METADATA = "perdure.dcp"
"""Path of the plain leaf that holds what the planner of the save said of the whole; it is in a part of its own, the last."""
_THREADS = 4
_Url = str | os.PathLike[str]


class _Place:
    """The URL of a checkpoint, and its store."""

    def __init__(self, url: _Url = "", settings: StoreSettings | None = None) -> None:
        """A folder, `file:///folder` or `s3://bucket/prefix`; a `checkpoint_id` given to dcp replaces it. `settings` are
        those of a store in run.toml (endpoint_url, ...); credentials come from the environment."""
        self._url, self._settings = os.fspath(url), settings

    def reset(self, checkpoint_id: _Url | None = None) -> None:
        self._url = os.fspath(checkpoint_id) if checkpoint_id is not None else self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Url) -> bool:
        """For dcp's choice of a storage by the id alone."""
        return "://" not in os.fspath(checkpoint_id) or os.fspath(checkpoint_id).startswith(("file://", "s3://"))

    def _store(self) -> ObjectStore:
        if not self._url:
            raise ConfigError(
                f"{type(self).__name__} has no URL", "name a folder or s3://bucket/prefix, or give a checkpoint_id"
            )
        url = self._url if "://" in self._url else Path(self._url).absolute().as_uri()
        return open_store(url, self._settings)


class PerdureWriter(_Place, StorageWriter):
    """A save that fails or is killed leaves no manifest, so no checkpoint; the next one writes over what it left. Packs for a
    bucket are made in the temporary folder (TMPDIR) first. Raises PerdureError where the URL holds a checkpoint already;
    with `overwrite` that is gone from the moment the new one is begun."""

    def __init__(self, url: _Url = "", settings: StoreSettings | None = None, *, overwrite: bool = False) -> None:
        super().__init__(url, settings)
        self._overwrite = overwrite

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:  # Any: dcp's
        self._to = self._store()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._overwrite:
            self._to.delete([MANIFEST])
        elif self._to.size(MANIFEST) is not None:
            raise PerdureError(f"{self._to.url} holds a checkpoint already: save to another URL, or with overwrite=True")
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not isinstance(plan.storage_data, int):
            raise ConfigError("PerdureWriter needs a plan of all ranks: it does not save with use_collectives=False")
        part = self._write(plan.storage_data, _Items.of_plan(plan, planner))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(METADATA), part.files[0].bytes, part)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts: list[Written] = [result.storage_data for [result] in results]
        parts.append(self._write(len(parts), _Items.of_metadata(metadata)))
        about = About(
            step=0, world={"size": len(results)}, data={}, environment=environment.environment(), code={}, config={}, loss={}
        )  # fmt: skip
        records = [record for part in parts for record in part.files]
        entries = [entry for part in parts for entry in part.entries]
        made = make_manifest("dcp", CheckpointName(0, 0), about, records, entries)
        if not self._to.put(MANIFEST, manifests.seal(made), if_absent=True):
            raise PerdureError(f"{self._to.url}: another save put its checkpoint there meanwhile")

    def _write(self, number: int, items: "_Items") -> Written:
        with self._folder() as folder:
            part = write_part(folder, number, items, Way("auto", min(_THREADS, len(os.sched_getaffinity(0)))))
            if not isinstance(self._to, FolderStore):
                for record in part.files:
                    self._to.put_file(record.name, folder / record.name)
        return part

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Where files are written: the place itself if it is a folder."""
        if isinstance(self._to, FolderStore):
            files.make_dirs(self._to.root)
            yield self._to.root
        else:
            with tempfile.TemporaryDirectory(prefix="perdure-dcp-") as folder:
                yield Path(folder)


class _Items:
    """What a rank is to write, as leaves. Tensors of the CPU are not copied."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._data: dict[str, memoryview] = {}

    @classmethod
    def of_plan(cls, plan: SavePlan, planner: SavePlanner) -> "_Items":
        items = cls()
        for item in plan.items:
            value = planner.resolve_data(item)
            if isinstance(value, io.BytesIO):
                items._add_plain(escape(item.index.fqn), value.getvalue())
            elif value.numel() or not math.prod(_size(item)):  # an empty piece is left out
                items._add_tensor(item, local(value))
        return items

    @classmethod
    def of_metadata(cls, metadata: Metadata) -> "_Items":
        items = cls()
        state = {name: _told(one) for name, one in metadata.state_dict_metadata.items()}
        items._add_plain(METADATA, {"state": state, "planner_data": metadata.planner_data, "version": metadata.version})
        return items

    def data(self, entry: Entry) -> memoryview:
        return self._data[entry.path]

    def _add_plain(self, path: str, value: Any) -> None:  # Any: plain values
        data = pack_plain(value, path)
        self._add(path, "plain", "plain", (len(data),), memoryview(data))

    def _add_tensor(self, item: WriteItem, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise PerdureError(f"{item.index.fqn} is of layout {tensor.layout}: only dense tensors with data can be saved")
        dense = tensor.detach().cpu().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().data if dense.numel() else memoryview(b"")
        self._add(_path(item.index, _size(item), tensor.shape), "tensor", dtype_name(tensor.dtype), tuple(tensor.shape), data)

    def _add(self, path: str, kind: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        self.entries.append(Entry(path=path, kind=kind, dtype=dtype, shape=shape, offset=0, nbytes=data.nbytes))
        self._data[path] = data


class PerdureReader(_Place, StorageReader):
    """Raises CheckpointNotFound where the URL holds none, CheckpointDamaged naming the tensor that is."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # Any: dcp's
        self._reader = _opened(self._store())
        self._leaves = {
            entry.path: (rank, entry)
            for rank in range(self._reader.ranks)
            for entry in self._reader.rank_entries(rank).values()
        }
        if METADATA not in self._leaves:
            raise ConfigError(f"{self._reader.where} was not written by PerdureWriter; a run's checkpoint: `perdure restore`")
        told = unpack_plain(self._read_whole(METADATA))
        state = {name: _metadata_of(one) for name, one in told["state"].items()}
        return Metadata(state_dict_metadata=state, planner_data=told["planner_data"], version=told["version"])

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:  # Any: dcp's
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with contextlib.closing(self._reader):
            tensors = []
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    data = unpack_plain(self._read_whole(escape(item.storage_index.fqn)))
                    planner.load_bytes(item, io.BytesIO(data))
                elif math.prod(item.lengths):
                    tensors.append((item, *self._leaf(item)))
            self._read_tensors(sorted(tensors, key=_by_place), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensors(self, tensors: "Sequence[_Wanted]", planner: LoadPlanner) -> None:
        self._reader.expect_blobs((rank, entry, number) for item, rank, entry in tensors for number in _numbers(item, entry))
        threads = min(_THREADS, len(os.sched_getaffinity(0)))
        for (item, _, entry), data in in_order(self._read_part, tensors, threads=threads, nbytes=lambda one: one[2].nbytes):
            source = LoadedLeaf("tensor", entry.dtype, tuple(item.lengths), data).tensor(entry.path)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)

    def _read_part(self, wanted: "_Wanted") -> memoryview:
        item, rank, entry = wanted
        return alone(rank, entry).read_part(self._reader, tuple(item.storage_offsets), tuple(item.lengths))

    def _leaf(self, item: ReadItem) -> tuple[int, IndexEntry]:
        path = escape(item.storage_index.fqn)
        rank, entry = self._found(path if path in self._leaves else piece_path(path, item.storage_index.offset or ()))
        ends = [start + size for start, size in zip(item.storage_offsets, item.lengths, strict=True)]
        if len(ends) != len(entry.shape) or any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            raise CheckpointDamaged(f"{self._reader.where}: {entry.path} is smaller than its metadata says", part=entry.path)
        return rank, entry

    def _found(self, path: str) -> tuple[int, IndexEntry]:
        if path not in self._leaves:
            raise CheckpointDamaged(f"{self._reader.where} has no {path}, which its metadata names", part=path)
        return self._leaves[path]

    def _read_whole(self, path: str) -> memoryview:
        return self._reader.read(path, self._found(path)[0])


_Wanted = tuple[ReadItem, int, IndexEntry]
"""Of a leaf, and in which rank's pack that is."""


def _numbers(item: ReadItem, entry: IndexEntry) -> Sequence[int]:
    """Of the blobs that hold what is asked for."""
    if not entry.shape:
        return range(len(entry.blobs))
    return blobs_with(entry, item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0])


def _by_place(wanted: _Wanted) -> tuple[int, int]:
    _, rank, entry = wanted
    return rank, entry.blobs[0].offset


def _opened(store: ObjectStore) -> CheckpointReader:
    try:
        data = store.get(MANIFEST, limit=manifests.MAX_MANIFEST)
    except ObjectNotFound:
        raise CheckpointNotFound(f"{store.url} holds no checkpoint: it has no {MANIFEST}") from None
    return CheckpointReader(manifests.parse(data, store.url), StoreSource(store, ""), store.url)


def _size(item: WriteItem) -> Sequence[int]:
    assert item.tensor_data is not None  # of an item that is no BYTE_IO
    return item.tensor_data.size


def _path(index: MetadataIndex, size: Sequence[int], shape: Sequence[int]) -> str:
    """Of the leaf: the tensor's own where it is whole, else that of a piece."""
    path = escape(index.fqn)
    return path if tuple(size) == tuple(shape) else piece_path(path, index.offset or ())


def _told(one: TensorStorageMetadata | BytesStorageMetadata) -> Any:  # Any: plain values
    if isinstance(one, BytesStorageMetadata):
        return None
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in one.chunks]
    return dtype_name(one.properties.dtype), tuple(one.size), chunks


def _metadata_of(told: Any) -> TensorStorageMetadata | BytesStorageMetadata:  # Any: what `_told` gave
    if told is None:
        return BytesStorageMetadata()
    dtype, size, chunks = told
    pieces = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(size), pieces)
