"""The local Prefect server: shared, counted, on loopback only, and gone whenever nobody uses it, however they ended."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from perdure.deployments import server
from perdure.deployments.server import LocalServer, ServerFailed, ServerHome, ServerRecord, acquire, is_ready, read_record
from perdure.training.process import ProcessId, identify, start_time

PATIENCE_SECS = 180.0


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECS
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[ServerHome]:
    home = ServerHome(tmp_path / "home")
    yield home
    home.keep.unlink(missing_ok=True)
    wait_until(lambda: not server._is_locked(home.supervisor), "the supervisor ends with its last user")


def server_of(home: ServerHome) -> ProcessId:
    record = read_record(home)
    assert record is not None
    return record.server


def supervisor_of(home: ServerHome) -> ProcessId:
    stat = Path(f"/proc/{server_of(home).pid}/stat").read_text()
    return identify(int(stat.rpartition(")")[2].split()[1]))


def listening_addresses(pid: int) -> set[str]:
    """Hex `address:port` of the listening TCP sockets of a process, from /proc/net/tcp and tcp6."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


def test_server_is_shared_kept_when_asked_and_stopped_with_its_last_user(
    home: ServerHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", "xoxb-canary-of-the-server-test")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr(server, "STOP_TIMEOUT_SECS", PATIENCE_SECS)
    first = acquire(home, keep=True)
    process = server_of(home)
    assert is_ready(first.url, 60)
    assert listening_addresses(process.pid) == {f"0100007F:{first.port:04X}"}
    assert home.root.stat().st_mode & 0o777 == 0o700
    assert b"xoxb-canary" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    first.release()
    assert is_ready(first.url, 60), "keep=True leaves it"

    second, third = acquire(home), acquire(home)
    assert (second.url, third.url) == (first.url, first.url)
    assert server_of(home) == process
    second.release()
    assert is_ready(third.url, 60), "somebody still uses it"
    supervisor = supervisor_of(home)
    third.release()
    assert not process.is_alive()
    assert supervisor.wait(PATIENCE_SECS)
    assert not is_ready(first.url)


USER = """
import sys, time
from pathlib import Path
from perdure.deployments.server import ServerHome, acquire
server = acquire(ServerHome(Path(sys.argv[1])))
print(server.url, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def user_process(home: ServerHome) -> Iterator[tuple["subprocess.Popen[str]", Callable[[], str]]]:
    command = [sys.executable, "-c", USER, str(home.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, lambda: process.stdout.readline().strip()  # type: ignore[union-attr]
        finally:
            process.kill()


class _Impostor(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextlib.contextmanager
def impostor() -> Iterator[int]:
    """Something else that answers on a port of loopback."""
    with HTTPServer(("127.0.0.1", 0), _Impostor) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield httpd.server_port
        finally:
            httpd.shutdown()
            thread.join()


def test_stale_record_is_not_trusted_and_no_death_leaves_a_process(home: ServerHome, request: pytest.FixtureRequest) -> None:
    home.root.mkdir()
    bystander = subprocess.Popen(["sleep", "600"])
    request.addfinalizer(bystander.wait)
    request.addfinalizer(bystander.kill)
    with impostor() as port, user_process(home) as (one, url_of_one), user_process(home) as (two, url_of_two):
        reused = ProcessId(pid=bystander.pid, start=start_time(bystander.pid), host=identify().host)
        home.record.write_bytes(msgspec.json.encode(ServerRecord(port=port, server=reused)))
        url = url_of_one()
        assert url
        assert url == url_of_two()
        assert f":{port}/" not in url
        assert bystander.poll() is None

        killed, supervisor = server_of(home), supervisor_of(home)
        killed.send(signal.SIGKILL)
        wait_until(lambda: server_of(home) != killed and is_ready(url), "a dead server is started again on its port")
        revived = server_of(home)

        one.kill()
        one.wait()
        assert is_ready(url, 60)
        two.kill()
        two.wait()
        assert revived.wait(PATIENCE_SECS)
        assert supervisor.wait(PATIENCE_SECS)


def test_server_dies_with_its_supervisor_and_a_broken_home_is_reported(home: ServerHome) -> None:
    home.root.mkdir()
    with user_process(home):
        wait_until(
            lambda: server._is_locked(home.supervisor) and read_record(home) is not None, "the supervisor starts a server"
        )
        process = server_of(home)
        supervisor_of(home).send(signal.SIGKILL)
        assert process.wait(PATIENCE_SECS)
    wait_until(lambda: not server._is_locked(home.supervisor), "one that the user may have started anew has left")
    for path in home.root.glob("prefect.db*"):  # whatever they got round to
        path.unlink()
    (home.root / "prefect.db").mkdir()
    with pytest.raises(
        ServerFailed, match=r"(?s)did not start; the end of .*server\.log:\n.*unable to open database file"
    ) as failure:
        acquire(home)
    assert failure.value.hint


def test_path_that_sqlite_cannot_open_is_named_before_anything_starts(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 100] * 5)
    with pytest.raises(ServerFailed, match="too long a path for a local Prefect server") as failure:
        acquire(ServerHome(deep))
    assert "shorter path" in failure.value.hint
    assert not deep.exists()
    longest = tmp_path / ("d" * (server.MAX_DATABASE_PATH // 2 - len(str(tmp_path)) // 2))
    longest /= "d" * (server.MAX_DATABASE_PATH - len(str(longest)) - len("//prefect.db"))
    longest.mkdir(parents=True)
    home = ServerHome(longest)
    assert len(str(home.database)) == server.MAX_DATABASE_PATH
    with contextlib.closing(sqlite3.connect(home.database)) as database:
        database.execute("create table one (more)")


def test_environment_of_clients_reaches_loopback_without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "intern.example")
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "2")
    monkeypatch.delenv("PREFECT_CLIENT_RETRY_EXTRA_CODES", raising=False)  # another test's server may be in the environment
    environment = server.client_environment("http://127.0.0.1:1/api", ServerHome(Path("/x")))
    assert environment["NO_PROXY"] == "intern.example,127.0.0.1,localhost"
    assert "PREFECT_CLIENT_MAX_RETRIES" not in environment, "the user's choice stays"
    assert environment["PREFECT_CLIENT_RETRY_EXTRA_CODES"] == "500"
    assert environment["PREFECT_HOME"] == "/x"


def test_release_twice_is_harmless(tmp_path: Path) -> None:
    home = ServerHome(tmp_path)
    use = LocalServer(home, 1, os.open(home.users, os.O_CREAT | os.O_RDWR))
    use.release()
    use.release()
