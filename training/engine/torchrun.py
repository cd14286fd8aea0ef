"""What the agent starts for several ranks: torchrun, which ends with the agent and only starts them. Watching them and starting
again is ours."""

import os
import sys

from perdure.training.process import die_with_parent

_NEVER = "86400"
"""Seconds between its looks at the ranks. The agent watches them, and must be the one to learn how they ended."""


def main() -> None:
    die_with_parent(int(os.environ["PERDURE_AGENT_PID"]))
    os.environ["PERDURE_AGENT_PID"] = str(os.getpid())  # the parent that the ranks are to look for
    from torch.distributed.run import main as torchrun

    local = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0"]
    torchrun([*local, f"--nproc-per-node={sys.argv[1]}", f"--monitor-interval={_NEVER}", "-m", "perdure.training.engine.main"])


if __name__ == "__main__":
    main()
