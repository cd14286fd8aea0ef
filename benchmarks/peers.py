"""Whoever can save a training state: each peer behind one protocol, as its own documentation uses it on a CPU."""

import importlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported all the same
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.measure import fsync_all
from benchmarks.state import Tracked, tensors


class Peer(Protocol):
    """A way to save. Made anew in every measurement."""

    def prepare(self, tracked: Tracked, folder: Path) -> None:
        """Whatever is done once before the first save that counts: buffers, processes, a first save into `folder`."""

    def save(self, tracked: Tracked, folder: Path) -> None:
        """Save into this empty folder; the training step waits for as long as this takes."""

    def wait(self, folder: Path) -> None:
        """Until it is committed, by the peer's own word."""

    def load(self, tracked: Tracked, folder: Path) -> Mapping[str, Tensor]:
        """All tensors, in memory of their own, by `state.tensors` name; `tracked` says what is expected and is not changed."""


def nested(tracked: Tracked) -> dict[str, Any]:  # Any: state dicts
    return {name: part.state_dict() for name, part in tracked.items()}


def _named(state: dict[str, Any]) -> dict[str, Tensor]:  # Any: state dicts
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for number, moments in state["optimizer"]["state"].items():
        found.update((f"optimizer.{number}.{name}", value) for name, value in moments.items())
    return found


def _empty(tracked: Tracked) -> dict[str, Any]:  # Any: state dicts
    """A state of the same form whose tensors are new memory."""
    model = {name: torch.empty_like(value) for name, value in tracked["model"].state_dict().items()}
    optimizer = tracked["optimizer"].state_dict()
    state = {
        number: {name: torch.empty_like(value) for name, value in values.items()}
        for number, values in optimizer["state"].items()
    }
    return {"model": model, "optimizer": {**optimizer, "state": state}}


class TorchSave:
    """`torch.save` into one file, with or without fsync."""

    def __init__(self, fsync: bool) -> None:
        self.fsync = fsync

    def prepare(self, tracked: Tracked, folder: Path) -> None:
        torch.save({"first": torch.zeros(1 << 20)}, folder / "state.pt")

    def save(self, tracked: Tracked, folder: Path) -> None:
        torch.save(nested(tracked), folder / "state.pt")
        if self.fsync:
            fsync_all(folder)

    def wait(self, folder: Path) -> None:
        pass

    def load(self, tracked: Tracked, folder: Path) -> Mapping[str, Tensor]:
        return _named(torch.load(folder / "state.pt", weights_only=True))


class Safetensors:
    """One safetensors file of all tensors, nothing else of the state. Loading only maps it, so the tensors are copied after;
    the benchmark syncs it."""

    def prepare(self, tracked: Tracked, folder: Path) -> None:
        save_file({"first": torch.zeros(1 << 20)}, folder / "state.safetensors")

    def save(self, tracked: Tracked, folder: Path) -> None:
        save_file(dict(tensors(tracked)), folder / "state.safetensors")
        fsync_all(folder)

    def wait(self, folder: Path) -> None:
        pass

    def load(self, tracked: Tracked, folder: Path) -> Mapping[str, Tensor]:
        mapped = load_file(folder / "state.safetensors")
        return {name: value.clone() for name, value in mapped.items()}


