"""What does a save and a restore cost with 1, 2 and 4 ranks, and what does a rank read when their number changes? Of state
under DDP, fully_shard and DeepSpeed's ZeRO, each beside its own peers, over gloo on this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import state
from benchmarks.measure import Failed, Values, Window, in_child, scratch
from benchmarks.ranks_page import section
from benchmarks.report import Section, Setting

SIZE = 0.13
_LIMIT = 400.0


@dataclass(frozen=True)
class Engine:
    """A question about state under one engine; its kinds are measured one after the other by the same processes."""

    name: str
    kinds: tuple[str, ...]

    def measure(self, setting: Setting) -> Iterator[Section]:
        worlds = (1, 2) if setting.quick else (1, 2, 4)
        paths, found, resharded = tiles(setting), dict[int, Values](), dict[str, Values]()
        with scratch(setting.folder, f"ranks-{self.name}") as folder:
            for world in worlds:
                before = world // 2 if world == worlds[-1] else 0
                others = _saved(found[before]) if before else {}
                found[world] = self._launch(setting, folder / str(world), world, paths, others)
                if before:
                    resharded[f"{before} to {world}"] = found[world]
                yield section(self.kinds, found, resharded)
            few, many = worlds[-2:]
            resharded[f"{many} to {few}"] = self._launch(setting, folder / "back", few, paths, _saved(found[many]), spread=True)
        yield section(self.kinds, found, resharded)

    def _launch(
        self,
        setting: Setting,
        folder: Path,
        world: int,
        tiles: Sequence[str],
        others: dict[str, dict[str, str]],
        *,
        spread: bool = False,
    ) -> Values:
        """What so many ranks found; `others` are folders that another number of ranks saved, by kind and row. With `spread`
        nothing but those is restored, and nothing saved."""
        folder.mkdir()
        task, answer = folder / "task.json", folder / "answer.json"
        asked = {"world": world, "kinds": self.kinds, "quick": setting.quick, "tiles": tiles, "rounds": setting.rounds}
        places = {"folder": str(folder), "answer": str(answer)}
        task.write_text(json.dumps({**asked, **places, "others": others, "spread": spread}))
        processes = []
        for rank in range(world):
            with open(folder / f"log-{rank}", "wb") as log:
                command = [sys.executable, "-m", "benchmarks.rank", str(task), str(rank)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        try:
            for process in processes:
                process.wait(_LIMIT)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()
        if not answer.exists():
            ends = [(folder / f"log-{rank}").read_text(errors="replace")[-300:] for rank in range(world)]
            raise Failed(f"{world} ranks ended so: {' | '.join(' '.join(end.split()) for end in ends)}")
        found: Values = json.loads(answer.read_text())
        return found


ENGINES = {
    f"ranks-{name}": Engine(name, kinds)
    for name, kinds in (("ddp", ("ddp",)), ("fsdp2", ("fsdp2",)), ("zero", ("zero1", "zero3")))
}


def tiles(setting: Setting) -> list[str]:
    count = state.needed(setting.shape, setting.bytes_of(SIZE))

    def train(_: Window) -> Values:
        return {"paths": [str(path) for path in state.tiles(setting.shape, count)]}

    found = in_child(train, limit=3600)
    if "failed" in found:
        raise Failed(f"no state to measure with: {found['failed']}")
    return list(found["paths"])


def _saved(found: Values) -> dict[str, dict[str, str]]:
    """Folder of each row that saves, by kind."""
    return {
        kind: {name: rows["saves"][-1]["folder"] for name, rows in one["rows"].items() if rows["saves"]}
        for kind, one in found.items()
    }
