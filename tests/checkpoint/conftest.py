"""A run directory to write checkpoints to."""

from pathlib import Path

import pytest

from perdure.training.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory without a run.json."""
    return RunDir(tmp_path / "run")
