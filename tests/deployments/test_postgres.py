"""`perdure deploy` and `perdure doctor` against a Prefect server whose database is PostgreSQL."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import copy_tiny
from postgres import Database, running_postgres, running_server


@pytest.fixture
def database() -> Iterator[Database]:
    with running_postgres() as database:
        yield database


@pytest.fixture
def api(database: Database, tmp_path: Path) -> Iterator[str]:
    with running_server(database, tmp_path) as url:
        yield url


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
    assert (found["Prefect API"], found["deployment"], found["Prefect leases"]) == ("ok", "ok", "ok")
    database.stop()
    dead = {one["check"]: one for one in perdure("doctor", str(toml))["checks"]}  # type: ignore[attr-defined]
    assert dead["Prefect API"]["level"] == "fail"
    assert "has no database" in dead["Prefect API"]["text"]
    assert dead["Prefect leases"]["level"] == "ok", "what the server knows by itself"
    assert dead["worker"]["level"] == "skip"
