"""A process of its own for the race and kill tests: `race URL SETTINGS NUMBER` or `upload URL SETTINGS KEY PATH`."""

import json
import os
import signal
import sys
from pathlib import Path

from perdure.training.storage.store import StoreSettings, open_store


def race(url: str, settings: str, number: str) -> None:
    """Ready; for each line on stdin one conditional put; prints who won."""
    store = open_store(url, StoreSettings(**json.loads(settings)))
    store.size("warm-up")
    print("ready", flush=True)
    for line in sys.stdin:
        print(int(store.put(f"race/{line.strip()}", number.encode(), if_absent=True)), flush=True)


def upload(url: str, settings: str, key: str, path: str, parts: str) -> None:
    """Dies by SIGKILL once that many parts are there."""
    done: list[int] = []

    def count(sent: int) -> None:
        done.append(sent)
        if len(done) == int(parts):
            os.kill(os.getpid(), signal.SIGKILL)

    open_store(url, StoreSettings(**json.loads(settings))).put_file(key, Path(path), progress=count)


if __name__ == "__main__":
    {"race": race, "upload": upload}[sys.argv[1]](*sys.argv[2:])
