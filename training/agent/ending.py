"""How a launch has ended, in the words of its agent: complete, stopped, or failed and why."""

import os
import time
from pathlib import Path

from perdure.training.agent.ranks import Ranks
from perdure.training.checkpoint.lineage import LaunchEnd
from perdure.training.config import RunConfig
from perdure.training.redact import redact

LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 8000


def describe(config: RunConfig, token: int, ranks: Ranks, stop_reason: str, *, saving: bool) -> LaunchEnd:
    """Of these ranks, which are gone. `stop_reason`: why they were asked to stop, if they were; `saving`: something they left
    is not committed."""
    error_class, detail = ranks.failure
    whole = ranks.status == 0 and not saving
    left = ranks.left and ranks.status == 0  # where what they left was not saved in time, that is no fault of theirs
    if ranks.finished and whole:
        reason, error_class, detail = "complete", "", ""
    elif (ranks.stopped and whole) or (stop_reason and not error_class and (ranks.killed or left)):
        reason, detail = "stopped", stop_reason or f"{ranks.name} was asked to stop"
    else:
        reason = "failed"
        silent_class, silent_detail = ranks.silent_end
        error_class, detail = error_class or silent_class, detail or silent_detail
    seen = {**os.environ, **config.launch.env}  # by the ranks, which may have printed it
    return LaunchEnd(
        token=token,
        reason=reason,
        error_class=error_class,
        step=ranks.step,
        detail=redact(detail, seen),
        log_tail=redact(_tail(ranks.log_path), seen),
        ended=time.time(),
    )


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])
    except FileNotFoundError:
        return ""
