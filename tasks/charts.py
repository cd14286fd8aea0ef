"""Small SVG pictures as data: URIs, which Prefect's pages show offline: the curve of a loss, and a bar of parts."""

import base64
import html
import math
from collections.abc import Sequence

WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 26, 30, 34
_INK, _FAINT, _LINE = "#334155", "#e2e8f0", "#2563eb"
COLORS = ("#2563eb", "#f97316", "#eab308", "#a855f7", "#14b8a6", "#64748b", "#ef4444", "#cbd5e1")
Point = tuple[float, float]


def data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def line_chart(points: Sequence[Point], *, title: str, x_end: float, marks: Sequence[float] = (), height: int = 260) -> str:
    """`points` by x, from 0 to `x_end`; `marks` are upright lines (where a launch resumed). Logarithmic when the values ask
    for it."""
    values = [y for _, y in points] or [0.0, 1.0]
    logarithmic = min(values) > 0 and max(values) / min(values) > 30
    scaled = [(x, math.log10(y) if logarithmic else y) for x, y in points]
    low, high = _range([y for _, y in scaled])
    right, bottom = WIDTH - _RIGHT, height - _BOTTOM

    def x_of(x: float) -> float:
        return round(_LEFT + (right - _LEFT) * x / (x_end or 1), 1)

    def y_of(y: float) -> float:
        return round(bottom - (bottom - _TOP) * (y - low) / (high - low), 1)

    parts = [_text(_LEFT, 18, title + (" (logarithmic)" if logarithmic else ""), bold=True)]
    for y in _decades(low, high) if logarithmic else _ticks(low, high, 5):
        parts.append(f'<path d="M{_LEFT} {y_of(y)}H{right}" stroke="{_FAINT}"/>')
        parts.append(_text(_LEFT - 6, y_of(y) + 4, _number(10**y if logarithmic else y), anchor="end"))
    for x in _ticks(0, x_end, 6):
        parts.append(_text(x_of(x), bottom + 18, f"{x:,.0f}", anchor="middle"))
    parts += [f'<path d="M{x_of(x)} {_TOP}V{bottom}" stroke="#f97316" stroke-dasharray="4 3"/>' for x in marks]
    parts.append(f'<path d="M{_LEFT} {bottom}H{right}" stroke="{_INK}"/>')
    if len(scaled) == 1:
        parts.append(f'<circle cx="{x_of(scaled[0][0])}" cy="{y_of(scaled[0][1])}" r="3" fill="{_LINE}"/>')
    path = "L".join(f"{x_of(x)} {y_of(y)}" for x, y in scaled)
    if path:
        parts.append(f'<path d="M{path}" fill="none" stroke="{_LINE}" stroke-width="1.8" stroke-linejoin="round"/>')
    return _svg(parts, height)


def bar(parts: Sequence[tuple[str, float, str]], *, title: str) -> str:
    """One bar divided among (label, share, text), with a legend in two columns; parts of nothing are left out."""
    shown = [(index, part) for index, part in enumerate(parts) if part[1] > 0]
    whole, x, drawn = sum(part[1] for _, part in shown) or 1.0, float(_LEFT // 4), []
    room = WIDTH - 2 * (_LEFT // 4)
    drawn.append(_text(x, 18, title, bold=True))
    for row, (index, (label, share, text)) in enumerate(shown):
        color, width = COLORS[index % len(COLORS)], room * share / whole
        drawn.append(f'<rect x="{x:.1f}" y="30" width="{max(width, 1):.1f}" height="26" fill="{color}"/>')
        x += width
        left, top = _LEFT // 4 + (row % 2) * room // 2, 76 + row // 2 * 20
        drawn.append(f'<rect x="{left}" y="{top - 10}" width="12" height="12" fill="{color}"/>')
        drawn.append(_text(left + 18, top, f"{label}: {text}"))
    return _svg(drawn, 76 + (len(shown) + 1) // 2 * 20)


def _range(values: Sequence[float]) -> Point:
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers in low..high, about `count` of them."""
    span = (high - low) / count
    if not (span > 0 and math.isfinite(span)):
        return []
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Logarithms of 1, 2, 5, 10, 20, ...; of powers of ten alone where those would be too many."""
    factors = (1, 2, 5) if high - low < 2 else (1,)
    found = [power + math.log10(f) for power in range(math.floor(low), math.ceil(high) + 1) for f in factors]
    return [tick for tick in found if low <= tick <= high]


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e5 else f"{value:.1e}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'


def _svg(parts: Sequence[str], height: int) -> str:
    """On white, since a page may be dark; no external font."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    style = f'font-family="sans-serif" font-size="12" fill="{_INK}"'
    return f'{head} {style}><rect width="{WIDTH}" height="{height}" fill="white"/>{"".join(parts)}</svg>'
