"""The benchmarks themselves: a smoke run with tiny states answers every question with every row, as a page and as JSON.

Figures of such a run mean nothing and decide nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Smoke = tuple[dict[str, Any], str]
"""The JSON and the page."""
ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ("stall", "saves-0.4", "ratios", "increments", "throttled", "wall", "saves-1.5", "sizes", "retention", "many")
OPTIONAL = {"torch_checkpointing + fsync", "ZipNN + fsync"}
"""Peers that only the extra `bench` installs."""
PERDURE = {f"Perdure, {what}" for what in ("raw, 2 threads", "auto, 1 thread", "auto, 2 threads", "small, 2 threads")}
PEERS = {
    "torch.save",
    "torch.save + fsync",
    "safetensors + fsync",
    "DCP save",
    "DCP async, thread",
    "DCP async, process",
    "DCP save, zstd",
}

OWN, UNIVERSAL, PERDURE_RUN = "engine.save_checkpoint, fsync", "ds_to_universal and universal load", "Perdure, in a run"
RANKS = {
    "ranks-ddp": {"ddp": {"torch.save by rank 0, fsync", "dcp.save", "dcp.async_save", PERDURE_RUN}},
    "ranks-fsdp2": {"fsdp2": {"dcp.save", "dcp.async_save", "dcp.save, PerdureWriter", PERDURE_RUN}},
    "ranks-zero": {kind: {OWN, UNIVERSAL, PERDURE_RUN} for kind in ("zero1", "zero3")},
}
"""Rows of each kind of state."""
TRAVELLERS = ("perdure", "perdure, not read back")


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "--folder", str(folder), "--results", str(folder / "results"), *arguments]
    env = {**os.environ, "PERDURE_BENCH_CACHE": str(folder / "cache")}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=560)


def _answers(folder: Path, question: str) -> tuple[dict[str, Any], str]:
    """JSON of one question, and the page."""
    done = _run(folder, question, "--quick")
    assert done.returncode == 0, done.stderr
    (found,), (page,) = (list((folder / "results").glob(f"*.{kind}")) for kind in ("json", "md"))
    assert "Not finished" not in page.read_text(), page.read_text()
    answer: dict[str, Any] = json.loads(found.read_text())["questions"][question]["data"]
    return answer, page.read_text()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    """The JSON and the page of one smoke run of all questions about the engine."""
    folder = tmp_path_factory.mktemp("bench")
    done = _run(folder, "--quick")
    assert done.returncode == 0, done.stderr
    (found,), (page,) = (list((folder / "results").glob(f"*.{kind}")) for kind in ("json", "md"))
    return json.loads(found.read_text()), page.read_text()


def test_every_question_is_answered_to_its_end(smoke: Smoke) -> None:
    found, page = smoke
    assert tuple(found["questions"]) == QUESTIONS
    assert "Not finished" not in page


@pytest.mark.parametrize("question", ["saves-0.4", "saves-1.5"])
def test_every_row_has_every_figure(smoke: Smoke, question: str) -> None:
    rows = smoke[0]["questions"][question]["data"]["medians"]
    assert set(rows) == PEERS | OPTIONAL | PERDURE
    for name in (PEERS | PERDURE) - {"torch.save"}:
        assert {"stall", "durable", "bytes", "warm", "again", "cold", "peak", "cpu"} <= set(rows[name]), (name, rows[name])
    for name in PERDURE:
        assert {"shallow", "deep"} <= set(rows[name])
    assert "durable" not in rows["torch.save"]


def test_a_peer_that_cannot_be_measured_says_why(smoke: Smoke) -> None:
    rows = smoke[0]["questions"]["saves-0.4"]["data"]["medians"]
    assert all("stall" in rows[name] or rows[name]["failed"] for name in OPTIONAL)


def test_rows_that_beat_perdure_say_so(smoke: Smoke) -> None:
    found, page = smoke
    rows = found["questions"]["saves-0.4"]["data"]["medians"]
    ours = rows["Perdure, auto, 2 threads"]
    for name in PEERS:
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        ahead = any(rows[name][key] < ours[key] for key in ("stall", "bytes", "warm", "again", "peak", "cpu"))
        assert not ahead or "Perdure is not first" in line


def test_ratios_and_increments_have_their_targets(smoke: Smoke) -> None:
    asked = [target["question"] for target in smoke[0]["targets"]]
    assert sum(question.startswith("ratio, ") for question in asked) == 3
    assert sum(question.startswith("increment, bf16") for question in asked) == 3
    assert all(set(target) == {"question", "shown", "target", "met"} for target in smoke[0]["targets"])


def test_an_unknown_question_is_refused_by_name(tmp_path: Path) -> None:
    done = _run(tmp_path, "speed")
    assert done.returncode == 2
    assert "no such question: speed" in done.stderr


def test_what_travels_comes_back_the_same_by_perdure_itself(tmp_path: Path) -> None:
    """The peers are not installed here: of them the page says so."""
    rows, _ = _answers(tmp_path, "travel")
    wanted = {
        f"{client} / {cell}" for client in TRAVELLERS for cell in ("large / up", "large / down", "small / up", "small / down")
    }
    assert wanted <= set(rows)


def test_ranks_are_asked_about_every_engine_and_about_many() -> None:
    show = "from benchmarks.__main__ import APART; print(*APART['ranks'])"
    done = subprocess.run([sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*RANKS, "coordination"]


@pytest.mark.chaos
def test_many_ranks_are_simulated(tmp_path: Path) -> None:
    found, page = _answers(tmp_path, "coordination")
    assert found["leaves"] == 16 * 30
    assert "A simulation of 16 ranks on one machine" in page


@pytest.mark.chaos
@pytest.mark.parametrize("question", RANKS)
def test_ranks_save_restore_and_reshard_in_every_row(tmp_path: Path, question: str) -> None:
    data, page = _answers(tmp_path, question)
    assert (set(data["worlds"]), list(data["resharded"])) == ({"1", "2"}, ["1 to 2", "2 to 1"])
    for world, one in data["worlds"].items():
        assert {kind: set(found["rows"]) for kind, found in one.items()} == RANKS[question]
        for rows in (found["rows"] for found in one.values()):
            assert all(rows[name]["saves"] for name in rows if name != UNIVERSAL)
            assert all(len(rows[name]["loads"][0]["read"]) == int(world) for name in rows)
    for change, one in data["resharded"].items():
        for rows in (found["rows"] for found in one.values()):
            read = {name: found["others"][0]["read"] for name, found in rows.items() if found["others"]}
            assert set(read) == set(rows) - {OWN}
            assert {len(by_rank) for by_rank in read.values()} == {int(change[-1])}
    told = [line for line in page.splitlines() if " | ZeRO " in line or " | DDP " in line or " | FSDP2 " in line]
    peers = [line for line in told if PERDURE_RUN not in line and "PerdureWriter" not in line]
    assert all("**Perdure is not first** in " in line or "Perdure is first in all" in line for line in peers)
    assert (len(told), len(peers)) == {"ranks-ddp": (16, 12), "ranks-fsdp2": (16, 8), "ranks-zero": (20, 12)}[question]
