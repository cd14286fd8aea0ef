"""The embedded default: one real Prefect server on loopback per home folder, shared by the runs beside it.

Who uses it holds a shared flock on `users.lock` (the kernel lets go of it however its holder dies, and a child that got the
descriptor keeps it); the supervisor holds `supervisor.lock` and stops the server when nobody uses it. No pid is trusted."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import TracebackType

import msgspec

from perdure.training import files
from perdure.training.errors import PerdureError
from perdure.training.process import ProcessId
from perdure.training.run_dir import RunDir

START_TIMEOUT_SECS = 120.0
STOP_TIMEOUT_SECS = 15.0
HOST = "127.0.0.1"
MAX_DATABASE_PATH = 504
"""Bytes; SQLite's 512 less the ending of its journal."""
_TRIES = 3
_POLL_SECS = 0.1
_SERVER_AUTH, CLIENT_AUTH = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
_SERVER_KEEPS = (_SERVER_AUTH, "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED")
"""Loopback is shared by everyone on the machine: whoever asks for a password there gets one."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(PerdureError):
    """The local Prefect server did not start, or the home belongs to another machine."""

    exit_code = 10
    hint = "set PREFECT_API_URL to a Prefect server that answers, or unset it for a local one"


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """server.json: written by the supervisor; worth something only while `supervisor.lock` is held."""

    port: int
    server: ProcessId


@dataclass(frozen=True)
class ServerHome:
    """PREFECT_HOME of the local server and the few files beside Prefect's own."""

    root: Path

    @classmethod
    def beside(cls, run: RunDir) -> "ServerHome":
        """The home that all runs of one parent folder share."""
        return cls(run.root.parent / ".perdure-prefect")

    @property
    def mutex(self) -> Path:
        """Held while a server is found, started or given up."""
        return self.root / "server.lock"

    @property
    def users(self) -> Path:
        return self.root / "users.lock"

    @property
    def supervisor(self) -> Path:
        return self.root / "supervisor.lock"

    @property
    def record(self) -> Path:
        return self.root / "server.json"

    @property
    def keep(self) -> Path:
        """Exists while the server is to outlive its users."""
        return self.root / "keep"

    @property
    def database(self) -> Path:
        """Prefect's own."""
        return self.root / "prefect.db"

    @property
    def log(self) -> Path:
        return self.root / "server.log"


def api_url_from_environment() -> str:
    """The server the user chose, or empty: then a local one is started."""
    return os.environ.get("PREFECT_API_URL", "").strip()


def is_ready(api_url: str, timeout: float = 2.0) -> bool:
    """Whether the API answers and has its database (`/health` says yes without one)."""
    try:
        with _DIRECT.open(f"{api_url.rstrip('/')}/ready", timeout=timeout) as response:
            return bool(response.status == 200)
    except (OSError, HTTPException, ValueError):
        return False