class DCP:
    """torch.distributed.checkpoint, which syncs its files by itself. `mode`: "sync", "zstd", "thread" or "process"."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._stager: Any = None  # Any: torch's stager, kept between saves
        self._saving: Future[Any] | None = None  # Any: DCP's metadata

    def prepare(self, tracked: Tracked, folder: Path) -> None:
        if self.mode == "process":
            store = TCPStore("127.0.0.1", 0, is_master=True)  # for its process, too: a port that it chooses itself may be taken
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "DCP_USE_PREFIX_STORE": "1"}
            os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", **meeting)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        if self.mode in ("thread", "process"):  # the first call makes buffers and the process: a save that does not count
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
                )
            )
            self.save(tracked, folder / "first")
            self.wait(folder)
        else:
            self._save({"first": torch.zeros(1 << 20)}, folder / "first")

    def save(self, tracked: Tracked, folder: Path) -> None:
        self._save(nested(tracked), folder)

    def _save(self, state: dict[str, Any], folder: Path) -> None:  # Any: state dicts
        writer = FileSystemWriter(folder, _extensions=[ZStandard()] if self.mode == "zstd" else None)
        if self._stager is None:
            save(state, storage_writer=writer, no_dist=True)
            return
        kind = AsyncCheckpointerType.PROCESS if self.mode == "process" else AsyncCheckpointerType.THREAD
        alone = self.mode == "thread"
        saving = async_save(
            state, storage_writer=writer, async_checkpointer_type=kind, async_stager=self._stager, no_dist=alone
        )
        self._saving = saving if isinstance(saving, Future) else saving.upload_completion

    def wait(self, folder: Path) -> None:
        if self._saving is not None:
            self._saving.result()

    def load(self, tracked: Tracked, folder: Path) -> Mapping[str, Tensor]:
        state = _empty(tracked)
        load(state, checkpoint_id=folder, no_dist=True)
        return _named(state)


class TorchCheckpointing:
    """DCP's successor: staged in shared memory (at once, since there is no CUDA stream here), written by a process of its own.
    Its default, O_DIRECT, fails on ext4 (0.1.1: writes are not aligned), so it is off. It never syncs: the benchmark does."""

    def __init__(self) -> None:
        self._api: Any = importlib.import_module("torch_checkpointing")  # Any: an optional package
        self._config: Any = importlib.import_module("torch_checkpointing.config")
        self._storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        self._saver: Any = None
        self._writing: Future[Any] | None = None

    def _manager(self, **settings: Any) -> Any:  # Any: as above
        storage = self._storage.LocalFileSystemStorageConfig(use_direct_io=False)
        return self._api.CheckpointManager(self._api.CheckpointManager.Config(storage_config=storage, **settings))

    def prepare(self, tracked: Tracked, folder: Path) -> None:
        staging = self._api.CheckpointStagerConfig(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._saver = self._manager(save=self._config.AsyncCheckpointSaverConfig(staging_config=staging))
        self.save(tracked, folder / "first")
        self.wait(folder)

    def save(self, tracked: Tracked, folder: Path) -> None:
        self._writing = self._saver.save(str(folder), nested(tracked))

    def wait(self, folder: Path) -> None:
        if self._writing is not None:
            self._writing.result()
        fsync_all(folder)

    def load(self, tracked: Tracked, folder: Path) -> Mapping[str, Tensor]:
        settings = {
            "save": self._config.SyncCheckpointSaverConfig(),
            "load": self._config.CheckpointLoaderConfig(use_mmap=False),
        }
        return _named(dict(self._manager(**settings).load(str(folder), into=_empty(tracked))))


class ZipNN:
    """ZipNN compresses tensor after tensor, with as many threads as it likes; a file of them behind a JSON header. It has no
    container for a training state of its own, and refuses scalars, which are stored as they are."""

    def __init__(self) -> None:
        self._api: Any = importlib.import_module("zipnn")  # Any: an optional package

    def _codec(self) -> Any:  # Any: as above
        return self._api.ZipNN(input_format="torch")

    def prepare(self, tracked: Tracked, folder: Path) -> None:
        self._codec().compress(torch.zeros(1 << 20))

    def save(self, tracked: Tracked, folder: Path) -> None:
        header: dict[str, list[int]] = {}
        with (folder / "state.zipnn").open("wb") as file:
            for name, value in tensors(tracked):
                small = value.numel() < 1 << 10
                data = value.numpy().tobytes() if small else self._codec().compress(value.detach().clone())
                header[name] = [len(data), *value.shape]
                file.write(data)
            text = json.dumps(header).encode()
            file.write(text + struct.pack("<Q", len(text)))
        fsync_all(folder)

    def wait(self, folder: Path) -> None:
        pass

    def load(self, tracked: Tracked, folder: Path) -> Mapping[str, Tensor]:
        found = {}
        with (folder / "state.zipnn").open("rb") as file:
            file.seek(-8, os.SEEK_END)
            (length,) = struct.unpack("<Q", file.read(8))
            file.seek(-8 - length, os.SEEK_END)
            header = json.loads(file.read(length))
            file.seek(0)
            for name, (size, *shape) in header.items():
                data = bytearray(file.read(size))
                small = torch.Size(shape).numel() < 1 << 10
                value = torch.frombuffer(data, dtype=torch.float32) if small else self._codec().decompress(data)
                found[name] = value.view(shape)
        return found


def others() -> dict[str, Callable[[], Peer]]:
    """Every peer by the name of its row."""
    return {
        "torch.save": lambda: TorchSave(fsync=False),
        "torch.save + fsync": lambda: TorchSave(fsync=True),
        "safetensors + fsync": Safetensors,
        "DCP save": lambda: DCP("sync"),
        "DCP async, thread": lambda: DCP("thread"),
        "DCP async, process": lambda: DCP("process"),
        "DCP save, zstd": lambda: DCP("zstd"),
        "torch_checkpointing + fsync": TorchCheckpointing,
        "ZipNN + fsync": ZipNN,
    }
