"""What `Session.log` was given: a JSON line per step (of rank 0), and the loss statistics that travel with the state."""

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from perdure.training import files

_FLUSH_SECS = 1.0
_SMOOTHING = 0.98
_NAMES, _NAME_CHARS = 1000, 100
"""What a manifest holds of a user's names at most, so that it stays small."""
_Values = dict[str, Any]  # Any: floats, or 0-d tensors until they are flushed


class Metrics:
    """Values are held as they are (a device is not waited for) and turned into numbers when flushed, about once a second."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._waiting: list[tuple[int, float, _Values]] = []
        self._unwritten: list[str] = []
        self._flushed = time.monotonic()
        self.loss: dict[str, float] = {}
        """last, smoothed, least, count: the baseline against which a later loss is judged."""
        self.tokens = 0
        self.newest: dict[str, float] = {}
        """Name -> its newest value, of all but loss and tokens; none where that is not finite. A clock may be among them, so
        they are no part of the state: the manifest has them (`best` of retention), and a resume takes them from there."""

    def log(self, step: int, values: _Values) -> None:
        kept = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        self._waiting.append((step, time.time(), kept))

    def flush(self, *, force: bool = True) -> None:
        if not force and time.monotonic() - self._flushed < _FLUSH_SECS:
            return
        self._flushed = time.monotonic()
        lines = self._unwritten
        for step, at, values in self._waiting:
            numbers = {name: _number(value) for name, value in values.items()}
            self._take_in(numbers)
            if self._path is not None:
                lines.append(json.dumps({"step": step, "time": round(at, 3), **numbers}))
        self._waiting.clear()
        if lines and self._path is not None:
            with contextlib.suppress(OSError):  # a full disk: kept, and written with the next ones
                files.append(self._path, ("\n".join(lines) + "\n").encode())
                self._unwritten = []

    def _take_in(self, numbers: dict[str, float]) -> None:
        self.tokens += int(numbers.get("tokens", 0))
        for name in numbers.keys() - {"loss", "tokens"}:
            self._note(name, numbers[name])
        loss = numbers.get("loss")
        if loss is None:
            return
        before = self.loss
        self.loss = {
            "last": loss,
            "smoothed": _SMOOTHING * before["smoothed"] + (1 - _SMOOTHING) * loss if before else loss,
            "least": min(before["least"], loss) if before else loss,
            "count": before["count"] + 1 if before else 1,
        }

    def _note(self, name: str, number: float) -> None:
        """An integer may be too large for a float; a name nobody could print has no place in a manifest."""
        with contextlib.suppress(OverflowError):
            if math.isfinite(number):
                known = name in self.newest or len(self.newest) < _NAMES
                if known and name.isprintable() and len(name) <= _NAME_CHARS:
                    self.newest[name] = float(number)
                return
        self.newest.pop(name, None)

    @property
    def finite(self) -> bool:
        return all(math.isfinite(value) for value in self.loss.values())

    def state_dict(self) -> dict[str, Any]:  # Any: plain values
        return {"loss": dict(self.loss), "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: plain values
        self.loss, self.tokens = dict(state["loss"]), int(state["tokens"])


def _number(value: Any) -> float:  # Any: what a user logs
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"session.log takes numbers, not {type(value).__name__}")
    return number
