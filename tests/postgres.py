"""A Prefect server whose database is PostgreSQL, started as docs/deploying.md says."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import free_port

from perdure.deployments.server import is_ready

NOBODY = "nobody"


def as_owner(*command: object) -> list[str]:
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", NOBODY, "--", *map(str, command)] if os.geteuid() == 0 else [*map(str, command)]


@dataclass
class Database:
    address: str
    """As Prefect wants it."""
    folder: Path

    def stop(self) -> None:
        command = as_owner("pg_ctl", "-D", self.folder / "data", "-m", "immediate", "stop")
        subprocess.run(command, check=False, capture_output=True, cwd=self.folder)


@contextlib.contextmanager
def running_postgres() -> Iterator[Database]:
    """An empty one."""
    if not (shutil.which("initdb") and shutil.which("pg_ctl") and shutil.which("runuser")):
        pytest.skip("PostgreSQL (initdb, pg_ctl) is not installed here")
    folder = Path("/tmp") / f"perdure-postgres-{os.getpid()}"  # short enough for its socket, open enough for its owner
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    data, port = folder / "data", free_port()
    made = Database(f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres", folder)
    quiet = {"check": True, "capture_output": True, "timeout": 120, "cwd": folder}
    try:
        subprocess.run(as_owner("initdb", "-D", data, "-A", "trust", "-U", "prefect", "--no-sync"), **quiet)
        options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
        command = as_owner("pg_ctl", "-D", data, "-l", folder / "log", "-w", "-o", options, "start")
        subprocess.run(command, check=True, timeout=120, cwd=folder, stdout=subprocess.DEVNULL)
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running_server(database: Database, home: Path) -> Iterator[str]:
    """URL of the API."""
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": database.address,
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_UI_STATIC_DIRECTORY": str(home / "ui"),
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}/api"
    with open(home / "server.log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not is_ready(url):
            assert server.poll() is None, (home / "server.log").read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
