"""Which ranks are slow, and what is said of another topology on resume."""

from pathlib import Path
from typing import Any

import pytest

from perdure.training.engine.environment import differences, driver_version
from perdure.training.engine.pace import slow_ranks
from perdure.training.engine.topology import Move


@pytest.mark.parametrize(
    ("works", "step_secs", "slow"),
    [
        ([0.1, 0.1, 0.1, 0.1], 0.2, []),
        ([0.1, 0.3, 0.1, 0.16], 0.3, [1, 3]),
        ([0.16, 0.1], 0.2, [0]),
        ([0.14, 0.1], 0.2, []),
        ([0.001, 0.004, 0.001], 0.3, []),
        ([0.3, 0.3, 0.1, 0.1], 0.3, [0, 1]),
        ([0.5], 0.5, []),
    ],
)
def test_a_rank_is_slow_that_works_half_as_long_again_and_costs_a_tenth_of_the_step(
    works: list[float], step_secs: float, slow: list[int]
) -> None:
    assert slow_ranks(works, step_secs) == slow


WORLD: dict[str, Any] = {"size": 2, "hosts": [2], "device": "cpu", "devices": 2}


def test_another_topology_is_told_with_what_a_step_took() -> None:
    move = Move(WORLD | {"step_secs": 0.5}, WORLD | {"hosts": [1, 1], "devices": 8})
    told = "devices: 2 in the checkpoint, 8 now; hosts: [2] in the checkpoint, [1, 1] now"
    assert move.notice == f"resumed on another topology: {told}; a step took 0.5 s there"
    assert move.with_hosts({"cpu": "a"}, {"cpu": "a"}) == ({"cpu": "a"}, {"cpu": "a"}), "gloo adds up in the order of ranks"
    assert differences(*move.with_hosts({"nccl": "2"}, {"nccl": "2"})) == ["hosts: [2] in the checkpoint, [1, 1] now"]


def test_a_checkpoint_from_before_topologies_were_recorded_differs_in_nothing_it_does_not_know() -> None:
    assert Move({"size": 2}, WORLD).changes == []
    assert Move({"size": 4}, WORLD).changes == ["size: 4 in the checkpoint, 2 now"]
    assert Move({"size": 2, "meshes": [{"shape": [2], "names": []}]}, WORLD).changes[0].startswith("meshes: ")


@pytest.mark.parametrize(
    ("text", "version"),
    [  # as public bug reports have it
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder@U16)\n", "550.54.15"),
        ("nothing of the kind\n", None),
    ],
)
def test_the_driver_is_named_by_its_kernel_module(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "missing") is None
