"""The state of a DeepSpeed engine comes back bit for bit, loss scale, schedule and counters included, or is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "zero_round_trip.py"


@pytest.mark.parametrize("more", [pytest.param([], id="each-stage"), pytest.param(["more"], marks=pytest.mark.chaos)])
def test_engine_of_another_process_goes_on_as_the_saved_one_did(more: list[str]) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone["MASTER_PORT"] = "0"  # any: one that is free now may be taken before deepspeed is imported
    environment = {**os.environ, **alone, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, str(SCRIPT), *more], env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-2000:]
