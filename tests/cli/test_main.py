"""The command itself: every verb helps quickly and lightly, and every mistake ends in a sentence and its exit code."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import VERBS, main
from perdure.training.run_dir import RunDir

HEAVY = {"torch", "torchdata", "prefect", "boto3", "botocore", "deepspeed", "rich", "slack_sdk", "numpy"}
Command = Callable[..., Any]


def imported(*arguments: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", "-m", "perdure.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_light_and_has_an_example_that_parses(verb: str, command: Command) -> None:
    assert not imported(verb, "--help") & HEAVY
    answer = command(verb, "--help")
    assert answer.code == 0
    assert "--json" in answer.out
    assert VERBS[verb].example in " ".join(answer.out.split())
    assert VERBS[verb].example.startswith(f"perdure {verb} ")


@pytest.mark.parametrize("verb", ["ls", "status"])
def test_looking_is_light(verb: str, made: Any) -> None:
    assert not imported(verb, str(made.run.root)) & HEAVY


def test_overview_names_every_verb(command: Command) -> None:
    answer = command("--help")
    assert answer.code == 0
    assert all(f"  {verb} " in answer.out for verb in VERBS)
    assert command().code == 2
    assert re.fullmatch(r"perdure \d+\.\d+\.\d+\n", command("--version").out)


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (("lss",), "'lss' is not a verb", "perdure ls"),
        (("--jsn",), "'--jsn' is not a verb", "verbs: run"),
        (("ls",), "ls: the following arguments are required: RUN", "perdure ls --help"),
        (("ls", "a", "--deep"), "ls: unrecognized arguments: --deep", "perdure ls --help"),
        (("verify", "a", "--step", "two"), "invalid int value: 'two'", "perdure verify --help"),
        (("verify", "a", "--step", "2", "--name", "x"), "not allowed with argument", "perdure verify --help"),
    ],
)
def test_mistyped_command_is_answered_with_what_to_type(
    arguments: tuple[str, ...], says: str, hint: str, command: Command
) -> None:
    answer = command(*arguments)
    assert answer.code == 2
    assert says in answer.err
    assert hint in answer.err
    assert "Traceback" not in answer.err
    told = command(*arguments, "--json").json
    assert says in told["error"]
    assert hint in told["hint"]
    assert told["exit_code"] == 2


def broken_run(tmp_path: Path) -> Path:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/run.json").write_text('{"id": 5}')
    return tmp_path / "broken"


def deep_inside(tmp_path: Path) -> Path:
    (tmp_path / "runs/one/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/one/run.json").write_text("{}")
    return tmp_path / "runs"


def beside_toml(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/run.toml").write_text("")
    return tmp_path / "project"


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("hello")
    return tmp_path / "notes.txt"


def binary_toml(tmp_path: Path) -> Path:
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    return tmp_path / "b.toml"


def loop(tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path / "loop/x"


WRONG: list[tuple[Callable[[Path], object], int, str]] = [
    (lambda at: at / "nothing", 4, "does not exist"),
    (lambda at: at, 4, "holds no run (no run.json)"),
    (deep_inside, 4, "runs in it: one"),
    (lambda at: deep_inside(at) / "one/checkpoints", 4, "name the run directory"),
    (beside_toml, 4, "run.toml"),
    (a_file, 2, "neither a run directory nor a run.toml"),
    (lambda at: at / "missing.toml", 2, "does not exist"),
    (binary_toml, 2, "not UTF-8"),
    (broken_run, 5, "is not a run.json"),
    (lambda _: "s3://bucket/prefix", 2, "is a store, not a run directory"),
    (lambda at: at / ("x" * 300), 2, "File name too long"),
    (lambda at: at / "\n\x1b[31m\u2603", 4, "does not exist"),
    (lambda _: "/dev/null", 2, "neither a run directory"),
    (lambda _: "", 2, "RUN is empty"),
    (lambda _: " ", 2, "RUN is empty"),
]


@pytest.mark.parametrize("verb", ["ls", "status", "verify", "push", "stop"])
@pytest.mark.parametrize(("target", "code", "says"), WRONG, ids=range(len(WRONG)))
def test_wrong_target_is_refused_with_a_sentence(
    verb: str, target: Callable[[Path], object], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(target(tmp_path))]) == code
    told = capsys.readouterr()
    assert says in told.err
    assert told.err.startswith("perdure: ")
    assert told.out == ""


def test_set_needs_a_toml_and_reaches_it(made: Any, toml: Path, command: Command) -> None:
    refused = command("ls", made.run.root, "--set", "run.steps=5")
    assert refused.code == 2
    assert "--set needs a run.toml" in refused.err
    assert command("status", toml, "--set", "run.steps=80", "--json").json["total_steps"] == 80
    unknown = command("status", toml, "--set", "run.stepz=80")
    assert unknown.code == 2
    assert "run.stepz" in unknown.err or "stepz" in unknown.err


def test_secrets_in_a_message_are_cut_out(command: Command) -> None:
    answer = command("ls", "/no/xoxb-canary-123456/here", env={"AWS_SECRET_ACCESS_KEY": "sesame-open-0123"})
    assert "canary" not in answer.err
    told = command("ls", "/no/sesame-open-0123", "--json", env={"AWS_SECRET_ACCESS_KEY": "sesame-open-0123"})
    assert "sesame" not in told.out + told.err


def test_closed_pipe_is_quiet(made: Any) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "perdure.cli", "ls", str(made.run.root)], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


def test_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made: Any) -> None:
    from perdure.cli import ls

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "run", interrupted)
    assert main(["ls", str(made.run.root)]) == 130
    assert capsys.readouterr().err == "perdure: interrupted\n"


def test_bug_keeps_its_traceback(made: Any, command: Command, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import perdure.cli.ls as m\ndef run(a): raise RuntimeError('bug')\nm.run = run\n"
    )
    answer = command("ls", made.run.root, env={"PYTHONPATH": str(tmp_path)})
    assert answer.code == 1
    assert "Traceback" in answer.err
    assert "RuntimeError: bug" in answer.err


def test_path_with_odd_characters_works(made: Any, command: Command) -> None:
    odd = made.run.root.with_name("o d\u00e9\n\u2603'\"$(x)")
    made.run.root.rename(odd)
    assert len(command("ls", odd, "--json").json["checkpoints"]) == 2
    assert json.loads(command("status", odd, "--json").out)["run_dir"] == str(RunDir(odd).root)
