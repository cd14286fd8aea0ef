"""A SeaweedFS server of its own for a measurement: fresh, on loopback, with throw-away keys; gone afterwards."""

import contextlib
import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "bench"
_PORTS = (0, 1, 2, 3, 33)
"""Of master, volume, filer, admin and S3, beyond the first; each takes the port 10,000 above too."""


@dataclass(frozen=True)
class Server:
    endpoint: str
    access: str
    secret: str
    pid: int

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "BENCH_ENDPOINT": self.endpoint,
            "BENCH_BUCKET": BUCKET,
        }


def _free_port() -> int:
    while True:
        port = 10_100 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError):
            for offset in (*_PORTS, *(one + 10_000 for one in _PORTS)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + offset))
            return port


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serves BUCKET from `folder`, which must be new."""
    folder.mkdir(parents=True)
    access, secret, port = "AK" + secrets.token_hex(9).upper(), secrets.token_hex(20), _free_port()
    keys = {"name": "bench", "credentials": [{"accessKey": access, "secretKey": secret}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [keys]}))
    command = [
        *(str(Path(sys.executable).parent / "weed"), "-logtostderr=true", "mini", f"-dir={folder / 'data'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", f"-master.port={port}"),
        *(f"-volume.port={port + 1}", f"-filer.port={port + 2}", f"-admin.port={port + 3}", f"-s3.port={port + 33}"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false", f"-s3.config={folder / 's3.json'}"),
    ]
    (folder / "data").mkdir()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    server = Server(f"http://127.0.0.1:{port + 33}", access, secret, process.pid)
    try:
        _until_serving(server, process)
        yield server
    finally:
        process.send_signal(signal.SIGKILL)  # a throw-away server: SIGTERM takes seconds
        process.wait()
        shutil.rmtree(folder)


def _until_serving(server: Server, process: "subprocess.Popen[bytes]") -> None:
    session = boto3.session.Session(server.access, server.secret, region_name="us-east-1")
    client, deadline = session.client("s3", endpoint_url=server.endpoint), time.monotonic() + 60
    while True:
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="probe", Body=b"x" * 100_000)
            client.delete_object(Bucket=BUCKET, Key="probe")
            return
        except (BotoCoreError, ClientError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
