"""What Prefect itself watches for a run: heartbeats of its flow runs that stop, and chunks that do not come.

Compared before it is touched: updating an automation disarms it for the flow runs that are under way."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.actions import ActionTypes
    from prefect.events.schemas.automations import AutomationCore

HEARTBEAT_SECS = 180.0
"""Six heartbeats: a server or network that is away for a minute is no death."""
STALL_SECS = 6 * 3600.0
_STALE, _STUCK = "stale heartbeat", "no progress"
_LEFT = ("Completed", "Failed", "Crashed", "Cancelled", "Cancelling")


def names_of(run: str) -> list[str]:
    """Of all automations of one run."""
    return [_name(run, what) for what in (_STALE, _STUCK)]


def _name(run: str, what: str) -> str:
    return f"perdure {run}: {what}"


def stale_heartbeat(
    run: str, deployments: Sequence[UUID], then: "Sequence[ActionTypes]", within: float = HEARTBEAT_SECS
) -> "AutomationCore":
    """Close the row of a flow run, of training or upkeep, whose process and worker are gone, as no hook runs for it; `then`
    what else to do. A closed one no longer takes the place of the next."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    crash = ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=f"No heartbeat for {within:g} s.", force=False)
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=_of(*deployments),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=within),
    )
    about = "A flow run of this training run sends no heartbeat any more: its row is closed."
    return AutomationCore(name=_name(run, _STALE), description=about, trigger=trigger, actions=[crash, *then])


def no_progress(run: str, deployment: UUID, then: "Sequence[ActionTypes]", within: float = STALL_SECS) -> "AutomationCore":
    """Say so when a launch or a chunk is followed by no other for `within` seconds while the flow run goes on."""
    from prefect.events.actions import DoNothing
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    from perdure.tasks.pulse import CHUNK, LAUNCHED

    trigger = EventTrigger(
        after={LAUNCHED, CHUNK},
        expect={LAUNCHED, CHUNK, *(f"prefect.flow-run.{name}" for name in _LEFT)},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=_of(deployment),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=within),
    )
    about = "No chunk of this training run was finished for too long."
    return AutomationCore(name=_name(run, _STUCK), description=about, trigger=trigger, actions=[*(then or [DoNothing()])])


def _of(*deployments: UUID) -> dict[str, str | list[str]]:
    return {"prefect.resource.id": [f"prefect.deployment.{one}" for one in deployments], "prefect.resource.role": "deployment"}


def plain(automation: "AutomationCore") -> dict[str, Any]:  # Any: JSON values
    """What counts when two are compared: not the ids the server gives, nor whether a person switched it off."""
    return dict(_bare(automation.model_dump(mode="json", exclude={"id", "enabled", "owner_resource"})))


def _bare(value: Any) -> Any:  # Any: JSON values
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items() if key != "id" and one not in (None, {}, [])}
    if isinstance(value, list):
        items = [_bare(one) for one in value]
        return sorted(items) if all(isinstance(item, str) for item in items) else items
    return value


def put(client: "SyncPrefectClient", wanted: "AutomationCore", found: "list[Any]") -> None:  # Any: the client's Automation
    """Create it, or change the one that is there; doubles of its name go."""
    for double in found[1:]:
        client.delete_automation(double.id)
    if not found:
        client.create_automation(wanted)
    elif plain(found[0]) != plain(wanted):
        client.update_automation(found[0].id, wanted.model_copy(update={"enabled": found[0].enabled}))
