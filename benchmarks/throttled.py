"""How long until a save is durable on a slow disk? A loop device on a file, held to 300 MB/s by the kernel's block throttle.

Every write to the device passes the limit, write-back too, whoever caused it; no other disk is touched. Needs root, losetup
and the blkio controller of cgroup v1: elsewhere the answer is that it was not measured, and why."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Failed, Values, fsync_all, scratch
from benchmarks.ours import DEFAULT
from benchmarks.report import Section, Setting, Target
from benchmarks.saves import BASELINE, BEST_RAW, interleaved, loaded, medians, rows, save_once

RATE = 300_000_000
SIZE = 0.4
COMPARED = (BASELINE, "DCP save", "DCP save, zstd", "ZipNN + fsync", BEST_RAW, "Perdure, auto, 1 thread", DEFAULT)
_LIMITS = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
_ROOM = 2_500_000_000
_ROOM_QUICK = 100_000_000


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        raise Failed(f"there is no {command[0]}") from None
    except subprocess.CalledProcessError as error:
        raise Failed(f"{' '.join(command)}: {error.stderr.strip()}") from None


@contextlib.contextmanager
def slow_disk(folder: Path, room: int) -> Iterator[Path]:
    """A mounted ext4 on a throttled loop device. Raises Failed where this machine cannot."""
    if os.geteuid() != 0 or not _LIMITS.exists():
        raise Failed(f"needs root and {_LIMITS}")
    image, mount = folder / "disk.img", folder / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room)
    with contextlib.ExitStack() as stack:
        stack.callback(image.unlink)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
        stack.callback(_run, "losetup", "--detach", device)
        number = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
        _run("mount", device, str(mount))
        stack.callback(_run, "umount", str(mount))
        stack.callback(_LIMITS.write_text, f"{number} 0")
        _LIMITS.write_text(f"{number} {RATE}")
        yield mount


def _plain_rate(disk: Path, size: int) -> float:
    """What the disk does when nothing is in the way."""
    with scratch(disk, "plain") as folder:
        data, start = os.urandom(1 << 20), time.perf_counter()
        with (folder / "file").open("wb") as file:
            for _ in range(max(1, size >> 20)):
                file.write(data)
        fsync_all(folder)
        return max(1, size >> 20) * len(data) / (time.perf_counter() - start)


def _section(tries: dict[str, list[Values]], rate: float) -> Section:
    found = {name: medians(values) for name, values in tries.items()}
    section = Section("A disk of 300 MB/s", header=("row", "stall s", "durable s", "MB", "against torch.save + fsync"))
    section.notes = [
        "An ext4 on a loop device with direct I/O, which the kernel's block throttle (blkio, cgroup v1) holds to 300 MB/s; a "
        f"plain write and fsync makes {rate / 1e6:.0f} MB/s there."
    ]
    base = found[BASELINE].get("durable")
    for name, figures in found.items():
        if "durable" not in figures:
            section.rows.append((name, "-", "-", "-", f"not measured: {figures.get('failed', 'not reached')}"))
            continue
        ratio = f"{figures['durable'] / base:.2f} x" if base else "-"
        slower = [other for other in found if found[other].get("durable", 1e9) < figures["durable"]] if name == DEFAULT else []
        note = f"; **Perdure is not first**: behind {', '.join(slower)}" if slower else ""
        cells = (f"{figures['stall']:.3f}", f"{figures['durable']:.2f}", f"{figures['bytes'] / 1e6:.0f}", f"{ratio}{note}")
        section.rows.append((name, *cells))
    ours = found[DEFAULT].get("durable")
    if base and ours:
        shown = f"{ours / base:.2f} x ({ours:.2f} s against {base:.2f} s)"
        question = "time to durable, encoded, at 300 MB/s, against torch.save + fsync"
        section.targets = [Target(question, shown, "at most 1.0 x", ours <= base)]
    section.data = {"rounds": tries, "medians": found, "plain_bytes_per_second": rate}
    return section


def measure(setting: Setting) -> Iterator[Section]:
    tracked = loaded(setting, SIZE)
    tries: dict[str, list[Values]] = {name: [] for name in COMPARED}
    try:
        with slow_disk(setting.folder, _ROOM_QUICK if setting.quick else _ROOM) as disk:
            rate = _plain_rate(disk, setting.bytes_of(0.15))
            for name in interleaved(list(COMPARED), setting.rounds):
                with scratch(disk, "save") as folder:
                    tries[name].append(save_once(rows()[name], tracked, folder))
                yield _section(tries, rate)
    except Failed as error:
        yield Section("A disk of 300 MB/s", notes=[f"Not measured: {error}."], data={"failed": str(error)})
