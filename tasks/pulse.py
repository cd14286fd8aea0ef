"""Tells Prefect that a training run moves: one event per launch and chunk, which the stall automation waits for.

On the flow run itself as resource, so that the flow run's own end closes the watch."""

from prefect.events import emit_event
from prefect.runtime import flow_run

LAUNCHED = "perdure.launched"
CHUNK = "perdure.chunk"


def pulse(event: str, step: int) -> None:
    """Queue the event; returns at once and does not mind a server that is away."""
    if flow_run.id:
        emit_event(event, resource={"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}, payload={"step": step})
