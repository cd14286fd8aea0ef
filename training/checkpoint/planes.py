"""Words to byte planes and back, in pieces that stay in the cache. Planes of a float: its exponent, then top mantissa and sign,
then the low bytes as they are; of an integer: one plane a byte. NumPy's narrowing casts are several times faster than strided
copies."""

from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.training.checkpoint.room import scratch

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]  # Any: unsigned of 1, 2, 4 or 8 bytes
_PIECE = 1 << 19
"""Bytes of words worked on at a time."""


def _pieces(words: Words) -> list[slice]:
    count = max(1, _PIECE // words.itemsize)
    return [slice(start, start + count) for start in range(0, len(words), count)]


def as_words(raw: Any, width: int) -> Words:  # Any: a buffer
    """Little-endian unsigned words of `width` bytes, a view."""
    return np.frombuffer(raw, np.dtype(f"<u{width}"))


def split_exponent(words: Words) -> list[Bytes]:
    """Planes of floats: the top 16 bits rotated left by one (eight exponent bits first, the sign last), as a plane of
    high and one of low bytes; then what is below them, as it is."""
    width, count = words.itemsize, len(words)
    exponent, second = np.empty(count, np.uint8), np.empty(count, np.uint8)
    low = np.empty(count * (width - 2), np.uint8)
    for at in _pieces(words):
        piece = words[at]
        top = (piece >> (8 * width - 16)).astype(np.uint16) if width > 2 else piece
        rotated = top << 1
        np.bitwise_or(rotated, top >> 15, out=rotated)
        second[at] = rotated.astype(np.uint8)
        np.right_shift(rotated, 8, out=rotated)
        exponent[at] = rotated.astype(np.uint8)
        if width == 4:
            low.view(np.uint16)[at] = piece.astype(np.uint16)
        elif width == 8:
            low.view(np.uint16).reshape(-1, 3)[at] = piece.view(np.uint16).reshape(-1, 4)[:, :3]
    return [exponent, second, *([low] if width > 2 else [])]


def join_exponent(planes: list[Bytes], words: Words) -> None:
    """Inverse of `split_exponent`, into `words`. Multiplying by a power of two is twice as fast in NumPy as shifting."""
    exponent, second, *low = planes
    width = words.itemsize
    for at in _pieces(words):
        piece = words[at]
        top, work = _room(len(piece), np.uint16, "top"), _room(len(piece), np.uint16, "work")
        np.copyto(top, exponent[at])
        np.copyto(work, second[at])
        np.multiply(top, 256, out=top)
        np.bitwise_or(top, work, out=top)
        np.multiply(top, 32768, out=work)
        np.right_shift(top, 1, out=top)
        if width == 2:
            np.bitwise_or(top, work, out=piece)
            continue
        np.bitwise_or(top, work, out=top)
        np.copyto(piece, top)
        np.left_shift(piece, 8 * width - 16, out=piece)
        if width == 4:
            wide = _room(len(piece), np.uint32, "low")
            np.copyto(wide, low[0].view(np.uint16)[at])
            np.bitwise_or(piece, wide, out=piece)
        else:
            piece.view(np.uint16).reshape(-1, 4)[:, :3] = low[0].view(np.uint16).reshape(-1, 3)[at]


def _room(count: int, kind: npt.DTypeLike, use: str) -> Words:
    """For one piece."""
    return np.frombuffer(scratch(count * np.dtype(kind).itemsize, use), kind)


def split_bytes(words: Words) -> list[Bytes]:
    """One plane a byte, the most significant first."""
    width = words.itemsize
    planes = [np.empty(len(words), np.uint8) for _ in range(width)]
    for at in _pieces(words):
        work = words[at].copy()
        for plane in reversed(planes):
            plane[at] = work.astype(np.uint8)
            if width > 1:
                np.right_shift(work, 8, out=work)
    return planes


def join_bytes(planes: list[Bytes], words: Words) -> None:
    """Inverse of `split_bytes`, into `words`."""
    for at in _pieces(words):
        piece = words[at]
        np.copyto(piece, planes[0][at])
        for plane in planes[1:]:
            np.left_shift(piece, 8, out=piece)
            np.bitwise_or(piece, plane[at], out=piece)


def rotate_right(words: Words) -> None:
    """Each word rotated right by one bit, in place: what format 1 undoes after joining."""
    one, rest = np.array(1, words.dtype), np.array(8 * words.itemsize - 1, words.dtype)
    np.bitwise_or(words >> one, words << rest, out=words)


def subtract(new: Words, base: Words) -> Words:
    """Zigzag of `new - base` (mod 2^bits): neighbours in value give small words, so high planes are zero."""
    out = np.empty(len(new), new.dtype)
    rest = 8 * new.itemsize - 1
    for at in _pieces(new):
        difference = new[at] - base[at]
        sign = (difference >> rest) * np.array(-1).astype(new.dtype)  # all ones where negative
        np.left_shift(difference, 1, out=difference)
        np.bitwise_xor(difference, sign, out=out[at])
    return out


def add(planes: list[Bytes], base: Words, words: Words) -> None:
    """Inverse of `subtract`, into `words`, from the low planes of the zigzag, the most significant first: those above them are
    zero. Worked out in words no wider than that, which is most of the time where differences are small."""
    kind = np.dtype(f"<u{next(size for size in (2, 4, 8) if size >= len(planes))}")
    for at in _pieces(base):
        piece = base[at]
        zigzag, work = _room(len(piece), kind, "top"), _room(len(piece), kind, "work")
        zigzag[:] = 0 if not planes else planes[0][at]
        for plane in planes[1:]:
            np.multiply(zigzag, 256, out=zigzag)
            np.copyto(work, plane[at])
            np.bitwise_or(zigzag, work, out=zigzag)
        np.bitwise_and(zigzag, 1, out=work)
        np.negative(work, out=work)  # all ones where the difference is
        np.right_shift(zigzag, 1, out=zigzag)
        np.bitwise_xor(zigzag, work, out=zigzag)
        signed = zigzag.view(f"<i{kind.itemsize}")
        np.add(piece, signed, out=words[at], dtype=words.dtype, casting="unsafe")
