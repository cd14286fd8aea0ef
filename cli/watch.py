"""What `perdure run` shows: one line per event; on a terminal also a progress bar with rate and time left."""

import json
import sys
import time
from typing import Any

from perdure.cli.render import size, visible
from perdure.training import events, files
from perdure.training.config import RunConfig
from perdure.training.events import Event
from perdure.training.run_dir import RunDir

_LINES = {
    "run_created": "created run {id}",
    "launch_started": "launch {token} started at step {step}",
    "recovered": "launch {token} goes on from step {step}",
    "checkpoint_committed": "committed checkpoint {name}: {stored} of {raw} raw, {seconds:.2f} s",
    "save_failed": "could not write the checkpoint of step {step} (try {attempt}): {error}",
    "verified": "verified {name}",
    "quarantined": "QUARANTINED {name}: {reason}",
    "pushed": "pushed {name} to {url}",
    "rolled_up": "rolled up checkpoint {name} into a full",
    "pruned": "deleted checkpoint {name}: {reason}",
    "copy_pruned": "deleted the copy of {name} in {place}: {reason}",
    "push_failed": "could not push step {step}: {error}",
    "failed": "FAILED at step {step} ({error_class}): {detail}; {next}",
    "stopped": "stopped at step {step}: {reason}",
    "completed": "completed step {step}, state digest {digest}",
    "waiting_for_lease": "training waited {seconds:.1f} s at step {step} to be told how far to go",
}


class _Blank(dict[str, Any]):  # Any: JSON values
    def __missing__(self, key: str) -> str:
        return "?"


def describe(event: Event, total: int) -> str:
    """One line for people."""
    data = _Blank(event.data)
    data["stored"], data["raw"] = (size(float(event.data.get(key, 0))) for key in ("stored_bytes", "raw_bytes"))
    data.setdefault("seconds", 0.0)
    if event.kind == "chunk_finished":
        return _describe_chunk(event.data, total)
    plain = "{text}" if "text" in event.data else event.kind + " {all}"
    return _LINES.get(event.kind, plain).format_map(_Blank(data, all=json.dumps(event.data)))


def _describe_chunk(data: dict[str, Any], total: int) -> str:
    start, end, seconds = int(data["start"]), int(data["end"]), float(data["seconds"])
    loss = f", loss {data['loss']:.4f}" if data.get("loss") is not None else ""
    done = f"chunk {start}-{end} of {total} done{loss}"
    if seconds <= 0:
        return done
    minutes, left = divmod(round((total - end) * seconds / (end - start + 1)), 60)
    return f"{done}, {(end - start + 1) / seconds:.2f} steps/s, {minutes // 60}:{minutes % 60:02}:{left:02} left"


class Watcher:
    """Call `look` a few times a second. Starts at the present end of the event log."""

    def __init__(self, run: RunDir, config: RunConfig, ui: str, *, quiet: bool) -> None:
        self._run, self._total = run, config.run.steps
        self._cursor = run.events.stat().st_size if run.events.exists() else 0
        self._file = sys.stderr if quiet else sys.stdout
        self._bar: Any = None  # Any: rich is imported on terminals only
        if self._file.isatty():
            self._start_bar(config)
        self.say(f"run {config.run.name} in {run.root}, {self._total} steps in chunks of {config.run.chunk}; Prefect UI: {ui}")

    def _start_bar(self, config: RunConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=self._file),
        )
        self._task = self._bar.add_task(config.run.name, total=self._total, rate="")
        self._first: tuple[float, int] | None = None
        self._bar.start()

    def say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {visible(text)}"
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._file, flush=True)

    def look(self) -> None:
        for event in events.read(self._run, self._cursor):
            self._cursor = event.end
            self.say(describe(event, self._total))
        if self._bar is not None:
            self._advance()

    def _advance(self) -> None:
        try:
            progress = json.loads(files.read_limited(self._run.progress_json, 4096))
            step, state = int(progress["step"]), str(progress["state"])
        except (OSError, ValueError, KeyError):
            return
        now = time.monotonic()
        if self._first is None or step < self._first[1]:
            self._first = (now, step)
        seconds, made = now - self._first[0], step - self._first[1]
        rate = f"{made / seconds:.2f} steps/s" if made and seconds > 0 else state
        self._bar.update(self._task, completed=step, rate=rate if state == "training" else state)

    def close(self) -> None:
        self.look()
        if self._bar is not None:
            self._bar.stop()
