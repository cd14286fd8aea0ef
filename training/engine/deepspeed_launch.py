"""What the agent starts for `launch.launcher = "deepspeed"`: DeepSpeed's launcher of one node, which only starts the ranks. It
hands each the variables and devices that it would have under the `deepspeed` command."""

import base64
import json
import os
import signal
import sys
from types import SimpleNamespace

from deepspeed.launcher import launch

from perdure.training.engine.loopback import HOST, become_launcher, meeting_place


def _for_ever(_: float) -> None:
    """Instead of its pause between two looks at the ranks: the agent must be the one to learn how they ended."""
    while True:
        signal.pause()


def main() -> None:
    become_launcher()
    store = meeting_place()
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # rank 0 is to open none
    ranks = {"localhost": list(range(int(sys.argv[1])))}
    sys.argv = [
        "deepspeed",
        f"--world_info={base64.urlsafe_b64encode(json.dumps(ranks).encode()).decode()}",
        f"--master_addr={HOST}",
        f"--master_port={store.port}",
        "--no_local_rank",
        "--module",
        "perdure.training.engine.main",
    ]
    launch.time = SimpleNamespace(sleep=_for_ever)
    launch.main()


if __name__ == "__main__":
    main()
