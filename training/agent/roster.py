"""The nodes of a launch, by files in the run directory: node 0 calls, the others join, each beats, each says how it ended.

Liveness is a counter that somebody watches over time of its own; clocks of different machines are never compared."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from perdure.training import files
from perdure.training.checkpoint.lineage import MAX_RECORD, LaunchEnd, read_end, read_launches
from perdure.training.errors import ConfigError
from perdure.training.launch_settings import LaunchSection
from perdure.training.process import ProcessId
from perdure.training.run_dir import CheckpointName, RunDir

LOOK_SECS = 0.5
"""Between two looks at what lies on a shared disk."""
_Record = TypeVar("_Record")
Clock = Callable[[], float]
"""Seconds."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Node 0's word to the other nodes of one launch."""

    token: int
    run_id: str
    resume: str
    """Name of the checkpoint to go on from; "" for none."""
    replan: bool
    overrides: tuple[str, ...]
    """`--set` of node 0, which are those of all."""
    trajectory: dict[str, Any]  # Any: TOML values
    """Settings that decide the weights: a node that has others must not join."""
    address: str
    port: int


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part as a node, and that it lives."""

    process: ProcessId
    counter: int = 0
    step: int = 0
    state: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has whose ranks are gone."""

    steps: tuple[int, ...]
    """Of which all its ranks have a whole snapshot, or its part is written."""
    error_class: str
    """Why they are gone; "" where another node knows better."""
    detail: str


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    """The newest that all nodes have; 0 for none."""


def read_call(run: RunDir) -> Call | None:
    """Of the newest launch, while it goes on and asks for nodes."""
    token = max(read_launches(run), default=0)
    return None if read_end(run, token) else _read(run.call(token), Call)


def read_node(run: RunDir, token: int, number: int) -> Beat | None:
    return _read(run.node(token, number), Beat)


def tell_held(run: RunDir, token: int, number: int, held: Held) -> None:
    files.write_atomically(run.held(token, number), msgspec.json.encode(held))


def settle(run: RunDir, token: int, step: int) -> None:
    files.write_atomically(run.settled(token), msgspec.json.encode(Settled(step=step)))


def read_settled(run: RunDir, token: int) -> Settled | None:
    return _read(run.settled(token), Settled)


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        return msgspec.json.decode(files.read_limited(path, MAX_RECORD), type=kind)
    except (OSError, ValueError):
        return None


def join(run: RunDir, token: int, number: int, process: ProcessId) -> bool:
    """Become that node of that launch; False when somebody is, or was: a launch has each node once."""
    return files.create_exclusively(run.node(token, number), msgspec.json.encode(Beat(process=process)))


