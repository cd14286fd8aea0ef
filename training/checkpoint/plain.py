"""Plain values (numbers, texts, containers) as typed msgpack and back: what is not a tensor travels so. No pickle, ever.

Scalars stand for themselves; everything else is a msgpack array whose first item names its kind (docs/format.md)."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from perdure.training.errors import CheckpointDamaged, PerdureError

MAX_DEPTH = 120
MAX_PLAIN = 128 << 20
"""Bytes of one plain leaf."""
_INT64 = 1 << 63
_SCALARS = frozenset({type(None), bool, float, str, bytes})
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
_MAPPINGS: dict[type, str] = {dict: "d", OrderedDict: "o"}


def pack_plain(value: Any, path: str) -> bytes:  # Any: plain values
    """Encode; raises PerdureError naming `path` and the type of what is not plain data. Sets are stored in a fixed order."""
    try:
        data = msgspec.msgpack.encode(_encode(value, path, 0))
    except UnicodeEncodeError as error:
        raise PerdureError(f"{path} holds a text that is not Unicode: {error}") from None
    if len(data) > MAX_PLAIN:
        raise PerdureError(
            f"{path} has {len(data)} bytes of plain data, at most {MAX_PLAIN} are saved", "keep arrays as tensors"
        )
    return data


def prepack(value: Any, path: str) -> msgspec.Raw:  # Any: as in pack_plain
    """A part of a value, encoded ahead: `pack_plain` takes it as it is."""
    return msgspec.Raw(msgspec.msgpack.encode(_encode(value, path, 0)))


def _encode(value: Any, path: str, depth: int) -> Any:  # Any: as in pack_plain
    kind = type(value)
    if kind in _SCALARS or kind is msgspec.Raw:
        return value
    if kind is int:
        return value if -_INT64 <= value < _INT64 else ["i", hex(value)]
    if depth >= MAX_DEPTH:
        raise PerdureError(f"{path} is nested deeper than {MAX_DEPTH} levels: is there a cycle?")
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind in _SEQUENCES:
        items = [_encode(item, f"{path}/{number}", depth + 1) for number, item in enumerate(value)]
        if kind in (set, frozenset):
            items.sort(key=msgspec.msgpack.encode)
        return [_SEQUENCES[kind], *items]
    if kind in _MAPPINGS:
        flat = [_MAPPINGS[kind]]
        for key, item in value.items():
            flat += [_encode(key, f"{path}/{key!r:.80}", depth + 1), _encode(item, f"{path}/{key!s:.80}", depth + 1)]
        return flat
    raise PerdureError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: only plain data can be saved (no pickle is ever read)",
        "let state_dict() hand out tensors, arrays, numbers, strings, and lists, tuples or dicts of them",
    )


def unpack_plain(data: bytes | memoryview) -> Any:  # Any: plain values
    """Decode; raises CheckpointDamaged for anything that `pack_plain` does not write."""
    if len(data) > MAX_PLAIN:
        raise CheckpointDamaged(f"plain data of {len(data)} bytes is too large", part="plain")
    try:
        return _decode(msgspec.msgpack.decode(data), 0)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointDamaged(f"plain data is malformed: {error}", part="plain") from None


def _decode(value: Any, depth: int) -> Any:  # Any: as in unpack_plain
    kind = type(value)
    if kind in _SCALARS or kind is int:
        return value
    if kind is not list or not value or type(value[0]) is not str or depth >= MAX_DEPTH:
        raise ValueError(f"unknown item of type {kind.__name__}" if depth < MAX_DEPTH else "nested too deep")
    build = _BUILDERS.get(value[0])
    if build is None:
        raise ValueError(f"unknown kind {value[0]!r:.20}")
    return build(value[1:], depth)


def _sequence(kind: Callable[[Any], Any]) -> Callable[[list[Any], int], Any]:  # Any: as in unpack_plain
    return lambda items, depth: kind([_decode(item, depth + 1) for item in items])


def _mapping(kind: Callable[[Any], Any]) -> Callable[[list[Any], int], Any]:  # Any: as in unpack_plain
    def build(items: list[Any], depth: int) -> Any:  # Any: as in unpack_plain
        decoded = [_decode(item, depth + 1) for item in items]
        if len(decoded) % 2:
            raise ValueError("a mapping with a key too many")
        found = kind(zip(decoded[::2], decoded[1::2], strict=True))
        if len(found) != len(decoded) // 2:
            raise ValueError("a mapping with a key twice")
        return found

    return build


def _integer(items: list[Any], depth: int) -> int:
    (text,) = items
    number = int(text, 16)
    if hex(number) != text or -_INT64 <= number < _INT64:
        raise ValueError("an integer written another way")
    return number


def _complex(items: list[Any], depth: int) -> complex:
    real, imaginary = items
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("a complex number of other than two floats")
    return complex(real, imaginary)


_BUILDERS: dict[str, Callable[[list[Any], int], Any]] = {
    "i": _integer,
    "c": _complex,
    **{mark: _sequence(kind) for kind, mark in _SEQUENCES.items()},
    **{mark: _mapping(kind) for kind, mark in _MAPPINGS.items()},
}
