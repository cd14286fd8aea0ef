"""Another global batch with --replan: the learning rate that the very next step uses, and what is said of it."""

import json
import math
from pathlib import Path

import torch
from harness import PATIENCE, Direct, Run, copy_tiny, wait_until

from perdure.training.checkpoint import manifest
from perdure.training.run_dir import CheckpointName


def planned(steps: int) -> list[float]:
    """The learning rates after each step of TINY."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_a_doubled_batch_scales_the_learning_rates_of_all_steps_to_come(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    run = Run(
        copy_tiny(tmp_path / "tiny"), "run.steps=8", "run.chunk=4", "checkpoint.every=4", f"launch.env.TINY_trace={trace}"
    )
    first = Direct(run)
    first.launch(lease=4)
    wait_until(lambda: run.committed() == [CheckpointName(4, 1)], "step 4")
    first.end()
    second = Direct(run)
    second.launch(["run.scale_lr=true", "launch.env.TINY_batch=8"], replan=True).process.wait(PATIENCE)
    assert second.end().reason == "complete"

    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [len(line["indices"]) for line in lines] == [4] * 4 + [8] * 4
    for line, rate in zip(lines, planned(8), strict=True):
        factor = 1.0 if line["step"] < 4 else math.sqrt(2)
        assert math.isclose(float.fromhex(line["lr"]), rate * factor), line["step"]
    text = (
        "the global batch changes from 4 to 8 samples, the learning rate of 'optimizer' is scaled by the square root, x 1.414"
    )
    assert [event["text"] for event in run.events() if event["kind"] == "notice"] == [f"re-planned: {text}"]
    last = manifest.read(run.dir.checkpoint(run.committed()[-1]))
    assert (last.step, last.exact, last.exact_reasons, last.data["loader"]["step_samples"]) == (8, False, (text,), 8)
