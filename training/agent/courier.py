"""Where the nodes of a launch share no disk: carries the small files by which they find each other (roster.py, nodes.py)
between this node's run directory and the store. Each has one writer. A store that is away for a while ends nothing."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from perdure.training import files
from perdure.training.agent.roster import Beat
from perdure.training.checkpoint import manifest
from perdure.training.checkpoint.lineage import MAX_RECORD, LaunchRecord, create_launch
from perdure.training.errors import ObjectNotFound, StoreError
from perdure.training.process import ProcessId
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore

POLL_SECS = 0.5
_COUNTED_SECS = 2.0
"""Of the time between two exchanges at most so much counts as listened: a request may have waited for the store."""
_TROUBLE_SECS = 5.0
_MOST_BYTES = 1 << 30
_KEY = re.compile(re.escape(RunDir.NODES_KEY) + r"([0-9]{4,18})/(.+)")
_OF_NODE = re.compile(r"node-([0-9]{1,4})(\.json|\.held\.json|\.end\.json|\.offer|\.part)")
_BEATS = re.compile(r"progress\.json|node-[0-9]+\.json")
"""What is written again and again."""


class Courier:
    """A thread between `start` and `end`. `listened` is a clock that stands still while the store cannot be reached."""

    def __init__(self, run: RunDir, token: int, number: int, store: ObjectStore) -> None:
        self._run, self._token, self._number, self._store = run, token, number, store
        self._sent: dict[str, tuple[int, int, int]] = {}
        self._got: set[str] = set()
        self._listened, self._last = 0.0, 0.0
        self._over = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._work, name="perdure-courier", daemon=True)
        self.trouble = ""
        """Why the store cannot be reached just now."""

    def start(self) -> None:
        self._thread.start()

    def end(self, timeout: float) -> None:
        """Once more all that there is to carry, for so many seconds at most."""
        self._deadline = time.monotonic() + timeout
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def listened(self) -> float:
        return self._listened

    def _work(self) -> None:
        while True:
            over = self._over.is_set()
            try:
                self.exchange()
            except (OSError, ValueError) as error:  # the store's are OSErrors too
                self.trouble, self._last = str(error), 0.0
            else:
                self.trouble = ""
                self._count()
                if over:
                    return
            if time.monotonic() > self._deadline:
                return
            if over:
                time.sleep(POLL_SECS)
            self._over.wait(POLL_SECS)

    def _count(self) -> None:
        now = time.monotonic()
        if self._last:
            self._listened += min(now - self._last, _COUNTED_SECS)
        self._last = now

    def exchange(self) -> None:
        """Store what is new here, and bring what is new there. Raises OSError."""
        for file, path in self._mine():
            self._send(file, path)
        done: list[str] = []
        for token, file in _told(self._store):
            if token == self._token:
                self._take(file)
            if token > self._token:
                self._learn_of(token)
            if self._number == 0 and (token < self._token - 1 or (token == self._token and self._is_done(file))):
                done.append(RunDir.node_key(token, file))
        with contextlib.suppress(StoreError):  # a key that may not delete leaves them
            self._store.delete(done)

    def _mine(self) -> Iterator[tuple[str, Path]]:
        run, token, number = self._run, self._token, self._number
        if number == 0:
            yield "call.json", run.call(token)
            yield "progress.json", run.progress_json
        else:
            yield f"node-{number}.json", run.node(token, number)
        for path in run.checkpoints.iterdir():
            name = CheckpointName.parse(path.name)
            if name is not None and name.token == token:
                yield f"{name}/node-{number}.offer", run.offer(name, number)
                if number:
                    yield f"{name}/node-{number}.part", run.part(name, number)
        yield f"node-{number}.held.json", run.held(token, number)
        if number == 0:
            yield "settled.json", run.settled(token)
        yield f"node-{number}.end.json", run.launch_end(token, number)

    def _send(self, file: str, path: Path) -> None:
        try:
            about = path.stat()
            version = (about.st_ino, about.st_mtime_ns, about.st_size)
            if self._sent.get(file) == version:
                return
            data = files.read_limited(path, _MOST_BYTES)
        except FileNotFoundError:
            return
        if file == "progress.json" and msgspec.json.decode(data).get("token") != self._token:
            return  # of the launch before
        self._store.put(RunDir.node_key(self._token, file), data)
        self._sent[file] = version

    def _take(self, file: str) -> None:
        path = self._place(file)
        if path is None or file in self._got:
            return
        try:
            data = self._store.get(RunDir.node_key(self._token, file), limit=_MOST_BYTES)
        except ObjectNotFound:
            return
        files.make_dirs(path.parent)
        if _BEATS.fullmatch(file):
            files.publish(path, data)
        else:
            files.write_atomically(path, data)
            self._got.add(file)

    def _place(self, file: str) -> Path | None:
        """Where a file of another node belongs that this one needs; nothing else is taken."""
        run, token = self._run, self._token
        folder, _, base = file.rpartition("/")
        name, found = CheckpointName.parse(folder), _OF_NODE.fullmatch(base)
        if self._number and file in ("call.json", "progress.json", "settled.json"):
            return {"call.json": run.call(token), "progress.json": run.progress_json, "settled.json": run.settled(token)}[file]
        if found is None or (other := int(found[1])) == self._number or (folder and (name is None or name.token != token)):
            return None
        if name is not None:
            wanted = {".offer": run.offer(name, other)} | ({".part": run.part(name, other)} if self._number == 0 else {})
        elif self._number == 0 or other == 0:
            wanted = {".json": run.node(token, other), ".held.json": run.held(token, other)}
            wanted[".end.json"] = run.launch_end(token, other)
        else:
            wanted = {}
        return wanted.get(found[2])

    def _is_done(self, file: str) -> bool:
        """What was told of a checkpoint that is committed."""
        name = CheckpointName.parse(file.partition("/")[0])
        return name is not None and manifest.is_committed(self._run, name)

    def _learn_of(self, token: int) -> None:
        """A newer launch: ours is over."""
        if self._number and not self._run.launch_record(token).exists():
            data = self._store.get(RunDir.launch_key(token), limit=MAX_RECORD)
            create_launch(self._run, msgspec.json.decode(data, type=LaunchRecord))


class Apart:
    """Turns what troubles a courier into notices: one when it lasts, one when it is over."""

    def __init__(self) -> None:
        self._since, self._said = 0.0, False

    def notice(self, trouble: str) -> str:
        """What is to be said now; "" for nothing."""
        now = time.monotonic()
        self._since = (self._since or now) if trouble else 0.0
        if trouble and not self._said and now - self._since > _TROUBLE_SECS:
            self._said = True
            return f"the nodes cannot hear each other through the store, training goes on: {trouble}"
        if self._said and not trouble:
            self._said = False
            return "the nodes hear each other again"
        return ""


def _told(store: ObjectStore) -> list[tuple[int, str]]:
    """Launch and file of all that nodes have told each other and is still there."""
    matches = (_KEY.fullmatch(item.key) for item in store.list(RunDir.NODES_KEY))
    return [(int(match[1]), match[2]) for match in matches if match]


def open_call(store: ObjectStore, number: int) -> int:
    """Token of the newest launch, where it asks for nodes, goes on and has none of this number; else 0. Raises StoreError."""
    told = _told(store)
    newest = max((token for token, _ in told), default=0)
    there = {file for token, file in told if token == newest}
    return newest if "call.json" in there and not there & {"node-0.end.json", f"node-{number}.json"} else 0


def bring_end(run: RunDir, token: int, store: ObjectStore) -> bool:
    """What node 0 says of how that launch ended, which may come after this node has left it. Raises StoreError."""
    try:
        data = store.get(RunDir.node_key(token, "node-0.end.json"), limit=MAX_RECORD)
    except ObjectNotFound:
        return False
    files.write_atomically(run.launch_end(token), data)
    return True


def take_place(store: ObjectStore, token: int, number: int, process: ProcessId) -> bool:
    """Become that node of that launch; False where somebody on another machine is, or was. Raises StoreError."""
    return store.put(RunDir.node_key(token, f"node-{number}.json"), msgspec.json.encode(Beat(process=process)), if_absent=True)


def beats(store: ObjectStore, token: int, timeout: float) -> bool:
    """Whether node 0 of that launch gives a sign of life within so many seconds. Raises StoreError."""
    first, deadline = _progress(store, token), time.monotonic() + timeout
    while first:
        over = time.monotonic() > deadline  # before the look: where we stood still ourselves, there is one more
        if store.size(RunDir.node_key(token, "node-0.end.json")) is not None:
            return False
        if _progress(store, token) != first:
            return True
        if over:
            return False
        time.sleep(POLL_SECS)
    return False


def _progress(store: ObjectStore, token: int) -> bytes:
    try:
        return store.get(RunDir.node_key(token, "progress.json"), limit=MAX_RECORD)
    except ObjectNotFound:
        return b""
