"""Registers training runs with a Prefect server: work pool, deployments, automations. Compares first and touches only what
differs, so a second time changes nothing; what a person switched off in the UI stays off."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from perdure.deployments import automations
from perdure.deployments.table import Wanted, wanted_for
from perdure.training.config import RunConfig
from perdure.training.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.events.actions import ActionTypes

Fields = dict[str, Any]  # Any: JSON values
Action = Literal["created", "changed", "unchanged", "removed", "found", "not there", "forbidden"]


@dataclass(frozen=True)
class Change:
    field: str
    old: Any  # Any: JSON values
    new: Any


@dataclass(frozen=True, kw_only=True)
class Item:
    """What happened (or, in a dry run, would happen) to one thing on the server."""

    kind: Literal["work pool", "deployment", "automation", "secret block"]
    name: str
    action: Action
    changes: list[Change] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Settings:
    pool: str
    stall_secs: float = automations.STALL_SECS
    heartbeat_secs: float = automations.HEARTBEAT_SECS
    notify_block: str = ""
    """`type-slug/name` of a notification block, told of a stall; its secret stays in the block."""


def deploy(
    client: "SyncPrefectClient",
    runs: Sequence[RunConfig],
    settings: Settings,
    *,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
) -> Iterator[Item]:
    """Make the server as it shall be, one Item after the other. Raises ConfigError when a run cannot be registered."""
    _unique(runs)
    block = _block(client, settings.notify_block)
    yield _pool(client, settings.pool, dry_run)
    yield from _secrets(client, runs)
    for config in runs:
        wanted = wanted_for(config, overrides, settings.pool)
        ids: dict[str, UUID | None] = {}
        for one in wanted:
            item, ids[one.verb] = _deployment(client, one, dry_run)
            yield item
        yield from _automations(client, config.run.name, ids, settings, block, dry_run)


def _unique(runs: Sequence[RunConfig]) -> None:
    paths = {config.run.name: config.path for config in runs}
    for config in runs:
        if paths[config.run.name] != config.path:
            raise ConfigError(
                f"{config.path} and {paths[config.run.name]} both name their run {config.run.name!r}",
                "give each its own run.name: it names the deployment",
            )


# work pool


def _pool(client: "SyncPrefectClient", name: str, dry_run: bool) -> Item:
    """An existing one stays as it is, of whatever type: it may be a Kubernetes pool that somebody made with care."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        client.read_work_pool(name)
        return Item(kind="work pool", name=name, action="unchanged")
    except ObjectNotFound:
        if not dry_run:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
        return Item(kind="work pool", name=name, action="created")


# secrets


def _secrets(client: "SyncPrefectClient", runs: Sequence[RunConfig]) -> Iterator[Item]:
    """Only looked for: their values are the flows' business."""
    from perdure.tasks import blocks

    for variable in dict.fromkeys(name for config in runs for name in blocks.wanted(config)):
        yield Item(kind="secret block", name=blocks.block_of(variable), action=blocks.look_for(client, variable))


# deployments


def _deployment(client: "SyncPrefectClient", wanted: Wanted, dry_run: bool) -> tuple[Item, UUID | None]:
    from prefect.exceptions import ObjectNotFound

    try:
        found = client.read_deployment_by_name(wanted.full_name)
    except ObjectNotFound:
        made = None if dry_run else _create(client, wanted)
        return Item(kind="deployment", name=wanted.full_name, action="created"), made
    changes = list(_differences(_fields_of(found), wanted.fields))
    if changes and not dry_run:
        _update(client, found, wanted, {change.field.partition(".")[0] for change in changes})
    action: Action = "changed" if changes else "unchanged"
    return Item(kind="deployment", name=wanted.full_name, action=action, changes=changes), found.id


def _fields_of(found: "DeploymentResponse") -> Fields:
    """What the server has, in the terms of Wanted.fields."""
    options = found.concurrency_options.model_dump(mode="json", exclude_none=True) if found.concurrency_options else {}
    limit = {"limit": found.global_concurrency_limit.limit} if found.global_concurrency_limit else {}
    schedules = [
        {
            "slug": one.slug,
            "cron": getattr(one.schedule, "cron", str(one.schedule)),
            "timezone": getattr(one.schedule, "timezone", None),
            "active": one.active,
        }
        for one in found.schedules
    ]
    return {
        "entrypoint": found.entrypoint,
        "version": found.version,
        "description": found.description,
        "tags": sorted(found.tags),
        "parameters": found.parameters,
        "work_pool": found.work_pool_name,
        "job_variables": found.job_variables,
        "concurrency": {**limit, **options},
        "schedules": sorted(schedules, key=lambda one: str(one["slug"])),
        "pull_steps": found.pull_steps or [],
        "enforce_parameter_schema": found.enforce_parameter_schema,
        "parameter_schema": found.parameter_openapi_schema,
    }


