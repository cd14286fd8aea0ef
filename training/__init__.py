"""Everything that would be true without Prefect. What needs torch is handed on lazily, so nothing here costs it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.training.engine.dcp import PerdureReader, PerdureWriter
    from perdure.training.engine.session import Session

__all__ = ["PerdureReader", "PerdureWriter", "Session"]
_PLACES = {"PerdureReader": "engine.dcp", "PerdureWriter": "engine.dcp", "Session": "engine.session"}


def __getattr__(name: str) -> Any:  # Any: the type of a lazily imported attribute
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
