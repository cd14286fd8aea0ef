"""The Prefect server: answers, version, clock, lease storage, vacuum; the run's work pool and a worker that is online."""

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from perdure.deployments import api
from perdure.deployments.checks.finding import Finding, Subject, clock, fail, ok, skip_all, warn
from perdure.deployments.server import ServerFailed
from perdure.deployments.table import DEFAULT_POOL

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_ABOUT_SERVER = ("Prefect version", "Prefect clock", "Prefect leases", "Prefect vacuum")
_ABOUT_WORK = ("deployment", "work pool", "worker")
_MAX_SKEW_SECS = 60.0
_LEASES = "prefect.server.concurrency.lease_storage.filesystem"


def check_server(subject: Subject) -> Iterator[Finding]:
    """Everything that needs an answer of the API."""
    url = api.api_url()
    if not url:
        why = "no server is chosen (PREFECT_API_URL): `perdure run` and `perdure serve` start one of their own"
        yield from skip_all(["Prefect API", *_ABOUT_SERVER, *_ABOUT_WORK], why)
        return
    try:
        with api.connected() as client:
            began = time.time()
            answer = client.request("GET", "/admin/version")
            now = (began + time.time()) / 2
            alive = _has_database(client)
            if alive:
                yield ok("Prefect API", f"{url} answers")
            else:
                yield fail("Prefect API", f"{url} answers, but has no database (/ready)", "start its database, or see its log")
            yield _version(str(answer.json()))
            if answer.headers.get("date"):
                yield clock("Prefect clock", "the server", now - _stamp(answer.headers["date"]), _MAX_SKEW_SECS)
            yield from _settings(client.request("GET", "/admin/settings").json())
            yield from _work(client, subject) if alive else skip_all([*_ABOUT_WORK], "the server has no database")
    except ServerFailed as error:
        yield fail("Prefect API", str(error), error.hint)
        yield from skip_all([*_ABOUT_SERVER, *_ABOUT_WORK], "the server gives no answer")


def _has_database(client: "SyncPrefectClient") -> bool:
    """As the server says; asked once, where the client would go on asking for a minute."""
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        try:
            client.request("GET", "/ready")
        except PrefectHTTPStatusError as error:
            if error.response.status_code != 503:
                raise
            return False
    return True


def _stamp(date: str) -> float:
    return parsedate_to_datetime(date).timestamp() + 0.5  # the middle of the second it names


def _version(theirs: str) -> Finding:
    import prefect

    ours = prefect.__version__
    said = f"server {theirs}, here {ours}"
    if theirs.split(".")[0] != ours.split(".")[0]:
        return fail("Prefect version", said, f"install prefect {theirs} here, or {ours} there")
    if _minor(theirs) < _minor(ours):
        return warn("Prefect version", f"{said}: the server is older than its client", "update the server first")
    return ok("Prefect version", said)


def _minor(version: str) -> tuple[int, int]:
    major, minor = [*version.split("."), "0"][:2]
    return int(major), int(minor) if minor.isdigit() else 0


def _settings(settings: dict[str, Any]) -> Iterator[Finding]:  # Any: JSON values
    """As the server tells them; secrets in them are blanked by the server and not looked at here."""
    server = settings.get("server", {})
    storage = str(server.get("concurrency", {}).get("lease_storage", "?"))
    if storage.endswith(".memory"):
        fix = f"start the server with PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={_LEASES}"
        yield warn("Prefect leases", "kept in memory: a restart of the server ends every running flow with a limit", fix)
    else:
        yield ok("Prefect leases", f"kept by {storage.rpartition('.')[2]}")
    yield _vacuum(server.get("services", {}).get("db_vacuum", {}).get("enabled"))


def _vacuum(enabled: Any) -> Finding:  # Any: a list, a bool, or null
    kinds = sorted(enabled) if isinstance(enabled, list) else ["events", "flow_runs"] if enabled is True else []
    if "flow_runs" in kinds:
        return ok("Prefect vacuum", f"old rows are deleted: {', '.join(kinds)}")
    fix = "start the server with PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED=events,flow_runs"
    return warn("Prefect vacuum", "flow runs, logs and artifacts stay for ever", fix)


def _work(client: "SyncPrefectClient", subject: Subject) -> Iterator[Finding]:
    from prefect.exceptions import ObjectNotFound

    pool = subject.pool
    if subject.config is None:
        yield from skip_all(["deployment"], "no RUN.toml was named")
    else:
        name = f"train/{subject.config.run.name}"
        try:
            found = client.read_deployment_by_name(name)
            pool = pool or found.work_pool_name or ""
            yield ok("deployment", f"{name} in work pool {found.work_pool_name}")
        except ObjectNotFound:
            yield warn("deployment", f"{name} is not registered", f"perdure deploy {subject.config.path}")
    yield from _pool(client, pool or DEFAULT_POOL)


def _pool(client: "SyncPrefectClient", name: str) -> Iterator[Finding]:
    from prefect.exceptions import ObjectNotFound

    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        yield fail("work pool", f"{name} does not exist", "perdure deploy RUN.toml makes it")
        yield from skip_all(["worker"], "it has no pool")
        return
    if pool.is_paused:
        yield fail("work pool", f"{name} is paused", f"prefect work-pool resume {name}")
    else:
        yield ok("work pool", f"{name}, type {pool.type}")
    online = [worker.name for worker in client.read_workers_for_work_pool(name) if str(worker.status).endswith("ONLINE")]
    if online:
        yield ok("worker", f"{len(online)} online: {', '.join(online[:3])}")
    else:
        yield fail(
            "worker", f"none is online in {name}: nothing that is scheduled starts", f"prefect worker start --pool {name}"
        )
