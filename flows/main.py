"""The flow process of `perdure run`: runs the training flow once and tells its parent, in one JSON line, how it ended."""

import argparse
import json
import os
import signal
import sys
from typing import Any

from perdure.training import files
from perdure.training.process import die_with_parent

CRASHED = 70  # EX_SOFTWARE: the flow itself died; the parent decides


def outcome_of(state: Any) -> dict[str, Any]:  # Any: a Prefect state; JSON values
    """Exit code, message and result of a finished flow run."""
    from perdure.training.errors import PerdureError, Stopped

    if state.is_completed():
        return {"exit_code": 0, "message": "", "hint": "", "result": state.result()}
    if state.is_cancelled():
        return {"exit_code": Stopped.exit_code, "message": state.message or "stopped", "hint": "the same command goes on"}
    error = state.result(raise_on_failure=False)
    if isinstance(error, PerdureError):
        return {"exit_code": error.exit_code, "message": str(error), "hint": error.hint}
    return {"exit_code": CRASHED, "message": state.message or "the flow crashed", "hint": ""}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--replan", action="store_true")
    parser.add_argument("--since", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent, signal.SIGTERM)
    files.set_role("flow")
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Prefect or its plugins print belongs to the log
    from perdure.flows.train import train

    state = train(options.config, options.set, options.replan, since=options.since, return_state=True)
    outcome = outcome_of(state)
    answer.write(json.dumps(outcome) + "\n")
    answer.close()
    return int(outcome["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
