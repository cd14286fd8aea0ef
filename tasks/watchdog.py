"""What a watchdog does in Prefect about a dead run: close its rows, find its deployment, start the one flow run that goes on.

Rows are closed under the run's lock; the successor needs that lock itself, and is alone by its idempotency key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from perdure.tasks import flow_runs
from perdure.tasks.close_rows import close_dead
from perdure.training.checkpoint.lineage import read_launches
from perdure.training.run_dir import RunDir

_PAGE = 200
_KEYS = 50
_WAITING = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]


@dataclass(frozen=True, kw_only=True)
class Route:
    """The deployment through which a run goes on, with the parameters of the flow run that died."""

    deployment: UUID
    parameters: dict[str, Any]  # Any: JSON values
    key: str
    """Of the one flow run that follows; the same as the crash hook's."""


def close_rows(client: SyncPrefectClient, run: RunDir, config: Path | None) -> int:
    """How many rows in Prefect were closed that a dead process had left open."""
    return close_dead(client, run, config=str(config or ""), overrides=[])


def route(client: SyncPrefectClient, run: RunDir, config: Path | None) -> Route | None:
    """The dead flow run's own deployment, else one for this run.toml; None where there is none."""
    known = next(reversed(flow_runs.read(run)), None)
    parameters: dict[str, Any] = {"config": str(config)} if config else {}  # Any: JSON values
    key = f"{known.id}:restart" if known else f"{run.root}:{max(read_launches(run), default=0)}:watchdog"
    if known is not None:
        try:
            dead = client.read_flow_run(UUID(known.id))
        except ObjectNotFound:
            dead = None
        if dead is not None:
            parameters = dead.parameters
            if dead.deployment_id is not None:
                return Route(deployment=dead.deployment_id, parameters=parameters, key=key)
    wanted = parameters.get("config")
    mine = [one for one in _train_deployments(client) if (one.parameters or {}).get("config") == wanted] if wanted else []
    return Route(deployment=mine[0].id, parameters={**mine[0].parameters, **parameters}, key=key) if len(mine) == 1 else None


def _train_deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    found: list[DeploymentResponse] = []
    train = FlowFilter(name=FlowFilterName(any_=["train"]))
    while page := client.read_deployments(flow_filter=train, limit=_PAGE, offset=len(found)):
        found += page
    return found


def waiting(client: SyncPrefectClient, found: Route) -> FlowRun | None:
    """A flow run of this run that is scheduled or at work already."""
    states = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_WAITING)))
    deployment = DeploymentFilter(id=DeploymentFilterId(any_=[found.deployment]))
    all_open = client.read_flow_runs(flow_run_filter=states, deployment_filter=deployment, limit=_PAGE)
    return next((one for one in all_open if one.parameters.get("config") == found.parameters.get("config")), None)


def start_successor(found: Route, *, since: int, deaths: int) -> FlowRun:
    """The flow run that goes on, the same one for everybody who asks. A successor that died before it could enter the run
    directory is followed by its own."""
    key = found.key
    for _ in range(_KEYS):
        following = run_deployment(
            found.deployment,
            timeout=0,
            as_subflow=False,
            idempotency_key=key,
            parameters={**found.parameters, "since": since, "deaths": deaths},
        )
        assert isinstance(following, FlowRun)  # a coroutine only in an event loop
        started = following
        if started.state is None or not started.state.is_final():
            break
        key = f"{started.id}:restart"
    return started
