"""A run under the sbatch script on a real Slurm: warned, requeued, cancelled and submitted again, it ends with the bits of an
undisturbed one."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from conftest import free_port
from harness import Direct, Run, copy_tiny, kill, wait_until
from many_ranks import ranks, ranks_run

from perdure.training.agent import roster

SCRIPT = Path(__file__).parents[2] / "deployments/slurm/perdure.sbatch"
pytestmark = [pytest.mark.chaos, pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm"), free_port) as found:
        found.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield found


def test_a_job_that_is_warned_is_requeued_and_goes_on_to_the_same_bits(slurm: slurm_cluster.Cluster, tmp_path: Path) -> None:
    reference = Run(copy_tiny(tmp_path / "reference"), "store.url=''")
    end = Direct(reference).train_to_end()
    assert end.reason == "complete", end

    run = Run(copy_tiny(tmp_path / "tiny"), "store.url=''", "params.sleep=0.2")
    log = tmp_path / "job.log"
    settings = [part for text in run.settings for part in ("--set", text)]
    command = ["--cpus-per-task=1", f"--output={log}", str(SCRIPT), str(run.toml), *settings]
    job = slurm.submit(*command)
    wait_until(lambda: run.step() >= 7, "step 7")
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@180 sends
    wait_until(lambda: slurm.job(job).get("Restarts") == "1", "requeued")
    saved = run.committed()[-1].step
    assert saved >= 7
    assert not run.processes()

    wait_until(lambda: run.step() >= saved + 5, "trains again")
    assert slurm.job(job)["Restarts"] == "1", "once"
    slurm.call("scancel", job)
    wait_until(lambda: slurm.job(job)["JobState"] == "CANCELLED", "cancelled")
    assert run.committed()[-1].step >= saved + 5, "the grace of a scancel is enough to save"
    assert not run.processes()

    job = slurm.submit(*command)
    wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED", "complete")
    assert run.digest() == reference.digest()
    text = log.read_text()
    assert text.count("starting a local Prefect server") == 3, "the output of all lives"
    assert "is finished: step 40" in text


def test_ranks_that_srun_starts_go_on_to_the_same_bits_after_one_of_them_is_killed(
    slurm: slurm_cluster.Cluster, tmp_path: Path
) -> None:
    reference = ranks_run(tmp_path / "reference", "ddp")
    end = Direct(reference).train_to_end()
    assert end.reason == "complete", end

    run = ranks_run(tmp_path, "ddp")
    log = tmp_path / "job.log"
    settings = [*run.settings, "launch.launcher=srun", "launch.env.TINY_sleep=0.3"]
    words = [part for text in settings for part in ("--set", text)]
    job = slurm.submit("--cpus-per-task=2", f"--output={log}", str(SCRIPT), str(run.toml), *words)
    wait_until(lambda: run.step() >= 8, "step 8")
    assert slurm.call("squeue", "--steps", "--noheader", f"--jobs={job}").count(f"{job}.0"), "a step of the job"
    at, (first, second) = run.step(), ranks(run)
    kill(second)
    wait_until(lambda: not first.is_alive(), "the other rank gone", 20)
    wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED", "complete")

    [failed] = [event for event in run.events() if event["kind"] == "failed"]
    assert (failed["error_class"], str(failed["detail"])[:6]) == ("infrastructure", "rank 1")
    assert int(str(failed["last_good"])) >= at - 1, "what both had in memory is saved"
    assert run.digest() == reference.digest()
    assert not run.processes()


def test_a_job_of_two_nodes_goes_on_to_the_same_bits_after_one_of_them_lost_its_agent(
    slurm: slurm_cluster.Cluster, tmp_path: Path
) -> None:
    reference = ranks_run(tmp_path / "reference", "ddp")
    end = Direct(reference).train_to_end()
    assert end.reason == "complete", end

    run = ranks_run(tmp_path, "ddp")
    nodes = 'processes = 1\nnodes = 2\naddress = "127.0.0.1"\nnode_timeout = 8\n'
    run.toml.write_text(run.toml.read_text().replace("processes = 2\n", nodes))
    words = [part for text in [*run.settings, "launch.env.TINY_sleep=0.3"] for part in ("--set", text)]
    log = tmp_path / "job.log"
    job = slurm.submit("--nodes=2", "--cpus-per-task=1", f"--output={log}", str(SCRIPT), str(run.toml), *words)
    wait_until(lambda: run.step() >= 8, "step 8")
    lost = roster.read_node(run.dir, 1, 1)
    assert lost is not None
    kill(lost.process)
    wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED", "complete")

    text = log.read_text()
    assert [text.count(f"joins launch {token}") for token in (1, 2, 3)] == [1, 1, 0]
    [failed] = [event for event in run.events() if event["kind"] == "failed"]
    assert failed["error_class"] == "infrastructure"
    assert run.digest() == reference.digest()
    assert not run.processes()
