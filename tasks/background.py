"""Work beside training gives way to it: lower CPU priority for the thread that does it."""

import contextlib
import os
import threading

_NICENESS = 10


def yield_to_training() -> None:
    """Nice the calling thread (Linux gives each thread its own value)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
