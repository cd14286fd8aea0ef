"""TINY of the case files: dropout, AdamW, a scheduler, a shuffled data set, one trace line per step."""

import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from perdure.training import Session
from perdure.training.engine.data import ResumableLoader

Item = tuple[int, torch.Tensor]


class Items(Dataset[Item]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Item:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(16, generator=generator) + random.random() * 0.01 + float(np.random.rand()) * 0.01


def train(session: Session) -> None:
    params = {**session.params, **trial()}
    leave_out_compiler()
    phase_sleep(params, "setup")
    if "child" in params:  # a helper of the user's own that nobody waits for
        Path(params["child"]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    width = int(params.get("width", 32))
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=session.total_steps + 1)
    loader = ResumableLoader(Items(), seed=3, batch_size=int(params.get("batch", 4)))
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    batches = loader.forever()

    def one_step(step: int) -> None:
        indices, x = next(batches)
        if "work_in" in params:  # code that changes its working directory
            os.chdir(params["work_in"])
        if params.get("poke_at") == step:
            with torch.no_grad():
                model[0].weight.add_(0.0)
        if params.get("hold_gil_at") == step:
            ctypes.PyDLL(None).sleep(int(params["hold_secs"]))  # no other thread of this process runs meanwhile
        if params.get("nan_at") == step:
            x = x * float("nan")
        if params.get("wait_at") == step:
            Path("held").write_text(str(os.getpid()))
            while not Path("go-on").exists():
                time.sleep(0.01)
        if params.get("slow_batch_at") == step:
            phase_sleep(params, "batch")
        loss = model(x).square().mean() + 0.01 * random.random()
        optimizer.zero_grad()
        loss.backward()
        if params.get("die_before") == step:
            die(params["die_how"])
        optimizer.step()
        scheduler.step()
        session.log(loss=loss, tokens=len(indices), clock=time.perf_counter())
        if step in (9, 32):
            session.log(accuracy=0.5 if step == 9 else float("nan"))
        loss = loss.detach()
        trace(params, step=step, indices=indices.tolist(), loss=float(loss).hex(), lr=optimizer.param_groups[0]["lr"].hex())
        time.sleep(float(params.get("sleep", 0.0)))
        if params.get("name_at") == step:
            session.save("before-decay")
        if params.get("evaluate_at") == step:
            with session.evaluation():
                torch.rand(7)
                random.random()
                phase_sleep(params, "evaluation")
        if "memory" in params:
            Path(params["memory"]).write_text(str(peak_bytes()))
        if params.get("die_at") == step:
            die(params["die_how"])
        if params.get("fail_at") == step and not Path("failed-once").exists():
            Path("failed-once").touch()
            raise OSError("the network went away (made up by the test)")
        if params.get("bug_at") == step:
            raise ValueError("a bug in the training code (made up by the test)")

    if params.get("nested"):  # a loop that cannot be turned inside out
        step, going = session.resume(), True
        while going:
            for _ in range(7):
                one_step(step)
                going, step = session.end_step(), session.step
                if not going:
                    break
    else:
        for step in session.steps():
            one_step(step)
    phase_sleep(params, "after")


def leave_out_compiler() -> None:
    """torch imports its compiler, 800 modules, when the first optimizer is made: half the work of a launch, and nothing here
    is compiled."""
    compiler = types.ModuleType("torch._dynamo")
    compiler.__dict__.update(disable=lambda function, *_, **__: function, graph_break=lambda: None)
    sys.modules["torch._dynamo"] = torch.__dict__["_dynamo"] = compiler


def trial() -> dict[str, object]:
    """What a test has done to one launch only is no setting of the run: it comes as launch.env.TINY_name."""
    texts = {name[5:]: value for name, value in os.environ.items() if name.startswith("TINY_")}
    return {name: json.loads(text) if text[:1].isdigit() else text for name, text in texts.items()}


def die(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abort":
        os.abort()
    if how == "segfault":
        ctypes.string_at(0)
    if how == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
        bytearray(8 << 30)
    raise ValueError("an exception in the training code (made up by the test)")


def peak_bytes() -> int:
    """Most memory this process ever had; ru_maxrss would also count whoever forked it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def phase_sleep(params: dict, phase: str) -> None:
    if params.get("sleep_in") == phase:
        Path(f"in-{phase}").touch()
        time.sleep(float(params["sleep_secs"]))
    if params.get("wait_in") == phase:
        Path("held").touch()
        while not Path("go-on").exists():
            time.sleep(0.01)


def trace(params: dict, **values: object) -> None:
    if "trace" in params:
        with open(params["trace"], "a") as file:
            file.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    train(Session.by_hand(Path(__file__).parent / "run.toml"))
