"""push in a process of its own, for the tests that kill it (PERDURE_FAIL): `URL SETTINGS RUN CHECKPOINT`."""

import json
import sys
from pathlib import Path

from perdure.training import files
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import StoreSettings, open_store
from perdure.training.travel.push import push

if __name__ == "__main__":
    url, settings, root, text = sys.argv[1:]
    name = CheckpointName.parse(text)
    assert name
    files.set_role("push")
    push(RunDir(Path(root)), open_store(url, StoreSettings(**json.loads(settings))), name)
