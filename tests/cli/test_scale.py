"""Thousands of checkpoints in one run: every verb that looks opens a few files of each, and finishes."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.facts import Fact
from perdure.training.run_dir import CheckpointName

COUNT = 2000
COUNTING = """
import sys
opened = 0
def count(event, arguments):
    global opened
    opened += event in ("open", "os.scandir", "os.listdir") and "{root}" in str(arguments[0])
sys.addaudithook(count)
from perdure.cli.main import main
code = main(sys.argv[1:])
print(f"opened {opened}, exit code {code}", file=sys.stderr)
"""


@pytest.fixture
def many(made: Any) -> Any:
    """The run of 60 steps, and 2,000 checkpoints: all but two are the first one's files under other names."""
    run, first = made.run, manifests.read(made.run.checkpoint(CheckpointName(20, 1)))
    fact = msgspec.json.encode(Fact(copy="local", checked_at=time.time(), result="good"))
    for step in range(100, 100 + COUNT - 2):
        name = CheckpointName(step, 1)
        run.checkpoint(name).mkdir()
        for record in first.files:
            os.link(run.checkpoint(first.name) / record.name, run.checkpoint(name) / record.name)
        run.manifest(name).write_bytes(manifests.seal(msgspec.structs.replace(first, step=step)))
        run.fact(name, "local").write_bytes(fact)
    return made


def opened(root: Path, *arguments: str) -> tuple[int, int, str]:
    """How many files and folders of the run a command opens, its exit code, and what it prints."""
    code = COUNTING.replace("{root}", root.name)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    match = re.search(r"opened (\d+), exit code (\d+)", done.stderr)
    assert match, done.stderr
    return int(match[1]), int(match[2]), done.stdout


@pytest.mark.parametrize(
    ("verb", "most", "said"),
    [
        (["ls"], 5, f"{COUNT + 97}  "),
        (["status"], 9, f"step          {COUNT + 97} of 60"),
        (["verify", "--manifests"], 4, f"{COUNT} checked, 0 damaged"),
        (["prune", "--keep-last", "9", "--dry-run"], 5, "nothing to prune"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_verb_opens_a_few_files_of_each_checkpoint(many: Any, verb: list[str], most: int, said: str) -> None:
    count, code, out = opened(many.run.root, verb[0], str(many.run.root), *verb[1:])
    assert code == 0
    assert said in out
    assert COUNT // 2 < count < most * COUNT
