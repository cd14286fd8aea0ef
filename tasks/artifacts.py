"""Shows a run in Prefect's UI: three artifacts per flow run (progress, report, checkpoints), patched in place, and its tags.

From a thread of its own with its own short patience: a server that fails or hangs is noted once and never holds training up."""

import contextlib
import contextvars
import re
import threading
import time
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import msgspec
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from perdure.tasks import background, close_rows, flow_runs, page
from perdure.tasks.curve import Curve
from perdure.tasks.flow_runs import FlowRunRecord
from perdure.tasks.ui import page_of
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.config import RunConfig
from perdure.training.errors import PerdureError
from perdure.training.redact import redact

MIN_SECS = 15.0
"""Between two updates, however short the chunks are."""
REFRESH_SECS = 300.0
"""A long chunk is shown as it goes."""
TIMEOUT_SECS = 10.0
HURRIED_SECS, CALM_SECS = 6.0, 20.0
"""How long the last update may take: where the flow has to leave, and where the run is complete."""
_OVER = " (this one is over; below is what it drew last)"
_TROUBLE = (httpx.HTTPError, PrefectException, PerdureError, OSError, ValueError, RuntimeError)


class Board:
    """One flow run's view of the run. `ask` after something happened; `close` at the end."""

    def __init__(self, config: RunConfig, overrides: list[str], flow_run_id: str, tags: list[str], logger: Any) -> None:
        # Any: Logger or LoggerAdapter
        self.config, self.overrides, self.id, self.tags, self.logger = config, overrides, flow_run_id, tags, logger
        self.run = config.directory
        self.record: FlowRunRecord | None = None
        if flow_run_id:
            with contextlib.suppress(OSError):  # a full disk: a run without a picture
                self.record = flow_runs.enter(self.run, flow_run_id, page_of(flow_run_id))
        self.live = False
        """A launch is under way."""
        self.min_secs = MIN_SECS
        self._artifacts: dict[str, UUID] = {}
        self._shown: dict[str, object] = {}
        self._curve = Curve(self.run, config.run.steps)
        self._begun = self._troubled = False
        self._asked, self._closing = threading.Event(), threading.Event()
        context = contextvars.copy_context()  # Prefect's settings
        self._thread = threading.Thread(target=lambda: context.run(self._work), name="artifacts", daemon=True)
        if self.record is not None:
            self._thread.start()

    def ask(self) -> None:
        """Show what is new, soon; returns at once."""
        self._asked.set()

    def close(self, within: float) -> None:
        """Show the end, if the server takes it within so many seconds, and write down that this process left in order."""
        self._closing.set()
        self._asked.set()
        if self.record is not None:
            self._thread.join(within)
            self.record.ended = time.time()
            with contextlib.suppress(OSError):
                flow_runs.write(self.run, self.record)

    def _work(self) -> None:
        background.yield_to_training()
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while not self._closing.is_set():
                self._asked.wait(REFRESH_SECS)
                self._asked.clear()
                self._try()
                self._closing.wait(self.min_secs)
            self._try()

    def _try(self) -> None:
        try:
            with get_client(httpx_settings={"timeout": TIMEOUT_SECS}, sync_client=True) as client:
                if not self._begun:
                    self._begin(client)
                self._show(client)
        except _TROUBLE as error:
            if not self._troubled:
                said = redact(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
                self.logger.warning("The Prefect UI could not be told (%s); training goes on, it is tried again later.", said)
            self._troubled = True
        else:
            self._troubled = False

    def _begin(self, client: SyncPrefectClient) -> None:
        closed = close_rows.close_dead(
            client, self.run, config=str(self.config.path), overrides=self.overrides, successor=self.id
        )
        if closed:
            self.logger.info("Closed %d rows that a dead process had left open in Prefect.", closed)
        before = [record for record in flow_runs.read(self.run) if record.id != self.id and record.report]
        if before:
            self._link_forward(client, before[-1])
        self._begun = True

    def _link_forward(self, client: SyncPrefectClient, before: FlowRunRecord) -> None:
        """The flow run before this one names it from now on: the first line of its report is its links."""
        text = _read(client, before.report)
        if text is not None:
            rest = text.partition("\n\n")[2]
            update = ArtifactUpdate(data=f"{self._links(before.id)}{_OVER}\n\n{rest}")
            client.update_artifact(UUID(before.report), update)

    def _links(self, of: str) -> str:
        """Every flow run of the run in order, linked; the page it stands on is bold."""
        base = urlsplit(str(get_current_settings().ui_url or "")).path.rstrip("/")
        records = flow_runs.read(self.run)
        shown = [
            f"**{number}**" if record.id == of else f"[{number}]({base}/v2/runs/flow-run/{record.id})"
            for number, record in enumerate(records, 1)
        ]
        return "Flow runs of this run: " + (" ... " if len(shown) > 20 else "") + ", ".join(shown[-20:])

    def _show(self, client: SyncPrefectClient) -> None:
        if not self.run.run_json.exists():
            return  # still being brought back from the store
        info = msgspec.structs.replace(read_run_info(self.run), steps=self.config.run.steps)  # it may have grown since
        shown = page.render(self.run, info, self._curve, links=self._links(self.id), live=self.live)
        self._tag(client, info.id, shown.launch)
        key = slug(info.id)
        self._put(client, "progress", f"progress-{key}", shown.percent, shown.card)
        self._put(client, "markdown", f"report-{key}", shown.report, shown.summary)
        self._put(client, "table", f"checkpoints-{key}", shown.checkpoints, shown.about_checkpoints)

    def _tag(self, client: SyncPrefectClient, run_id: str, launch: int) -> None:
        wanted = [f"run:{self.config.run.name}", f"id:{run_id}"] + [f"launch:{launch}"] * (launch > 0)
        if not set(wanted) <= set(self.tags):
            tags = list(dict.fromkeys([*self.tags, *wanted]))
            client.update_flow_run(UUID(self.id), tags=tags)
            self.tags = tags

    def _put(self, client: SyncPrefectClient, kind: str, key: str, data: Any, description: str) -> None:  # Any: JSON values
        """One row per kind and flow run, created once, patched after."""
        if self._shown.get(kind) == (data, description):
            return
        if kind in self._artifacts:
            client.update_artifact(self._artifacts[kind], ArtifactUpdate(data=data, description=description))
        else:
            wanted = ArtifactCreate(key=key, type=kind, data=data, description=description, flow_run_id=UUID(self.id))
            self._artifacts[kind] = client.create_artifact(wanted).id
            if kind == "markdown" and self.record is not None:
                self.record.report = str(self._artifacts[kind])
                flow_runs.write(self.run, self.record)
        self._shown[kind] = (data, description)


def _read(client: SyncPrefectClient, artifact_id: str) -> str | None:
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterId

    found = client.read_artifacts(artifact_filter=ArtifactFilter(id=ArtifactFilterId(any_=[UUID(artifact_id)])))
    return found[0].data if found and isinstance(found[0].data, str) else None


def slug(run_id: str) -> str:
    """A key of Prefect's: lowercase letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", run_id.lower()).strip("-")
