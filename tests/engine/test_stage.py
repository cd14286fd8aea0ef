"""Staging: what is in the slot is what was live, however many tensors there are and however the state grows."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perdure.training.checkpoint.audit import snapshots_digest
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.engine import host_memory
from perdure.training.engine.audit import state_digest
from perdure.training.engine.overlap import Overlap
from perdure.training.engine.remembered import Memory
from perdure.training.engine.stage import Stager
from perdure.training.engine.state import collect
from perdure.training.errors import ConfigError, TrainingFailed
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import About, SlotWriter, Snapshot, create_slot

Slots = list[int]


@pytest.fixture
def slots() -> Iterator[Slots]:
    found = [create_slot(f"test-{number}") for number in range(2)]
    yield found
    for fd in found:
        os.close(fd)


def about(step: int = 1) -> About:
    return About(step=step, world={}, data={}, environment={}, code={}, config={}, loss={})


def digest_in(slot: int) -> str:
    snapshot = Snapshot(slot)
    assert snapshot.whole
    digest = snapshots_digest([snapshot])
    snapshot.close()
    return digest


@pytest.mark.chaos  # half a minute of making tensors; tests/checkpoint has as many leaves in every run
def test_two_hundred_thousand_tensors_go_through_slot_and_checkpoint(slots: Slots, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    model = nn.ParameterList([torch.randn(3, generator=generator) for _ in range(50_000)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tracked, memory = {"model": model, "optimizer": optimizer}, Memory()
    stager = Stager([SlotWriter(fd) for fd in slots])
    for step in (1, 2):
        for parameter in model:
            parameter.grad = parameter.detach() * step
        optimizer.step()
        leaves = collect(tracked, memory)
        stager.copy(step % 2, leaves, about(step))
    assert sum(leaf.kind == "tensor" for leaf in leaves) == 200_000
    assert digest_in(slots[0]) == state_digest(leaves)
    snapshot, run = Snapshot(slots[0]), RunDir(tmp_path)
    manifest = write_checkpoint(run, "many", CheckpointName(2, 1), [snapshot], encoding="auto", threads=1)
    assert manifest.state_digest == state_digest(leaves)
    with open_checkpoint(run.checkpoint(CheckpointName(2, 1))) as reader:
        for number in (0, 1, 25_000, 49_999):
            live = optimizer.state[model[number]]["exp_avg_sq"]
            assert bytes(reader.read(f"optimizer/model.{number}/exp_avg_sq")) == live.numpy().tobytes()
    snapshot.close()


def batch_norm_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters())


def forward_backward(model: nn.Module) -> None:
    model(torch.randn(4, 8)).square().mean().backward()


def test_state_that_grows_between_saves_is_whole_in_the_grown_slot(slots: Slots) -> None:
    model, optimizer = batch_norm_net()
    tracked, memory = {"model": model, "optimizer": optimizer}, Memory()
    model[2].requires_grad_(False)
    stager = Stager([SlotWriter(fd) for fd in slots])
    sizes = []
    for step in range(4):
        if step == 2:
            model[2].requires_grad_(True)  # its moments appear in this step
            tracked["more"] = nn.Linear(600, 600)
        forward_backward(model)
        optimizer.step()
        leaves = collect(tracked, memory)
        sizes.append(stager.prepare(leaves))
        stager.copy(step % 2, leaves, about(step))
        assert digest_in(slots[step % 2]) == state_digest(leaves)
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3]


def test_parameter_that_gets_other_storage_or_shape_is_seen(slots: Slots) -> None:
    model, optimizer = batch_norm_net()
    other = Holder(torch.ones(3))
    tracked, memory = {"model": model, "other": other, "optimizer": optimizer}, Memory()
    stager = Stager([SlotWriter(fd) for fd in slots])
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: setattr(other, "value", torch.zeros(3)),
        lambda: setattr(other, "value", torch.zeros(3, dtype=torch.int32)),
        lambda: setattr(other, "value", torch.zeros(1, 3)),
        lambda: setattr(model[0].weight, "data", torch.ones(16, 8)),
        lambda: setattr(model[0].weight, "data", torch.ones(8, 16)),
        lambda: model.half(),
        lambda: model[1].register_buffer("more", torch.arange(3)),
        lambda: model[1].register_buffer("more", torch.arange(4), persistent=False),
        lambda: model.append(nn.Linear(1, 1)),
        lambda: model.register_state_dict_post_hook(lambda _, state, *__: state.update({"0.weight": torch.ones(1)})),
    ]
    for number, change in enumerate(changes):
        change()
        leaves = collect(tracked)
        stager.copy(number % 2, collect(tracked, memory), about(number))
        assert digest_in(slots[number % 2]) == state_digest(leaves), number


def test_small_tensors_of_one_shape_are_copied_whatever_their_type_and_layout(slots: Slots) -> None:
    generator = torch.Generator().manual_seed(4)
    values: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex128):
        values += [torch.randn(6, 4, generator=generator).to(dtype) for _ in range(3)]
        values += [torch.randn(4, 6, generator=generator).to(dtype).t(), torch.randn((), generator=generator).to(dtype)]
    values += [torch.zeros(0, 4), torch.randn(1 << 15, generator=generator), torch.randn(1 << 15, generator=generator)]
    values.append(torch.randn(2, generator=generator, dtype=torch.complex64).conj())
    leaves = collect({"all": Holder(values)})
    stager = Stager([SlotWriter(fd) for fd in slots])
    for chosen in (None, range(len(values)), range(0, len(values), 2)):
        staging = stager.begin(0, leaves, about())
        staging.copy(chosen).wait()
        staging.copy_quietly(set(range(len(values))) - set(range(len(values)) if chosen is None else chosen))
        staging.finish()
        assert digest_in(slots[0]) == state_digest(leaves)


# lazy


def staged(slots: Slots) -> tuple[Stager, list[int]]:
    return Stager([SlotWriter(fd) for fd in slots]), []


def threads_of_torch() -> set[int]:
    """Those of this process that Python did not start; what other tests have left may come and go."""
    there = set(map(int, os.listdir("/proc/self/task")))
    return there - {thread.native_id for thread in threading.enumerate() if thread.native_id}


def test_a_copy_beside_the_training_leaves_torchs_threads_to_the_trainer(slots: Slots) -> None:
    torch.set_num_threads(2)  # the fixture puts it back
    model = nn.Linear(2000, 500)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2000)).sum().backward()
    optimizer.step()
    before = threads_of_torch()
    overlap, (stager, announced) = Overlap({"model": model, "optimizer": optimizer}), staged(slots)
    overlap.start(stager.begin(0, collect({"model": model, "optimizer": optimizer}), about()), lambda: announced.append(1))
    overlap.settle()
    assert announced == [1]
    assert threads_of_torch() <= before, "it has a thread of its own, and none of torch's for that"
    overlap.close()


def test_what_forward_changes_is_copied_at_once_and_the_rest_before_the_next_step(slots: Slots) -> None:
    model, optimizer = batch_norm_net()
    tracked = {"model": model, "optimizer": optimizer}
    forward_backward(model)
    optimizer.step()
    overlap, (stager, announced) = Overlap(tracked), staged(slots)
    leaves = collect(tracked)
    before = state_digest(leaves)
    overlap.start(stager.begin(0, leaves, about()), lambda: announced.append(1))
    forward_backward(model)  # running statistics move on
    assert announced == []
    snapshot = Snapshot(slots[0])
    assert not snapshot.whole, "nobody may take it before it is known to be right"
    snapshot.close()
    optimizer.step()
    assert announced == [1]
    assert digest_in(slots[0]) == before != state_digest(collect(tracked))
    overlap.close()


def test_closure_scaler_and_second_optimizer_wait_for_the_copy(slots: Slots) -> None:
    model, first = batch_norm_net()
    other = nn.Linear(8, 1)
    second, scaler = torch.optim.LBFGS(other.parameters(), max_iter=3), torch.amp.GradScaler("cpu", init_scale=4.0)
    tracked = {"model": model, "other": other, "first": first, "second": second, "scaler": scaler}
    x = torch.randn(4, 8)

    def closure() -> torch.Tensor:
        second.zero_grad()
        loss = other(x).square().mean()
        loss.backward()
        return loss

    def step() -> None:
        first.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(first)
        scaler.update()
        second.step(closure)

    step()
    overlap, (stager, announced) = Overlap(tracked), staged(slots)
    for number in range(4):
        leaves = collect(tracked)
        before = state_digest(leaves)
        overlap.start(stager.begin(number % 2, leaves, about(number)), lambda number=number: announced.append(number))
        if number % 2:
            second.step(closure)
        step()
        assert announced == list(range(number + 1))
        assert digest_in(slots[number % 2]) == before
    overlap.close()


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_change_outside_the_step_is_refused_by_name_and_never_whole(slots: Slots, what: str) -> None:
    model, optimizer = batch_norm_net()
    forward_backward(model)
    optimizer.step()
    tracked = {"model": model, "optimizer": optimizer}
    overlap, (stager, announced) = Overlap(tracked), staged(slots)
    overlap.start(stager.begin(0, collect(tracked), about()), lambda: announced.append(1))
    with torch.no_grad():
        (model[0].weight if what == "weight" else optimizer.state[model[0].weight]["exp_avg"]).mul_(2)
    name = "model/0.weight" if what == "weight" else "optimizer/model.0.weight/exp_avg"
    with pytest.raises(TrainingFailed, match=name) as caught:
        optimizer.step()
    assert "checkpoint.lazy" in caught.value.hint
    snapshot = Snapshot(slots[0])
    assert (announced, snapshot.whole) == ([], False)
    snapshot.close()
    overlap.close()


def test_loading_a_state_waits_for_the_copy(slots: Slots) -> None:
    model, optimizer = batch_norm_net()
    forward_backward(model)
    optimizer.step()
    tracked = {"model": model, "optimizer": optimizer}
    overlap, (stager, announced) = Overlap(tracked), staged(slots)
    saved = optimizer.state_dict()
    for load in (lambda: model.load_state_dict(batch_norm_net()[0].state_dict()), lambda: optimizer.load_state_dict(saved)):
        before = state_digest(leaves := collect(tracked))
        overlap.start(stager.begin(0, leaves, about()), lambda: announced.append(1))
        load()
        assert digest_in(slots[0]) == before
    assert announced == [1, 1]
    overlap.close()


# memory of the machine


def fake_system(folder: Path, available: int, groups: dict[str, dict[str, str]], own: str) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available >> 10} kB\n")
    (proc / "self/cgroup").write_text(own)
    for group, contents in groups.items():
        (cgroups / group).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (cgroups / group / name).write_text(text)
    return proc, cgroups


MIB = 1 << 20
STAT = f"anon 5\ninactive_file {10 * MIB}\nactive_file {5 * MIB}\n"
V2 = {"memory.max": f"{100 * MIB}\n", "memory.current": f"{60 * MIB}\n", "memory.stat": STAT}
V1 = {
    "memory.limit_in_bytes": f"{100 * MIB}\n",
    "memory.usage_in_bytes": f"{60 * MIB}\n",
    "memory.stat": STAT.replace("inactive_file", "total_inactive_file").replace("\nactive", "\ntotal_active"),
}


@pytest.mark.parametrize(
    ("groups", "own", "left"),
    [
        ({}, "0::/\n", 900),
        ({"a/b": V2}, "0::/a/b\n", 55),
        ({"a": V2, "a/b": {"memory.max": "max\n", "memory.current": "0\n", "memory.stat": ""}}, "0::/a/b\n", 55),
        ({"memory/x": V1}, "4:memory:/x\n1:cpu:/x\n0::/\n", 55),
        ({"memory": V1}, "4:cpu,memory:/not/seen/from/in/here\n", 55),
    ],
)
def test_memory_left_is_the_tightest_limit_page_cache_not_counted(
    tmp_path: Path, groups: dict[str, dict[str, str]], own: str, left: int
) -> None:
    proc, cgroups = fake_system(tmp_path, 900 * MIB, groups, own)
    assert host_memory.available(proc, cgroups)[0] == left * MIB
    host_memory.require(left * MIB, MIB, proc=proc, cgroups=cgroups)
    with pytest.raises(ConfigError, match=r"two slots .* need 1\.00 GiB more memory, but .* has only") as caught:
        host_memory.require(1 << 30, 1 << 29, proc=proc, cgroups=cgroups)
    assert caught.value.hint


def test_state_larger_than_the_machine_is_refused_before_its_memory_is_touched(slots: Slots) -> None:
    huge = torch.empty(1).expand(1 << 45)  # 128 TiB, of one number
    with pytest.raises(ConfigError, match="more memory"):
        Stager([SlotWriter(fd) for fd in slots]).prepare(collect({"a": Holder(huge)}))
    assert all(os.fstat(fd).st_size < MIB for fd in slots)


class Holder:
    def __init__(self, value: Any) -> None:  # Any: a tensor, or several
        self.value = value

    def state_dict(self) -> dict[str, Any]:  # Any: as above
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: as above
        self.value = state["value"]


def test_parameters_put_elsewhere_before_the_copy_gets_to_them_are_saved_as_they_were(slots: Slots) -> None:
    model, optimizer = batch_norm_net()
    forward_backward(model)
    optimizer.step()
    tracked = {"model": model, "optimizer": optimizer}
    overlap, (stager, announced) = Overlap(tracked), staged(slots)
    leaves = collect(tracked)
    before, swapped = state_digest(leaves), threading.Event()
    overlap._thread.submit(swapped.wait)  # the copy begins after the swap
    overlap.start(stager.begin(0, leaves, about()), lambda: announced.append(1))
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    swapped.set()
    overlap.settle()
    assert announced == [1]
    assert digest_in(slots[0]) == before != state_digest(collect(tracked))
    overlap.close()
