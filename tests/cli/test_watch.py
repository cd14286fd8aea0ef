"""What `perdure run` prints of each event: one readable line, whatever the event holds."""

import pytest

from perdure.cli.render import visible
from perdure.cli.watch import describe
from perdure.training.events import Event

LINES = {
    "chunk": (
        "chunk_finished",
        {"start": 11, "end": 20, "seconds": 4.0, "loss": 0.5},
        "chunk 11-20 of 100 done, loss 0.5000, 2.50 steps/s, 0:00:32 left",
    ),
    "days": (
        "chunk_finished",
        {"start": 1, "end": 10, "seconds": 36_000.0, "loss": None},
        "chunk 1-10 of 100 done, 0.00 steps/s, 90:00:00 left",
    ),
    "no time": ("chunk_finished", {"start": 1, "end": 10, "seconds": 0.0, "loss": None}, "chunk 1-10 of 100 done"),
    "small": (
        "checkpoint_committed",
        {"name": "n", "stored_bytes": 8926, "raw_bytes": 10889, "seconds": 0.061},
        "committed checkpoint n: 8.9 kB of 10.9 kB raw, 0.06 s",
    ),
    "braces": (
        "failed",
        {"step": 3, "error_class": "user", "detail": "{oops} %s", "next": "not restarting"},
        "FAILED at step 3 (user): {oops} %s; not restarting",
    ),
    "missing": ("failed", {"detail": "x"}, "FAILED at step ? (?): x; ?"),
    "said in words": ("waiting_for_slot", {"step": 3, "text": "training waits at step 3"}, "training waits at step 3"),
    "unknown": ("sung", {"song": 1}, 'sung {"song": 1}'),
}


@pytest.mark.parametrize("case", LINES)
def test_event_is_one_readable_line(case: str) -> None:
    kind, data, line = LINES[case]
    assert describe(Event(kind=kind, time=0.0, data=data), 100) == line


def test_text_from_elsewhere_cannot_steer_the_terminal() -> None:
    assert visible("a\x1b[31m\x07\r\x9b\udc80\u202e\u2603 \xe9") == "a\\x1b[31m\\x07\\r\\x9b\\udc80\\u202e\u2603 \xe9"
    assert visible("two\nlines") == "two\nlines"
