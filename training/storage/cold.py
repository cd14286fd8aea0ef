"""Storage classes that must be thawed before they are read: what a store with such classes can be asked. Nothing here waits."""

from dataclasses import dataclass
from typing import Literal, Protocol

NEED_THAW = ("GLACIER", "DEEP_ARCHIVE")
"""Classes of S3 that cannot be read as they are."""
Speed = Literal["Bulk", "Standard", "Expedited"]
"""S3's word for how quickly, and how dearly, an object is thawed."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Whether an object can be read now: readable (always, or while it is thawed), frozen, or thawing."""

    state: Literal["readable", "frozen", "thawing"]
    until: float = 0.0
    """Unix seconds until which a thawed object can be read; 0: for good, or not known."""

    @property
    def ready(self) -> bool:
        return self.state == "readable"


class ColdStore(Protocol):
    """Keys are those of the store it belongs to. Everything raises StoreError."""

    def settle(self, key: str) -> None:
        """Move an object whose bytes were proven into the store's class, if that needs a thaw: it cannot be read after this."""
        ...

    def is_settled(self, key: str, size: int) -> bool:
        """The object has this size and lies in a class that needs a thaw: it was proven before it got there."""
        ...

    def access(self, key: str) -> Access:
        """Raises ObjectNotFound."""
        ...

    def thaw(self, key: str, days: int, speed: Speed) -> None:
        """Ask for a copy that can be read for `days`; asking twice is fine."""
        ...
