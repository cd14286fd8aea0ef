"""The example's model in a loop that notes when each step ended; the same file runs under Perdure and bare."""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))
from perdure.training import Session


def train(session: Session) -> None:
    import train as example

    os.sched_setaffinity(0, {0})  # the trainer has one core, whatever saves has the other
    ends: list[float] = []

    class Timed:
        """The session as the example sees it, with a clock between its steps."""

        def __getattr__(self, name: str) -> object:
            return getattr(session, name)

        def steps(self):  # noqa: ANN202
            for step in session.steps():
                yield step
                ends.append(time.perf_counter())

    example.train(Timed())
    Path(session.params["times"]).write_text(json.dumps(ends))


if __name__ == "__main__":
    train(Session.by_hand(Path(__file__).parent / "run.toml", *sys.argv[1:]))
