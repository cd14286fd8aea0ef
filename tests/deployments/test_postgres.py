"""`perdure deploy` and `perdure doctor` against a Prefect server whose database is PostgreSQL."""

import json
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
from harness import copy_tiny

from perdure.deployments.server import is_ready

pytestmark = pytest.mark.skipif(
    not (shutil.which("initdb") and shutil.which("pg_ctl") and shutil.which("runuser")),
    reason="PostgreSQL (initdb, pg_ctl) is not installed here",
)
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


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    """An empty one."""
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


@pytest.fixture(scope="module")
def api(database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home, port = tmp_path_factory.mktemp("home"), free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": database.address,
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
        server.wait(30)


def test_deploy_is_idempotent_and_the_doctor_sees_settings_and_a_dead_database(
    api: str, database: Database, tmp_path: Path
) -> None:
    toml = copy_tiny(tmp_path / "tiny")

    def perdure(*arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "perdure.cli", *arguments, "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PREFECT_API_URL": api}, check=False, timeout=120
        )
        return dict(json.loads(done.stdout))

    first, second = perdure("deploy", str(toml)), perdure("deploy", str(toml))
    assert (first["unchanged"], second["created"], second["changed"]) == (0, 0, 0)
    assert second["unchanged"] == first["created"]
    found = {one["check"]: one["level"] for one in perdure("doctor", str(toml))["checks"]}  # type: ignore[attr-defined]
    assert (found["Prefect API"], found["deployment"], found["Prefect leases"]) == ("ok", "ok", "warn")
    database.stop()
    dead = {one["check"]: one for one in perdure("doctor", str(toml))["checks"]}  # type: ignore[attr-defined]
    assert dead["Prefect API"]["level"] == "fail"
    assert "has no database" in dead["Prefect API"]["text"]
    assert dead["Prefect leases"]["level"] == "warn", "what the server knows by itself"
    assert dead["worker"]["level"] == "skip"
