"""The example's model in a loop that notes when each step ended; the same file runs under Perdure and bare."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from perdure.training import Session


def train(session: Session) -> None:
    from examples.gpt import train as example

    os.sched_setaffinity(0, {0})  # the trainer has one core, whatever saves has the other
    ends: list[float] = []

    class Timed:
        """The session as the example sees it, with a clock between its steps."""

        def __getattr__(self, name: str) -> object:
            return getattr(session, name)

        def steps(self) -> Iterator[int]:
            for step in session.steps():
                yield step
                ends.append(time.perf_counter())

    example.train(cast(Session, Timed()))
    Path(session.params["times"]).write_text(json.dumps(ends))


if __name__ == "__main__":
    train(Session.by_hand(Path(__file__).parent / "run.toml", *sys.argv[1:]))
