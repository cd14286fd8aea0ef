"""Mistakes in a user's script, met by the real command: one sentence, the documented exit code, no traceback, nothing lost."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import PERDURE, Run

pytestmark = pytest.mark.usefixtures("prefect_api")
AT_ONCE = 3
TRAINS = """
import torch
def train(session):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.track(model=model, optimizer=optimizer)
    for step in session.steps():
        model(torch.ones(2)).sum().backward()
        {end}
"""


@dataclass(frozen=True)
class Mistake:
    script: str
    code: int
    says: str
    kept: int = 0
    """Step of the newest checkpoint afterwards."""


MISTAKES = {
    "syntax": Mistake("def train(session)\n    pass\n", 7, "SyntaxError"),
    "no_function": Mistake("def other(session): ...\n", 2, "defines no function 'train'"),
    "leaves_early": Mistake(
        TRAINS.format(end="optimizer.step(); optimizer.zero_grad()\n        if step == 2: break"),
        7,
        "returned after step 2 of 4",
        2,
    ),
    "no_state_dict": Mistake(
        "def train(session): session.track(thing=object())\n", 2, "'thing' is a object without state_dict()"
    ),
    "accumulates": Mistake(
        TRAINS.format(end="if step % 2: optimizer.step(); optimizer.zero_grad()"), 2, "gradients that optimizer"
    ),
    "odd_text": Mistake("def train(session): raise ValueError('\\x1b[31m {oops}\\nsecond')\n", 7, "ValueError"),
}


@dataclass(frozen=True)
class Answer:
    code: int
    err: str
    run: Run


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> dict[str, Answer]:
    """Each script run once by the real command, a few side by side."""
    home, found, waiting = tmp_path_factory.mktemp("mistakes"), {}, dict(MISTAKES)
    while waiting:
        batch = {name: start(home, name, waiting.pop(name).script) for name in list(waiting)[:AT_ONCE]}
        for name, process in batch.items():
            err = process.communicate(timeout=120)[1].decode()
            found[name] = Answer(process.returncode, err, Run(home / name / "run.toml"))
    return found


def start(home: Path, name: str, script: str) -> "subprocess.Popen[bytes]":
    folder = home / name
    folder.mkdir()
    (folder / "train.py").write_text(script)
    (folder / "run.toml").write_text(f'[run]\nname = "{name}"\nentry = "train.py:train"\nsteps = 4\nchunk = 2\n')
    return subprocess.Popen(
        [*PERDURE, "run", str(folder / "run.toml")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_answered_once_with_its_exit_code(name: str, answers: dict[str, Answer]) -> None:
    answer, mistake = answers[name], MISTAKES[name]
    assert answer.code == mistake.code, answer.err
    told = re.sub(r"^starting a local Prefect.*\n", "", answer.err)
    assert told.startswith("perdure: ")
    assert mistake.says in told
    assert "Traceback" not in told
    assert str(answer.run.dir.root) in told
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", told)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_not_tried_again_and_leaves_its_traceback_in_the_log(name: str, answers: dict[str, Answer]) -> None:
    run = answers[name].run
    assert run.kinds().count("launch_started") == 1
    assert "Traceback" in (run.dir.logs(1) / "rank-00000.log").read_text(errors="replace")


def test_what_was_committed_before_a_mistake_is_kept(answers: dict[str, Answer]) -> None:
    for name, mistake in MISTAKES.items():
        steps = [checkpoint.step for checkpoint in answers[name].run.committed()]
        assert steps == ([mistake.kept] if mistake.kept else []), name


def test_nothing_of_a_mistake_stays_alive(answers: dict[str, Answer]) -> None:
    assert {name: answer.run.processes() for name, answer in answers.items() if answer.run.processes()} == {}


def test_by_hand_a_mistake_is_a_plain_python_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from perdure.training import Session\nSession.by_hand('run.toml')\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"ConfigError: {tmp_path / 'run.toml'} does not exist")
