"""zstd frames, decoded strictly: exactly the declared bytes, nothing before or after."""

import threading

import zstandard

_local = threading.local()


def decompress(stored: bytes | memoryview, out: memoryview) -> None:
    """One zstd frame that decodes to exactly as many bytes as `out` has, with nothing before or after it. Raises ValueError."""
    try:
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size not in (len(out), zstandard.CONTENTSIZE_UNKNOWN):
            raise ValueError(f"frame declares {frame.content_size} bytes, {len(out)} are expected")
        if _frame_bytes(stored, frame.has_checksum) != len(stored):
            raise ValueError("what is stored is not one frame")
        with _decompressor().stream_reader(stored) as reader:
            count = reader.readinto(out) + len(reader.read(1))
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from None
    if count != len(out):
        raise ValueError(f"frame holds {count} bytes or more, {len(out)} are expected")


def _frame_bytes(stored: bytes | memoryview, has_checksum: bool) -> int:
    """Length of the frame that begins here, by the headers of its blocks (RFC 8878, 3.1.1.2)."""
    at, is_last = zstandard.frame_header_size(stored), False
    while not is_last and at < len(stored):
        head = int.from_bytes(stored[at : at + 3], "little")
        is_last, is_repeated = bool(head & 1), (head >> 1) & 3 == 1
        at += 3 + (1 if is_repeated else head >> 3)
    return at + (4 if has_checksum else 0)


def _decompressor() -> zstandard.ZstdDecompressor:
    """One per thread."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    known: zstandard.ZstdDecompressor = _local.decompressor
    return known
