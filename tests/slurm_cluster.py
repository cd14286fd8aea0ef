"""A Slurm cluster of two nodes on 127.0.0.1: Debian's slurmctld, slurmd and munged, started by the tests and ended by pid."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
_CONFIG = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
KillWait=30
SlurmdTimeout=15
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,batch_sched_delay=0,bf_interval=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [name for name in NEEDED if not shutil.which(name)]
    if absent:
        return f"Slurm is not installed (apt-get install slurm-wlm munge): no {absent[0]}"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=60).stdout

    def submit(self, *arguments: str) -> str:
        """The job's number."""
        return self.call("sbatch", "--parsable", *arguments).strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of it: JobState, Restarts, ExitCode ..."""
        words = self.call("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def cluster(folder: Path, free_port: Callable[[], int]) -> Iterator[Cluster]:
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    config = _CONFIG.format(host=socket.gethostname(), folder=folder, port=free_port(), ports=(free_port(), free_port()))
    (folder / "slurm.conf").write_text(config)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    munge = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
    munge["seed-file"] = "munge.seed"
    found = Cluster(folder)
    with contextlib.ExitStack() as stack:
        start = [f"--{option}={folder / name}" for option, name in munge.items()]
        nodes = [["slurmd", "-N", node, "-D"] for node in ("n1", "n2")]
        for command in (["munged", "--foreground", "--force", *start], ["slurmctld", "-i", "-D"], *nodes):
            stack.enter_context(_running(command, found))
            if command[0] == "munged":
                _until((folder / "munge.sock").exists)
        _until(lambda: found.call("scontrol", "show", "node").count("State=IDLE") == len(nodes))
        try:
            yield found
        finally:
            found.call("scancel", "--full", "--user=root")
            _until(lambda: not found.call("squeue", "--noheader"))


@contextlib.contextmanager
def _running(command: list[str], found: Cluster) -> Iterator[None]:
    with open(found.folder / f"{command[0]}.out", "ab") as log:
        process = subprocess.Popen(command, env=found.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)  # a slurmd with a job's step ignores SIGTERM
        process.wait()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(subprocess.CalledProcessError):  # the controller does not answer yet
            if condition():
                return
        assert time.monotonic() < deadline, "Slurm did not come up or empty within 60 s"
        time.sleep(0.1)
