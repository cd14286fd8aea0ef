"""Two machines on this one, as network namespaces with host names of their own on a bridge, whose cable can be cut."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_NET = "10.77.5"


def missing() -> str:
    """Why there can be none here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "unshare") if not shutil.which(name)]
    return f"no {absent[0]} here (apt-get install iproute2 util-linux)" if absent else ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class Machines:
    """Nodes 0 and 1."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def name(self, node: int) -> str:
        return f"{self._mark}n{node}"

    def address(self, node: int) -> str:
        return f"{_NET}.{node + 1}"

    outside = f"{_NET}.254"
    """At which both reach what is neither of them."""

    def within(self, node: int) -> list[str]:
        """Words that start a command on that machine."""
        hostname = f'hostname {self.name(node)}; exec "$@"'
        return ["ip", "netns", "exec", self.name(node), "unshare", "--uts", "sh", "-c", hostname, "sh"]

    def cut(self) -> None:
        """Silently, as a cable that is pulled between two switches."""
        ip("link", "set", f"{self._mark}v1", "nomaster")

    def heal(self) -> None:
        ip("link", "set", f"{self._mark}v1", "master", f"{self._mark}b")

    def set_up(self) -> None:
        bridge = f"{self._mark}b"
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        ip("addr", "add", f"{self.outside}/24", "dev", bridge)
        for node in (0, 1):
            space, cable = self.name(node), f"{self._mark}v{node}"
            ip("netns", "add", space)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", cable, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            hosts = Path("/etc/netns", space, "hosts")
            hosts.parent.mkdir(parents=True)
            hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(n)} {self.name(n)}\n" for n in (0, 1)))

    def take_down(self) -> None:
        for node in (0, 1):
            with contextlib.suppress(subprocess.CalledProcessError):  # at once; with its namespace it would go some time later
                ip("link", "del", f"{self._mark}v{node}")
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", self.name(node))
            shutil.rmtree(Path("/etc/netns", self.name(node)), ignore_errors=True)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", f"{self._mark}b")


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    machines = Machines(f"p{os.getpid() % 100000}")
    try:
        machines.set_up()
        yield machines
    finally:
        machines.take_down()
