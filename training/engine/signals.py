"""SIGTERM in a rank: a flag, read at the next step boundary. Installed before torch is imported, and again after user code."""

import signal

received = False


def _on_sigterm(*_: object) -> None:
    global received
    received = True


def install() -> None:
    """SIGTERM asks for a save and an end; SIGINT is the business of whoever owns the terminal."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