def _differences(old: Fields, new: Fields) -> Iterator[Change]:
    for name, value in new.items():
        before = old[name]
        if name == "schedules":
            if _timed(before) != _timed(value):
                yield Change(name, before, value)
        elif name in ("parameters", "concurrency") and isinstance(before, dict):
            for key in sorted({*before, *value}):
                if before.get(key) != value.get(key):
                    yield Change(f"{name}.{key}", before.get(key), value.get(key))
        elif before != value:
            yield Change(name, before, value)


def _timed(schedules: list[Fields]) -> list[Fields]:
    """Without the switch, which belongs to people once the schedule exists."""
    return [{key: value for key, value in one.items() if key != "active"} for one in schedules]


def _create(client: "SyncPrefectClient", wanted: Wanted) -> UUID:
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    fields = _for_server(wanted.fields, {})
    fields["schedules"] = [DeploymentScheduleCreate(**one) for one in fields["schedules"]]
    return client.create_deployment(client.create_flow_from_name(wanted.flow), wanted.name, **fields)


def _update(client: "SyncPrefectClient", found: "DeploymentResponse", wanted: Wanted, changed: set[str]) -> None:
    from prefect.client.schemas.actions import DeploymentScheduleUpdate, DeploymentUpdate

    active = {one.slug: one.active for one in found.schedules}
    fields = _for_server({name: wanted.fields[name] for name in changed}, active)
    if "schedules" in fields:
        fields["schedules"] = [DeploymentScheduleUpdate(**one) for one in fields["schedules"]]
    client.update_deployment(found.id, DeploymentUpdate(**fields))


def _for_server(fields: Fields, active: dict[str | None, bool]) -> Fields:
    """The same in the terms of Prefect's API."""
    from prefect.client.schemas.objects import ConcurrencyOptions
    from prefect.client.schemas.schedules import CronSchedule

    result = dict(fields)
    if "work_pool" in result:
        result["work_pool_name"] = result.pop("work_pool")
    if "parameter_schema" in result:
        result["parameter_openapi_schema"] = result.pop("parameter_schema")
    if "concurrency" in result:
        options = dict(result.pop("concurrency"))
        result["concurrency_limit"] = options.pop("limit")
        result["concurrency_options"] = ConcurrencyOptions(**options)
    if "schedules" in result:
        result["schedules"] = [
            {
                "schedule": CronSchedule(cron=one["cron"], timezone=one["timezone"]),
                "active": active.get(one["slug"], one["active"]),
                "slug": one["slug"],
            }
            for one in result["schedules"]
        ]
    return result


# automations


def _automations(
    client: "SyncPrefectClient",
    run: str,
    ids: dict[str, UUID | None],
    settings: Settings,
    block: "list[ActionTypes]",
    dry_run: bool,
) -> Iterator[Item]:
    from prefect.events.actions import RunDeployment

    train, watchdog = ids["train"], ids.get("watchdog")
    if train is None:  # a dry run of what is not there yet
        for name in automations.names_of(run):
            yield Item(kind="automation", name=name, action="created")
        return
    restart: list[ActionTypes] = (
        [RunDeployment(source="selected", deployment_id=watchdog, parameters=None, job_variables=None)] if watchdog else []
    )
    for wanted in (
        automations.stale_heartbeat(run, [one for one in ids.values() if one is not None], restart, settings.heartbeat_secs),
        automations.no_progress(run, train, block, settings.stall_secs),
    ):
        found = client.read_automations_by_name(wanted.name)
        changes = list(_unlike(automations.plain(found[0]), automations.plain(wanted))) if found else []
        if not dry_run:
            automations.put(client, wanted, found)
        yield Item(kind="automation", name=wanted.name, action=_word(found, changes), changes=changes)


def _word(found: Sequence[object], changes: Sequence[Change]) -> Action:
    return "created" if not found else "changed" if changes or len(found) > 1 else "unchanged"


def _unlike(old: Fields, new: Fields, prefix: str = "") -> Iterator[Change]:
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _unlike(before, after, f"{prefix}{key}.")
        elif before != after:
            yield Change(f"{prefix}{key}", before, after)


def _block(client: "SyncPrefectClient", name: str) -> "list[ActionTypes]":
    """The notification action of a block that exists; its address stays with the server."""
    from prefect.events.actions import SendNotification
    from prefect.exceptions import ObjectNotFound

    if not name:
        return []
    kind, slash, document = name.partition("/")
    try:
        if not slash:
            raise ConfigError(f"--notify-block {name!r} is not TYPE/NAME", "write for example slack-webhook/ops")
        block = client.read_block_document_by_name(document, kind)
    except ObjectNotFound:
        raise ConfigError(
            f"--notify-block {name}: the server has no such block", "make it under Blocks, or with `prefect block create`"
        ) from None
    body = "{{ flow_run.name }} has finished no chunk for too long: {{ flow_run|ui_url }}"
    return [SendNotification(block_document_id=block.id, subject="Training stands still", body=body)]
