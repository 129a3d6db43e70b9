"""Inline SVG."""

from __future__ import annotations

import html
import math
import typing
from collections.abc import Mapping, Sequence

_COLOURS = ["#0969da", "#bf8700", "#8250df", "#1a7f37", "#cf222e", "#57606a"]
_WIDTH = 1000


def _svg(height: int, content: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{html.escape(label)}" font-family="system-ui, sans-serif" font-size="12">\n'
        + "\n".join(content)
        + "\n</svg>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from low to high."""
    reach = max(high - low, 1e-9)
    unit = 10 ** math.floor(math.log10(reach / 4))
    step = next(unit * times for times in (1, 2, 5, 10) if reach / (unit * times) <= 6)
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def curves(losses: Mapping[str, Sequence[float]]) -> str:
    """A line each, over steps."""
    height, left, right, top, bottom = 340, 50, 20, 30, 30
    values = [one for line in losses.values() for one in line]
    low, high = min(values), max(values)
    reach, steps = max(high - low, 1e-9), max(len(line) for line in losses.values())

    def x(step: float) -> float:
        return left + (_WIDTH - left - right) * step / max(steps - 1, 1)

    def y(value: float) -> float:
        return top + (height - top - bottom) * (high - value) / reach

    content = []
    for tick in _ticks(low, high):
        content.append(
            f'<line x1="{left}" y1="{y(tick):.1f}" x2="{_WIDTH - right}" y2="{y(tick):.1f}" stroke="#eaeef2"/>'
        )
        content.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(1, steps):
        if tick == int(tick):
            content.append(
                f'<text x="{x(tick - 1):.1f}" y="{height - 8}" text-anchor="middle">{"step " if tick < 2 else ""}'
                f"{tick:g}</text>"
            )
    for place, (name, line) in enumerate(losses.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(line))
        dashes = ' stroke-dasharray="5 4"' if "another seed" in name else ""
        content.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        content.append(f'<text x="{left + 10 + 190 * place}" y="16" fill="{colour}">{html.escape(name)}</text>')
    return _svg(height, content, "loss by step")


def bars(spans: Sequence[Mapping[str, typing.Any]], end: float) -> str:
    """Spans of a step, forward, backward and update below each other, on an axis to `end` milliseconds."""
    lanes = ["forward", "backward", "update"]
    left, top, lane_height = 70, 8, 34
    height = top + lane_height * len(lanes) + 44

    def x(milliseconds: float) -> float:
        return left + (_WIDTH - left - 30) * milliseconds / end

    kinds = list(dict.fromkeys(span["name"].split()[0] for span in spans))
    content = []
    for lane, name in enumerate(lanes):
        content.append(f'<text x="0" y="{top + lane * lane_height + 18}">{name}</text>')
    for span in spans:
        width = max(x(span["end_ms"]) - x(span["begin_ms"]), 0.5)
        row = top + lanes.index(span["lane"]) * lane_height
        colour = _COLOURS[kinds.index(span["name"].split()[0]) % len(_COLOURS)]
        words = f"{span['name']}: {span['end_ms'] - span['begin_ms']:.3f} ms"
        content.append(
            f'<rect x="{x(span["begin_ms"]):.1f}" y="{row}" width="{width:.1f}" height="26" fill="{colour}" '
            f'fill-opacity="0.75"><title>{html.escape(words)}</title></rect>'
        )
        if width > 7 * len(span["name"]):
            content.append(
                f'<text x="{x(span["begin_ms"]) + 4:.1f}" y="{row + 17}" fill="#fff">{html.escape(span["name"])}</text>'
            )
    for tick in _ticks(0, end):
        content.append(f'<text x="{x(tick):.1f}" y="{height - 24}" text-anchor="middle">{tick:g} ms</text>')
    for place, kind in enumerate(kinds):
        words = kind if kind != "gradients'" else "gradients' sums"
        colour = _COLOURS[place % len(_COLOURS)]
        content.append(f'<text x="{left + 130 * place}" y="{height - 6}" fill="{colour}">{html.escape(words)}</text>')
    return _svg(height, content, "timeline of a step")
