"""Which network interface leads to another node."""

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_towards(host: str) -> str:
    """Name of the interface by which this machine reaches that one; "" where that cannot be told. Unasked, gloo takes the one
    that this machine's own name leads to, which others often cannot reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                told = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(told[20:24]) == own:
                    return name
    return ""
