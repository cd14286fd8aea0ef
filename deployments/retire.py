"""Takes a retired run off a Prefect server: its automations first, then its deployments with their schedules and waiting flow
runs. What it trained stays: nothing here touches a run directory or a store."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.deployments import automations
from perdure.deployments.deploy import Item
from perdure.training.errors import RunBusy

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

_PAGE = 200


def retire(client: "SyncPrefectClient", name: str, *, dry_run: bool = False) -> Iterator[Item]:
    """Everything `deploy` made for the run of that name, one Item after the other; none where there is nothing. Raises RunBusy
    while a flow run of it is under way."""
    found = _deployments(client, [f"run:{name}"])
    _refuse_if_busy(client, name, found)
    for title in automations.names_of(name):
        for automation in client.read_automations_by_name(title):
            if not dry_run:
                client.delete_automation(automation.id)
            yield Item(kind="automation", name=title, action="removed")
    for one in found:
        if not dry_run:
            client.delete_deployment(one.id)
        verb = (one.entrypoint or "").rpartition(":")[2]
        yield Item(kind="deployment", name=f"{verb}/{one.name}", action="removed")


def orphans(client: "SyncPrefectClient") -> Iterator[tuple[str, Path]]:
    """Runs that are deployed, and whose run.toml is not on this machine: name and where it should be."""
    for one in _deployments(client, ["train"]):
        path = Path(str(one.parameters.get("config", "")))
        if path.is_absolute() and not path.exists():
            yield one.name, path


def _deployments(client: "SyncPrefectClient", tags: Sequence[str]) -> "list[DeploymentResponse]":
    """Those of ours that have all of these tags."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    wanted = DeploymentFilter(tags=DeploymentFilterTags(all_=["perdure", *tags]))
    found: list[DeploymentResponse] = []
    while page := client.read_deployments(deployment_filter=wanted, limit=_PAGE, offset=len(found)):
        found += page
    return found


def _refuse_if_busy(client: "SyncPrefectClient", name: str, found: "Sequence[DeploymentResponse]") -> None:
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )  # fmt: skip
    from prefect.client.schemas.objects import StateType

    if not found:
        return
    busy = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[one.id for one in found])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING]))
        ),
        limit=1,
    )
    if busy:
        raise RunBusy(
            f"run {name}: its flow run {busy[0].name} is under way", "`perdure stop` it, or cancel it in Prefect, first"
        )
