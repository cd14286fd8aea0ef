"""run.json: what a run is and where its copies go; written once in the store, here also when that is another one."""

import secrets
import time
from typing import Any, Literal

import msgspec

from perdure.training import files
from perdure.training.config import RunConfig
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import RunDir
from perdure.training.storage.store import ObjectStore, open_store
from perdure.training.store_settings import StoreSettings

FORMAT = 1
MAX_RUN_INFO = 1 << 20


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    created: float
    format: int = FORMAT
    steps: int
    chunk: int
    store_url: str = ""
    endpoint_url: str = ""
    region: str = ""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    checksums: Literal["auto", "always", "when_required"] = "auto"
    part_mib: int = 16
    storage_class: str = ""
    sse: Literal["", "AES256", "aws:kms"] = ""
    sse_kms_key: str = ""
    tags: dict[str, str] = {}
    in_parts: bool = False
    """Nodes share no disk: of a checkpoint this directory has what its node wrote, the rest is in the store."""

    @property
    def store(self) -> StoreSettings:
        """How the store is reached."""
        return StoreSettings(**{name: getattr(self, name) for name in StoreSettings.__struct_fields__})


def with_store(info: RunInfo, url: str, settings: StoreSettings) -> RunInfo:
    """Of a pulled run: its copies go where it was found, not where somebody wrote into a bucket that they should go."""
    reached = {name: getattr(settings, name) for name in ("endpoint_url", "region", "addressing")}
    return msgspec.structs.replace(info, store_url=url, **reached)


def run_store(run: RunDir) -> ObjectStore:
    """Where its copies go, as run.json says. Raises CheckpointNotFound, CheckpointDamaged."""
    info = read_run_info(run)
    return open_store(info.store_url, info.store)


def keep_in_parts(run: RunDir, config: RunConfig) -> None:
    """From now on this directory may hold parts of checkpoints, the rest of which is where the run.toml says."""
    info = msgspec.structs.replace(read_run_info(run), in_parts=True, **_store_of(config))
    if info != read_run_info(run):
        files.write_atomically(run.run_json, msgspec.json.encode(info))


def create_run_info(run: RunDir, config: RunConfig) -> RunInfo:
    """Give a new run its id and write run.json; when another process was first, its run.json counts."""
    info = RunInfo(
        id=f"{config.run.name}-{secrets.token_hex(4)}",
        name=config.run.name,
        created=time.time(),
        steps=config.run.steps,
        chunk=config.run.chunk,
        **_store_of(config),
    )
    files.make_dirs(run.root)
    files.create_exclusively(run.run_json, msgspec.json.encode(info))
    return read_run_info(run)


def _store_of(config: RunConfig) -> dict[str, Any]:  # Any: settings
    return {"store_url": config.store_url} | {name: getattr(config.store, name) for name in StoreSettings.__struct_fields__}


def follow_store(run: RunDir, config: RunConfig) -> str:
    """Have run.json say what the run.toml says now of the store. Returns the URL of another one that it was before."""
    before = read_run_info(run)
    now = msgspec.structs.replace(before, **_store_of(config))
    if now != before:
        files.write_atomically(run.run_json, msgspec.json.encode(now))
    return before.store_url if before.store_url != now.store_url else ""


def read_run_info(run: RunDir) -> RunInfo:
    """Raises CheckpointNotFound where there is no run, CheckpointDamaged where run.json is none."""
    try:
        info = msgspec.json.decode(files.read_limited(run.run_json, MAX_RUN_INFO), type=RunInfo)
    except FileNotFoundError:
        raise CheckpointNotFound(f"{run.root} holds no run (no run.json)") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{run.run_json} is not a run.json: {error}", part="run.json") from None
    if info.format > FORMAT:
        raise CheckpointDamaged(
            f"{run.run_json} was written by a newer version (format {info.format}, this one reads {FORMAT})",
            part="run.json",
            hint="upgrade perdure",
        )
    return info
