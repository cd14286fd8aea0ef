"""One transfer by one client, in a process of its own, in whichever environment has it: `CLIENT up|down FOLDER PREFIX`.

Each client as its own documentation moves a folder of files fast; 16 MiB parts and 8 at once where that can be said."""

import importlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENDPOINT, BUCKET = os.environ.get("BENCH_ENDPOINT", ""), os.environ.get("BENCH_BUCKET", "")
PART, WIDTH = 16 << 20, 8
Move = Callable[[Path, str], None]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _module(name: str) -> Any:  # Any: clients of other environments than that of the type checker
    return importlib.import_module(name)


def _all(work: Callable[[Any], object], items: list[Any]) -> None:  # Any: as _module
    with ThreadPoolExecutor(WIDTH) as pool:
        list(pool.map(work, items))


def _boto3_client() -> Any:  # Any: as _module
    config = _module("botocore.config").Config(max_pool_connections=2 * WIDTH)
    return _module("boto3").client("s3", endpoint_url=ENDPOINT, config=config)


def _boto3(up: bool) -> Move:
    """s3transfer's TransferManager, one for all files."""
    client = _boto3_client()
    config = _module("boto3.s3.transfer").TransferConfig(
        multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=WIDTH, preferred_transfer_client="classic"
    )

    def move(folder: Path, prefix: str) -> None:
        with _module("boto3.s3.transfer").create_transfer_manager(client, config) as manager:
            if up:
                waiting = [manager.upload(str(path), BUCKET, f"{prefix}/{path.name}") for path in _files(folder)]
            else:
                waiting = [manager.download(BUCKET, key, str(folder / Path(key).name)) for key in _keys(client, prefix)]
            for one in waiting:
                one.result()

    return move


def _keys(client: Any, prefix: str) -> list[str]:  # Any: as _module
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix + "/")
    return [item["Key"] for page in pages for item in page.get("Contents", ())]


def _s3fs(up: bool) -> Move:
    """fsspec over aiobotocore, with its own concurrency."""
    fs = _module("s3fs").S3FileSystem(client_kwargs={"endpoint_url": ENDPOINT}, default_block_size=PART)

    def move(folder: Path, prefix: str) -> None:
        if up:
            paths = _files(folder)
            fs.put([str(path) for path in paths], [f"{BUCKET}/{prefix}/{path.name}" for path in paths])
        else:
            keys = fs.ls(f"{BUCKET}/{prefix}")
            fs.get(keys, [str(folder / Path(key).name) for key in keys])

    return move


def _obstore(up: bool) -> Move:
    """Rust's object_store: puts of paths, streamed gets, in eight threads."""
    obstore, size = _module("obstore"), PART
    store = _module("obstore.store").S3Store(
        BUCKET, endpoint=ENDPOINT, region="us-east-1", client_options={"allow_http": True}, virtual_hosted_style_request=False
    )

    def fetch(meta: Any, folder: Path) -> None:  # Any: as _module
        with open(folder / Path(meta["path"]).name, "wb") as file:
            for data in obstore.get(store, meta["path"]).stream(min_chunk_size=1 << 20):
                file.write(data)

    def move(folder: Path, prefix: str) -> None:
        if up:
            _all(lambda path: obstore.put(store, f"{prefix}/{path.name}", path, chunk_size=size), _files(folder))
        else:
            _all(lambda meta: fetch(meta, folder), [meta for page in obstore.list(store, prefix) for meta in page])

    return move


def _minio(up: bool) -> Move:
    """MinIO's client, a thread per file and four parts each."""
    host, keys = ENDPOINT.removeprefix("http://"), (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    client = _module("minio").Minio(host, access_key=keys[0], secret_key=keys[1], secure=False, region="us-east-1")

    def move(folder: Path, prefix: str) -> None:
        if up:
            _all(
                lambda path: client.fput_object(
                    BUCKET, f"{prefix}/{path.name}", str(path), part_size=PART, num_parallel_uploads=4
                ),
                _files(folder),
            )
        else:
            names = [item.object_name for item in client.list_objects(BUCKET, prefix + "/")]
            _all(lambda name: client.fget_object(BUCKET, name, str(folder / Path(name).name)), names)

    return move


def _minio_proven(up: bool) -> Move:
    """As `minio`, and what came down is read again for its digest and synced: the work of Perdure's pull."""
    fetch = _minio(up)

    def prove(path: Path) -> None:
        digest = _module("xxhash").xxh3_128()
        with open(path, "rb") as file:
            for data in iter(lambda: file.read(1 << 20), b""):
                digest.update(data)
            os.fsync(file.fileno())

    def move(folder: Path, prefix: str) -> None:
        fetch(folder, prefix)
        if not up:
            _all(prove, _files(folder))

    return move


def _perdure(up: bool) -> Move:
    """`perdure push` of the checkpoint whose files lie in the folder, and `perdure pull`."""
    from perdure.training.run_dir import CheckpointName, RunDir
    from perdure.training.storage.store import StoreSettings, open_store
    from perdure.training.travel.pull import pull
    from perdure.training.travel.push import push

    def move(folder: Path, prefix: str) -> None:
        store = open_store(f"s3://{BUCKET}/{prefix}", StoreSettings(endpoint_url=ENDPOINT, region="us-east-1"))
        name = CheckpointName.parse(folder.name)
        assert name is not None
        run = RunDir(folder.parent.parent)
        if up:
            push(run, store, name)
        else:
            pull(store, run, name=name)

    return move


def _perdure_sent(up: bool) -> Move:
    """As `perdure`, but what was sent is not read back: the work that the others do."""
    from perdure.training.checkpoint.digest import Proof

    Proof.stored = lambda *_: True  # type: ignore[method-assign]  # in this process only
    return _perdure(up)


CLIENTS: dict[str, Callable[[bool], Move]] = {
    "perdure": _perdure,
    "perdure, not read back": _perdure_sent,
    "boto3": _boto3,
    "s3fs": _s3fs,
    "minio": _minio,
    "minio, proven": _minio_proven,
    "obstore": _obstore,
}

if __name__ == "__main__":
    client, direction, where, under = sys.argv[1:]
    CLIENTS[client](direction == "up")(Path(where), under)
