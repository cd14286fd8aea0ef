"""push and pull in a process of its own, for the tests that kill it: `push URL SETTINGS RUN CHECKPOINT` (by PERDURE_FAIL), or
`pull URL SETTINGS RUN BYTES`, which ends in SIGKILL as soon as so many bytes have arrived."""

import json
import os
import signal
import sys
from pathlib import Path

from perdure.training import files
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import StoreSettings, open_store
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push

if __name__ == "__main__":
    verb, url, settings, root, last = sys.argv[1:]
    store = open_store(url, StoreSettings(**json.loads(settings)))
    files.set_role(verb)
    if verb == "push":
        name = CheckpointName.parse(last)
        assert name
        push(RunDir(Path(root)), store, name)
    else:
        pull(store, RunDir(Path(root)), progress=lambda done, _: done >= int(last) and os.kill(os.getpid(), signal.SIGKILL))
