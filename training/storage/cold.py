"""Storage classes that have to be thawed before they are read: what a store with such classes can be asked. Nothing waits."""

from dataclasses import dataclass
from typing import Literal, Protocol

Speed = Literal["Bulk", "Standard", "Expedited"]
"""S3's word for how quickly, and how dearly, an object is thawed."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Whether an object can be read now: readable (always, or while it is thawed), frozen, or thawing."""

    state: Literal["readable", "frozen", "thawing"]
    until: float = 0.0
    """Unix seconds until which a thawed object can be read; 0: for good, or not known."""


class ColdStore(Protocol):
    """Keys are those of the store it belongs to. Everything raises StoreError."""

    def settle(self, key: str, digest: str) -> str:
        """Move an object whose bytes were proven to be of `digest` into the class of the settings, if that has to be thawed:
        it cannot be read after this. The class, "" where it stays as it is."""
        ...

    def settled_in(self, key: str, digest: str) -> str:
        """The class that has to be thawed in which the object lies, if it was proven to be of this digest before; else ""."""
        ...

    def access(self, key: str) -> Access:
        """Raises ObjectNotFound."""
        ...

    def thaw(self, key: str, days: int, speed: Speed) -> None:
        """Ask for a copy that can be read for `days`; asking twice is fine."""
        ...
