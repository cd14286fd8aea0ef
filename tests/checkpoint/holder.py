"""A process that holds a checkpoint (`shared`, or `alone` as whoever deletes): `HOW FOLDER`. Says what it got, holds until a
line comes, and `remove` there removes the manifest first."""

import sys
from pathlib import Path

from perdure.training.checkpoint.hold import hold, try_hold_alone
from perdure.training.errors import CheckpointNotFound

if __name__ == "__main__":
    how, folder = sys.argv[1], Path(sys.argv[2])
    print("ready", flush=True)
    try:
        with hold(folder) if how == "shared" else try_hold_alone(folder) as held:
            print("busy" if held is False else "held", flush=True)
            if sys.stdin.readline().strip() == "remove":
                (folder / "manifest.json").unlink()
    except CheckpointNotFound:
        print("gone", flush=True)
