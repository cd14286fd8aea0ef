"""What Prefect has written down about a run."""

from typing import Any
from uuid import UUID

from harness import Run
from prefect import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun


def flow_runs_of(run: Run) -> list[FlowRun]:
    """Those that trained it, oldest first."""
    return _found(run, flow_filter=FlowFilter(name=FlowFilterName(any_=["train"])))


def deployed_flow_runs_of(run: Run, *names: str) -> list[FlowRun]:
    """Those of deployments of these names, upkeep included, that no schedule made; oldest first."""
    found = _found(run, deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(names))))
    return [one for one in found if not one.auto_scheduled]


def _found(run: Run, **filters: Any) -> list[FlowRun]:
    """By pages: one holds 200, and what other tests' schedules plan comes first. What begins meanwhile shifts them: a row of
    two pages is one."""
    ours: dict[UUID, FlowRun] = {}
    offset = 0
    with get_client(sync_client=True) as client:
        while page := client.read_flow_runs(**filters, offset=offset):
            ours |= {one.id: one for one in page if one.parameters.get("config") == str(run.toml)}
            offset += len(page)
    return sorted(ours.values(), key=lambda one: one.created)
