"""Two nodes as network namespaces with agents of their own: one of them killed, the other killed, the cable cut and healed.
Each time the run ends with the bits of one that nobody disturbed."""

import contextlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import two_machines
from conftest import BUCKET, S3Server
from harness import LAUNCHED, PERDURE, Direct, Run, all_pids, wait_until
from many_ranks import OtherNode, OwnDisks, environment, ranks_run
from two_machines import Machines

from perdure.training.agent.lock import read_agent
from perdure.training.checkpoint import lineage
from perdure.training.errors import Stopped
from perdure.training.process import SESSION_VARIABLE

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(bool(two_machines.missing()), reason=two_machines.missing())]


class FirstNode:
    """`perdure run` on node 0."""

    def __init__(self, run: Run, machines: Machines) -> None:
        self.run = run
        settings = [part for text in run.settings for part in ("--set", text)]
        with open(run.toml.parent / "node-0.log", "ab") as log:
            words = [*machines.within(0), *PERDURE, "run", str(run.toml), *settings]
            self.process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        LAUNCHED.append(self)

    def kill(self) -> None:
        """All of it at once, as when the machine is gone: parent, server, flow, agent, saver, rank."""
        agent = read_agent(self.run.dir)
        marked = [pid for pid in all_pids() if agent and environment(pid).get(SESSION_VARIABLE) == str(agent.pid)]
        for pid in {*marked, *_below(self.process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def counter(run: Run) -> int:
    return int(json.loads(run.dir.progress_json.read_bytes())["counter"])


def _below(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(descendant for child in found for descendant in _below(child))]


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run that nobody disturbs, of two ranks on one machine."""
    run = ranks_run(tmp_path_factory.mktemp("reference"), "ddp")
    assert Direct(run).train_to_end().reason == "complete"
    return run.digest()


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines.two_machines() as found:
        yield found


@pytest.fixture
def run(tmp_path: Path, machines: Machines) -> Run:
    found = ranks_run(tmp_path, "ddp")
    found.settings += ["launch.nodes=2", "launch.processes=1", "launch.node_timeout=8", "launch.env.TINY_sleep=0.3"]
    return found


def test_node_1_is_lost_and_another_takes_its_place(run: Run, machines: Machines, digest: str) -> None:
    first, lost = FirstNode(run, machines), OtherNode(run, *machines.within(1))
    wait_until(lambda: run.step() >= 8, "step 8")
    lost.lose(1)
    wait_until(
        lambda: any("waits for node 1" in str(event.get("text")) for event in run.events()), "it is said what is waited for"
    )
    node = OtherNode(run, *machines.within(1))
    assert first.process.wait(120) == 0
    assert node.process.wait(60) == 0, node.log()
    [failed] = [event for event in run.events() if event["kind"] == "failed"]
    assert failed["error_class"] == "infrastructure"
    assert run.digest() == digest


def test_node_0_is_lost_and_node_1_joins_the_next_launch(run: Run, machines: Machines, digest: str) -> None:
    first, node = FirstNode(run, machines), OtherNode(run, *machines.within(1))
    wait_until(lambda: run.step() >= 8, "step 8")
    first.kill()
    saved = run.committed()
    wait_until(lambda: lineage.read_end(run.dir, 1, 1), "node 1 has left the launch")
    assert run.committed() == saved, "alone it commits nothing"
    first = FirstNode(run, machines)
    assert first.process.wait(180) == 0
    assert node.process.wait(60) == 0, node.log()
    assert run.digest() == digest


def test_the_cable_is_cut_longer_than_a_step_may_take_and_healed(run: Run, machines: Machines, digest: str) -> None:
    run.settings += ["launch.step_timeout=10"]
    first, node = FirstNode(run, machines), OtherNode(run, *machines.within(1))
    wait_until(lambda: run.step() >= 8, "step 8")
    machines.cut()
    wait_until(lambda: lineage.read_end(run.dir, 1), "the launch has ended")
    end = lineage.read_end(run.dir, 1)
    assert end is not None
    assert end.error_class == "hang", end
    wait_until(lambda: node.agent(2), "node 1 has joined the next one")
    machines.heal()
    assert first.process.wait(180) == 0
    assert node.process.wait(60) == 0, node.log()
    assert run.digest() == digest
    assert {name.token for name in lineage.lineage(run.dir)} == {1, 2}, "one lineage"


def test_the_cable_is_cut_for_a_moment_and_nothing_ends(run: Run, machines: Machines, digest: str) -> None:
    first, node = FirstNode(run, machines), OtherNode(run, *machines.within(1))
    wait_until(lambda: run.step() >= 8, "step 8")
    machines.cut()
    at, beats = run.step(), counter(run)
    wait_until(lambda: counter(run) > beats + 12, "beats of node 0")
    assert run.step() <= at + 2, "no step without the other node"
    machines.heal()
    assert first.process.wait(180) == 0
    assert node.process.wait(60) == 0
    assert run.digest() == digest
    assert {name.token for name in run.committed()} == {1}


@contextlib.contextmanager
def relayed(address: str, port: int) -> Iterator[int]:
    """The port of this machine's loopback at another of its addresses; which port that is."""
    connections: list[threading.Thread] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # shut down
            while True:
                ours = listener.accept()[0]
                connections.append(threading.Thread(target=relay, args=(ours, port)))
                connections[-1].start()

    with socket.create_server((address, 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()
    for connection in connections:
        connection.join(30)


def relay(ours: socket.socket, port: int) -> None:
    """What comes on either side goes out on the other, until one is closed, or its machine is gone."""
    with ours, socket.create_connection(("127.0.0.1", port)) as theirs, contextlib.suppress(OSError):
        while ready := select.select([ours, theirs], [], [], 20)[0]:
            for one in ready:
                if not (data := one.recv(1 << 16)):
                    return
                (theirs if one is ours else ours).sendall(data)


@pytest.fixture
def disks(tmp_path: Path, machines: Machines, s3_keys: S3Server) -> Iterator[OwnDisks]:
    """Two machines with nothing between them but the network and an S3 server."""
    port = int(s3_keys.endpoint.rpartition(":")[2])
    with relayed(machines.outside, port) as reached:
        there = [f"store.endpoint_url=http://{machines.outside}:{reached}", "store.region=us-east-1"]
        more = ["launch.node_timeout=8", "launch.env.TINY_sleep=0.3"]
        yield OwnDisks(tmp_path, "ddp", f"s3://{BUCKET}/nodes/{secrets.token_hex(6)}", *there, *more)


@pytest.mark.timeout(600)
def test_without_a_shared_disk_node_1_and_then_node_0_are_lost_and_bare_machines_go_on(
    disks: OwnDisks, machines: Machines, digest: str
) -> None:
    run = disks.zero
    first, lost = FirstNode(run, machines), disks.node(*machines.within(1))
    wait_until(run.committed, "a checkpoint")
    lost.lose(1)
    shutil.rmtree(disks.one.dir.root)
    node = disks.node(*machines.within(1))
    wait_until(lambda: run.committed()[-1].token == 2, "one of the next launch")
    told = (disks.one.dir.logs(2, 1) / "agent.log").read_text()
    assert re.search(r"rank 1 read \d+ bytes of checkpoint \S+ from the store", told), told
    first.kill()
    saved = run.committed()
    shutil.rmtree(run.dir.root)
    first = FirstNode(run, machines)
    assert first.process.wait(240) == 0
    assert node.process.wait(60) == 0, node.log()
    assert run.digest() == digest
    assert set(saved) <= set(run.committed()), "what was committed is in the store"
    assert not list(run.dir.checkpoint(saved[-1]).glob("*.pack")), "and stays there"
    assert {name.token for name in lineage.lineage(run.dir)} == {1, 2, 3}


def test_without_a_shared_disk_the_cable_is_cut_and_one_lineage_goes_on(
    disks: OwnDisks, machines: Machines, digest: str
) -> None:
    run = disks.zero
    run.settings += ["launch.step_timeout=10"]
    first, node = FirstNode(run, machines), disks.node(*machines.within(1))
    wait_until(run.committed, "a checkpoint")
    machines.cut()
    wait_until(lambda: lineage.read_end(run.dir, 1), "the launch has ended")
    assert not lineage.read_end(disks.one.dir, 1), "which node 1 cannot know"
    machines.heal()
    wait_until(lambda: node.agent(2), "node 1 has joined the next one")
    assert first.process.wait(240) == 0
    assert node.process.wait(60) == 0, node.log()
    assert run.digest() == digest
    assert {name.token for name in run.committed()} == {1, 2}
    assert run.committed() == sorted(lineage.lineage(run.dir)), "all of one lineage"


def test_sigterm_to_node_1_stops_the_whole_run_with_its_state_saved(run: Run, machines: Machines, digest: str) -> None:
    first, node = FirstNode(run, machines), OtherNode(run, *machines.within(1))
    wait_until(lambda: run.step() >= 8, "step 8")
    node.process.send_signal(signal.SIGTERM)
    assert (first.process.wait(60), node.process.wait(60)) == (Stopped.exit_code, Stopped.exit_code)
    assert run.committed()[-1].step >= 8
    first, node = FirstNode(run, machines), OtherNode(run, *machines.within(1))
    assert (first.process.wait(180), node.process.wait(60)) == (0, 0)
    assert run.digest() == digest
