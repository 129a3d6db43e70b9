"""Loss curves: UniEP's beside the framework's own from two seeds."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence

from uniep.pilot.arms import Arm
from uniep.pilot.kept import Kept
from uniep.pilot.training import Setting, Training


class Curve(typing.NamedTuple):
    name: str
    losses: list[float]


class Spread(typing.NamedTuple):
    """How far curves are apart, of means over `window` steps: the largest distances and the mean ones."""

    window: int
    seeds: float  # stock from another seed
    uniep: float
    seeds_mean: float
    uniep_mean: float

    @property
    def inside(self) -> bool:
        """Whether UniEP's curve is nowhere further from stock's than the other seed's is somewhere."""
        return self.uniep <= self.seeds


def run_curves(
    setting: Setting, arms: Sequence[Arm], steps: int, tell: Callable[[str], None], kept: Kept
) -> list[Curve]:
    """Every arm from the setting's seed, and stock from another seed too, all on the same data."""
    known = {entry["name"]: entry["losses"] for entry in kept.entries}
    runs = [(arm, setting.seed) for arm in arms]
    runs += [(arm, setting.seed + 1) for arm in arms if arm.name == "stock"]
    curves = []
    for arm, seed in runs:
        name = arm.name if seed == setting.seed else f"{arm.name}, another seed"
        if name in known:
            curves.append(Curve(name, known[name]))
            continue
        training = Training(dataclasses.replace(setting, seed=seed), arm)
        try:
            curves.append(Curve(name, training.run(steps)))
        finally:
            training.close()
        kept.add(curves[-1]._asdict())
        tell(f"{steps} steps, {curves[-1].name}: loss {curves[-1].losses[0]:.4f} to {curves[-1].losses[-1]:.4f}")
    return curves


def spread(curves: Sequence[Curve]) -> Spread | None:
    """Of stock, stock from another seed and UniEP; None where one of them is missing."""
    by_name = {curve.name: curve.losses for curve in curves}
    if not {"stock", "stock, another seed", "uniep"} <= set(by_name):
        return None
    steps = len(by_name["stock"])
    window = max(1, min(20, steps // 5))
    means = {name: _means(losses, window) for name, losses in by_name.items()}
    apart = {
        name: [abs(one - other) for one, other in zip(means[name], means["stock"], strict=True)]
        for name in ("stock, another seed", "uniep")
    }
    other, ours = apart["stock, another seed"], apart["uniep"]
    return Spread(window, max(other), max(ours), sum(other) / len(other), sum(ours) / len(ours))


def _means(values: Sequence[float], window: int) -> list[float]:
    count = len(values) // window
    return [sum(values[place * window : (place + 1) * window]) / window for place in range(count)]
