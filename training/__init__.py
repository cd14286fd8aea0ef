"""Everything that would be true without Prefect. `Session` is handed on lazily, so nothing here costs torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.training.engine.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:  # Any: the type of a lazily imported attribute
    if name == "Session":
        from perdure.training.engine.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