class Pulse:
    """Somebody else's counter: how long it has stood still while we watched, by a clock that goes while we can."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._last, self._since = clock, -1, clock()

    def still_secs(self, seen: int) -> float:
        now = self._clock()
        if seen != self._last:
            self._last, self._since = seen, now
        return now - self._since


def listen(launch: LaunchSection) -> socket.socket:
    """Where the ranks are to meet: on the loopback interface, or with several nodes where the others reach this one. Raises
    ConfigError."""
    address = "127.0.0.1" if launch.nodes == 1 else launch.address or socket.gethostname()
    hint = "set launch.address to the name or IPv4 address at which the other nodes reach this one"
    try:
        listener = socket.create_server((address, 0))
    except OSError as error:
        raise ConfigError(f"launch.address = {address!r} is no address of this machine: {error.strerror}", hint) from None
    if launch.nodes > 1 and not launch.address and listener.getsockname()[0].startswith("127."):
        listener.close()
        raise ConfigError(f"other nodes cannot reach this one: its name {address!r} means the loopback interface here", hint)
    return listener


class Others:
    """The other nodes of a launch, as node 0 sees them."""

    def __init__(self, run: RunDir, token: int, launch: LaunchSection, clock: Clock = time.monotonic) -> None:
        self._run, self._token, self._launch = run, token, launch
        self.numbers = range(1, launch.nodes)
        self._said, self._looked = ("", ""), 0.0
        self._pulses = [Pulse(clock) for _ in self.numbers]

    def call(self, call: Call) -> None:
        """Ask the other nodes to join."""
        files.make_dirs(self._run.nodes(self._token))
        files.write_atomically(self._run.call(self._token), msgspec.json.encode(call))

    def missing(self) -> list[int]:
        """Those that have not joined."""
        return [number for number in self.numbers if not self._run.node(self._token, number).exists()]

    def failed(self) -> tuple[str, str]:
        """Error class and words of one whose ranks are gone, that has ended badly, or given no sign of life for too long; else
        empty."""
        if time.monotonic() > self._looked + LOOK_SECS:
            self.look()
        return self._said

    def look(self) -> tuple[str, str]:
        """As `failed`, now."""
        if not self._said[0]:
            self._looked, self._said = time.monotonic(), self._look()
        return self._said

    def _look(self) -> tuple[str, str]:
        for number, pulse in zip(self.numbers, self._pulses, strict=True):
            beat, end = read_node(self._run, self._token, number), read_end(self._run, self._token, number)
            name = f"node {number} ({beat.process.host if beat else '?'})"
            held = _read(self._run.held(self._token, number), Held)
            told = held or (end if end and end.reason == "failed" else None)
            if told is not None and told.error_class:
                return told.error_class, f"{name}: {told.detail}"
            if beat and not end and (still := pulse.still_secs(beat.counter)) > self._launch.node_timeout:
                return "infrastructure", f"{name} has given no sign of life for {still:.0f} s"
        return "", ""

    def held(self) -> list[set[int]] | None:
        """The steps that each of them has; None while one has not said so, nor ended without a word of it."""
        found = [_read(self._run.held(self._token, number), Held) for number in self.numbers]
        ended = [self._has_ended(number) for number in self.numbers]
        if not all(held or over for held, over in zip(found, ended, strict=True)):
            return None
        return [set(held.steps) if held else set() for held in found]

    def silent(self, seconds: float) -> bool:
        """Whether one that has not said what it has gives no sign of life for so long."""
        for number, pulse in zip(self.numbers, self._pulses, strict=True):
            beat = read_node(self._run, self._token, number)
            still = pulse.still_secs(beat.counter if beat else -1)
            if still > seconds and not self._has_ended(number) and not self._run.held(self._token, number).exists():
                return True
        return False

    def _has_ended(self, number: int) -> bool:
        return self._run.launch_end(self._token, number).exists()

    def gone_without(self, name: CheckpointName) -> bool:
        """Whether one has ended, or given no sign of life for too long, before its part of this checkpoint was written; between
        two looks False."""
        if time.monotonic() < self._looked + LOOK_SECS:
            return False
        self._looked = time.monotonic()
        for number, pulse in zip(self.numbers, self._pulses, strict=True):
            beat = read_node(self._run, self._token, number)
            still = pulse.still_secs(beat.counter) > self._launch.node_timeout if beat else False
            if (still or self._has_ended(number)) and not self._run.part(name, number).exists():
                return True
        return False


class Caller:
    """Node 0, as the others see it."""

    def __init__(self, run: RunDir, token: int, timeout: float, clock: Clock = time.monotonic) -> None:
        self._run, self._token, self._timeout = run, token, timeout
        self._pulse = Pulse(clock)
        self._said, self._looked = "", 0.0
        self.end: LaunchEnd | None = None
        """What node 0 has said of it, once it is over."""
        self.held: Held | None = None
        """What node 0 has, once its ranks are gone."""

    def _counter(self) -> int:
        try:
            told = json.loads(files.read_limited(self._run.progress_json, MAX_RECORD))
            return int(told["counter"]) if told["token"] == self._token else -1
        except (OSError, ValueError, KeyError, TypeError):
            return -1

    def over(self) -> str:
        """Why the launch goes on no more, in words; "" while it does."""
        if not self._said and time.monotonic() > self._looked + LOOK_SECS:
            self._looked, self._said = time.monotonic(), self._look()
        return self._said

    def _look(self) -> str:
        self.held = _read(self._run.held(self._token, 0), Held)
        self.end = read_end(self._run, self._token)
        if self.end is not None:
            return f"the launch has ended: {self.end.reason}"
        if max(read_launches(self._run), default=0) > self._token:
            return "a newer launch has begun"
        still = self._pulse.still_secs(self._counter())
        return f"node 0 has given no sign of life for {still:.0f} s" if still > self._timeout else ""
