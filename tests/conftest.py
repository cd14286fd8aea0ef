"""What every test may ask for: a real S3 server (SeaweedFS) with throw-away keys and a real Prefect server, one each per
session, stopped at the end."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from harness import LAUNCHED

from perdure.deployments import server
from perdure.training.storage.s3 import S3Store
from perdure.training.storage.store import StoreSettings

os.environ["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "false"
"""A flow called without a server fails; else Prefect starts one of its own and leaves it behind."""

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Else each of the thousand processes that the tests start compiles this package again."""

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell that starts the suite in the background has it ignore SIGINT, and so would all that the tests start."""

WEED = Path(sys.executable).parent / "weed"
BUCKET = "ckpt"


@dataclass(frozen=True)
class Keys:
    access: str
    secret: str

    @classmethod
    def random(cls) -> "Keys":
        return cls("AK" + secrets.token_hex(9).upper(), secrets.token_hex(20))

    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_EC2_METADATA_DISABLED": "true"}


@dataclass
class S3Server:
    """`endpoint` serves bucket `ckpt`; `admin` may do all, `no_delete` all but delete, `read_only` get and list."""

    endpoint: str
    admin: Keys
    no_delete: Keys
    read_only: Keys
    pid: int
    master: str
    """host:port, for `weed shell`."""
    made: list[str] = field(default_factory=list)

    def client(self, keys: Keys | None = None) -> Any:
        keys = keys or self.admin
        config = Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
        return boto3.session.Session(keys.access, keys.secret, region_name="us-east-1").client(
            "s3", endpoint_url=self.endpoint, config=config
        )

    def make_bucket(self) -> str:
        """A fresh, empty bucket; its name."""
        name = "b" + secrets.token_hex(6)
        self.client().create_bucket(Bucket=name)
        self.made.append(name)
        return name


_given: set[int] = set()
"""Ports that tests of this process have got: whoever got one need not listen there yet."""


def free_port(*, spare: int = 0) -> int:
    """A port that nothing uses and nobody else gets: each worker of the suite has its own. So are `port + offset` up to
    `spare`, and those 10,000 above, where weed speaks gRPC; all below the range the kernel gives out."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    width = 10_000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        first = 10_100 + worker * width + secrets.randbelow(width - spare)
        ports = set(range(first, first + spare + 1))
        if not ports & _given and all(_is_free(port) and _is_free(port + 10_000) for port in ports):
            _given.update(ports)
            return first


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _policy(*statements: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def _identities(admin: Keys, no_delete: Keys, read_only: Keys) -> dict[str, Any]:
    here = [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"]
    writing = ["s3:GetObject", "s3:PutObject", "s3:List*", "s3:AbortMultipartUpload"]
    deleting = ["s3:DeleteObject", "s3:DeleteObjectVersion", "s3:DeleteBucket"]

    def identity(name: str, keys: Keys, **rights: Any) -> dict[str, Any]:
        return {"name": name, "credentials": [{"accessKey": keys.access, "secretKey": keys.secret}], **rights}

    return {
        "identities": [
            identity("admin", admin, actions=["Admin"]),
            identity("no-delete", no_delete, policyNames=["no-delete"]),
            identity("read-only", read_only, actions=[f"Read:{BUCKET}", f"List:{BUCKET}"]),
        ],
        "policies": [
            {
                "name": "no-delete",
                "content": _policy(
                    {"Effect": "Allow", "Action": writing, "Resource": here},
                    {"Effect": "Deny", "Action": deleting, "Resource": here},
                ),
            }
        ],
    }


def _start_weed(folder: Path, identities: dict[str, Any], *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    (folder / "data").mkdir()
    config = folder / "s3.json"
    config.write_text(json.dumps(identities))
    config.chmod(0o600)
    port = free_port(spare=34)
    log = open(folder / "weed.log", "wb")
    with log:
        process = subprocess.Popen(
            [
                *(WEED, "-logtostderr=true", "mini", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *("-master.telemetry=false", f"-master.port={port}", f"-volume.port={port + 1}", f"-filer.port={port + 2}"),
                *(f"-s3.port={port + 33}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
                *(f"-admin.port={port + 3}", f"-s3.config={config}"),
                *("-s3.allowDeleteBucketNotEmpty=false", "-s3.autoCreateBucket=false"),
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    return process, port


def _until_serving(server: S3Server, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """A 200 from /healthz comes too early: ready means that a PUT and a GET work."""
    client, deadline = server.client(), time.monotonic() + 60
    while True:
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="probe", Body=b"x" * 100_000)
            with client.get_object(Bucket=BUCKET, Key="probe")["Body"] as body:
                assert len(body.read()) == 100_000
            client.delete_object(Bucket=BUCKET, Key="probe")
            assert process.poll() is None
            return
        except (BotoCoreError, ClientError):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("weed did not come up:\n" + (folder / "weed.log").read_text()[-3000:])
            time.sleep(0.1)


@contextlib.contextmanager
def running_weed(
    folder: Path, identities: dict[str, Any], keys: tuple[Keys, Keys, Keys], *arguments: str
) -> Iterator[S3Server]:
    """A server of its own in `folder`; `keys` as S3Server has them, `arguments` after ours."""
    process, port = _start_weed(folder, identities, *arguments)
    server = S3Server(f"http://127.0.0.1:{port + 33}", *keys, pid=process.pid, master=f"127.0.0.1:{port}")
    try:
        _until_serving(server, process, folder)
        yield server
    finally:
        process.send_signal(signal.SIGKILL)  # a throw-away server: SIGTERM takes seconds
        process.wait()
        shutil.rmtree(folder / "data", ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """A test that fails half-way fails alone."""
    yield
    while LAUNCHED:
        LAUNCHED.pop().kill()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    keys = Keys.random(), Keys.random(), Keys.random()
    with running_weed(tmp_path_factory.mktemp("weed"), _identities(*keys), keys) as server:
        yield server


@pytest.fixture
def s3_keys(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with its admin key in the environment, as a user would have it."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    for name, value in s3_server.admin.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def open_s3(s3_keys: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., S3Store]]:
    """Opens stores on the server (or another endpoint), under a fresh prefix unless told, and closes them at the end."""
    opened: list[S3Store] = []

    def open_one(
        *, bucket: str = BUCKET, prefix: str = "", keys: Keys | None = None, endpoint: str = "", part_mib: int = 5, **more: Any
    ) -> S3Store:
        for name, value in (keys or s3_keys.admin).environment().items():
            monkeypatch.setenv(name, value)
        settings = StoreSettings(endpoint_url=endpoint or s3_keys.endpoint, region="us-east-1", part_mib=part_mib, **more)
        store = S3Store(bucket, prefix or f"runs/{secrets.token_hex(6)}", settings)
        opened.append(store)
        assert store.client  # made now, with these keys
        return store

    yield open_one
    for store in opened:
        store.client.close()


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.LocalServer]:
    home = server.ServerHome(tmp_path_factory.mktemp("prefect") / "home")
    with server.acquire(home) as local:
        yield local


def copy_database(home: server.ServerHome) -> None:
    """The tables of the session's server for another one, since making them takes ten seconds."""
    home.root.mkdir(parents=True)
    paths = Path(os.environ["PREFECT_HOME"]) / "prefect.db", home.root / "prefect.db"
    with contextlib.closing(sqlite3.connect(paths[0])) as one, contextlib.closing(sqlite3.connect(paths[1])) as two:
        one.backup(two)


@contextlib.contextmanager
def using_server(url: str, home: server.ServerHome | None = None) -> Iterator[str]:
    """The API at `url` for this process and those it starts, with the client settings a run gives its flow."""
    from prefect.events.worker import EventsWorker  # here: most tests do not want its seconds
    from prefect.settings import PREFECT_API_URL, temporary_settings

    before = dict(os.environ)
    os.environ.update(server.client_environment(url, home))
    with temporary_settings({PREFECT_API_URL: url}):  # this process has read its settings already
        yield url
        EventsWorker.drain_all(timeout=20)  # else it tries to reach the ended server, long past the last test
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def secret_block(prefect_api: str) -> Iterator[Callable[[str, str], None]]:
    """Saves a value as the Secret block that stands for a variable; gone after the test, as the server serves others."""
    from prefect.blocks.system import Secret

    made: list[str] = []

    def save(variable: str, value: str) -> None:
        made.append("perdure-" + variable.lower().replace("_", "-"))
        Secret(value=value).save(made[-1])

    yield save
    for name in made:
        Secret.delete(name)


@pytest.fixture
def patient_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A well-behaved Slack stays so where this process, which is both ends of the line, stands still for a while."""
    from perdure.tasks import slack  # here: most tests do not want its seconds

    monkeypatch.setattr(slack, "TIMEOUT_SECS", 60.0)
    monkeypatch.setattr(slack, "BUDGET_SECS", 120.0)


@pytest.fixture(scope="module")
def prefect_api(prefect_server: server.LocalServer) -> Iterator[str]:
    """URL of the API; also in PREFECT_API_URL while the module runs."""
    with using_server(prefect_server.url, prefect_server.home) as url:
        yield url
