"""Why a launch ended is always written, whatever the user's error says."""

from pathlib import Path

from perdure.training import files
from perdure.training.checkpoint.lineage import LaunchEnd, read_end, write_end
from perdure.training.run_dir import RunDir


def test_error_text_that_is_no_utf8_is_written_all_the_same(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    files.make_dirs(run.launches)
    end = LaunchEnd(token=1, reason="failed", error_class="user", step=3, detail="bad \udc80", log_tail="\ud800", ended=0.0)
    write_end(run, end)
    found = read_end(run, 1)
    assert found is not None
    assert found.detail.startswith("bad ")