def client_environment(api_url: str, home: ServerHome | None = None) -> dict[str, str]:
    """What a process that talks to the server needs in its environment: patience, no telemetry, no proxy for loopback."""
    here = [name for name in os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")).split(",") if name]
    no_proxy = ",".join(dict.fromkeys([*here, HOST, "localhost"]))
    chosen = {"PREFECT_API_URL": api_url, "NO_PROXY": no_proxy, "no_proxy": no_proxy, "DO_NOT_TRACK": "1"}
    defaults = {
        "PREFECT_CLIENT_MAX_RETRIES": "9",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    }
    if home is not None:
        chosen |= {"PREFECT_HOME": str(home.root), "PREFECT_SERVER_EPHEMERAL_ENABLED": "false"}
        if _SERVER_AUTH in os.environ:
            chosen[CLIENT_AUTH] = os.environ[_SERVER_AUTH]
    return chosen | {key: value for key, value in defaults.items() if key not in os.environ}


class LocalServer:
    """A use of the local server. Children that must keep it alive on their own get `fd` with `pass_fds`."""

    def __init__(self, home: ServerHome, port: int, users_fd: int) -> None:
        self.home, self.port, self.fd = home, port, users_fd

    @property
    def url(self) -> str:
        """For PREFECT_API_URL."""
        return _api_url(self.port)

    @property
    def ui_url(self) -> str:
        return f"http://{HOST}:{self.port}/v2/"

    def release(self) -> None:
        """Stop using it; returns when the server is gone if this was the last use and nobody asked to keep it."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        deadline = time.monotonic() + STOP_TIMEOUT_SECS
        while time.monotonic() < deadline and _is_locked(self.home.supervisor):
            if self.home.keep.exists() or _is_locked(self.home.users):
                return
            time.sleep(_POLL_SECS)

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def acquire(home: ServerHome, keep: bool = False, start_timeout: float = START_TIMEOUT_SECS) -> LocalServer:
    """Use the home's server, started if there is none; with `keep` it stays after its last user, until later
    ones leave of which none asked for that. Raises ServerFailed with the end of its log."""
    _check_depth(home)
    files.make_dirs(home.root)
    with _holding(home.mutex, start_timeout + STOP_TIMEOUT_SECS):
        fd = os.open(home.users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
        try:
            first = _try_lock(fd, fcntl.LOCK_EX)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if keep:
                home.keep.touch(files.FILE_MODE)
            elif first:
                home.keep.unlink(missing_ok=True)
            return LocalServer(home, _find(home, start_timeout) or _start(home, start_timeout), fd)
        except BaseException:
            os.close(fd)
            raise


def _check_depth(home: ServerHome) -> None:
    """SQLite says only that it is unable to open a file."""
    length = len(os.fsencode(home.database))
    if length > MAX_DATABASE_PATH:
        raise ServerFailed(
            f"{home.root} is too long a path for a local Prefect server: its database would have {length} bytes, "
            f"SQLite opens {MAX_DATABASE_PATH}",
            "use a run.dir with a shorter path, or set PREFECT_API_URL to a Prefect server that answers",
        )


def _api_url(port: int) -> str:
    return f"http://{HOST}:{port}/api"


def read_record(home: ServerHome) -> ServerRecord | None:
    """What the newest supervisor wrote about its server, alive or not."""
    try:
        return msgspec.json.decode(files.read_limited(home.record, 4096), type=ServerRecord)
    except (OSError, ValueError):
        return None


def _find(home: ServerHome, timeout: float) -> int:
    """Port of the running server (waited for while its supervisor is starting it again), or 0."""
    deadline = time.monotonic() + timeout
    while _is_locked(home.supervisor) and time.monotonic() < deadline:
        record = read_record(home)
        if record is not None and not record.server.is_here:
            raise ServerFailed(f"{home.root} is in use by a Prefect server on {record.server.host}")
        if record is not None and is_ready(_api_url(record.port)):
            return record.port
        time.sleep(_POLL_SECS)
    if _is_locked(home.supervisor):
        raise ServerFailed(f"the Prefect server of {home.root} does not answer\n{_log_tail(home)}")
    return 0


def _start(home: ServerHome, timeout: float) -> int:
    record = read_record(home)
    port = record.port if record is not None and _is_free(record.port) else _free_port()
    for _ in range(_TRIES):
        home.record.unlink(missing_ok=True)  # what it says is no longer true, and the port may be somebody else's
        _spawn_supervisor(home, port)
        found = _find(home, timeout)
        if found:
            return found
        if _is_free(port):
            break
        port = _free_port()  # somebody took it meanwhile
    raise ServerFailed(f"the local Prefect server did not start; the end of {home.log}:\n{_log_tail(home)}")


def _spawn_supervisor(home: ServerHome, port: int) -> None:
    """Returns when the supervisor has its lock and lives on its own, in its own session."""
    command = [sys.executable, "-m", "perdure.deployments.supervisor", str(home.root), str(port)]
    home.log.unlink(missing_ok=True)
    environment = _server_environment(home) | {"PREFECT_UI_API_URL": _api_url(port)}  # its pages would ask port 4200
    with files.open_private(home.log) as log:
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False, cwd=home.root
        )  # fmt: skip


def _server_environment(home: ServerHome) -> dict[str, str]:
    """The caller's environment without secrets and Prefect settings, and the settings of facts/ui.md section 6."""
    dropped = ("PREFECT_", "SLACK_", "AWS_", "PERDURE_FAIL")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(dropped) or key in _SERVER_KEEPS}
    return environment | {
        "PREFECT_HOME": str(home.root),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P7D",
        "PREFECT_UI_STATIC_DIRECTORY": str(home.root / "ui"),  # by default inside site-packages, shared by all servers
    }


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _log_tail(home: ServerHome, lines: int = 20) -> str:
    try:
        return "\n".join(home.log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log)"


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    """Held by anyone, shared or not; looking hinders only who tries at this very moment, and all who try do so again."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _holding(path: Path, timeout: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
    deadline = time.monotonic() + timeout
    try:
        while not _try_lock(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ServerFailed(f"{path} stays locked: another run has been starting a Prefect server for {timeout:.0f} s")
            time.sleep(_POLL_SECS)
        yield
    finally:
        os.close(fd)
