"""How bytes, times and numbers of things are worded wherever a person reads them."""


def size(count: float) -> str:
    """Bytes in decimal units, as stores and disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def span(seconds: float) -> str:
    """A length of time in its two largest units."""
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 60:
        return f"{int(minutes)} min {int(seconds % 60)} s"
    return f"{int(hours)} h {int(minutes % 60)} min" if hours < 48 else f"{int(days)} d {int(hours % 24)} h"


def counted(number: int, one: str, many: str = "") -> str:
    """`1 checkpoint`, `2 checkpoints`; `many` where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
