"""The table, and the report in words."""

from __future__ import annotations

import statistics
import typing
from collections.abc import Sequence

from uniep.pilot.sizes import Size

if typing.TYPE_CHECKING:
    from uniep.pilot.turns import Block

Report = dict[str, typing.Any]
LEAST_OF_AN_INTERVAL = 6  # the range of five values covers the median of many more in 94 % of cases
_OURS = "uniep, deterministic"


def range_or_interval(one: Report) -> str:
    """Of an Interval: too few values have no 95 % interval, and then it is their range."""
    return f"{'range ' if one['steps'] < LEAST_OF_AN_INTERVAL else ''}{one['low']:.2f} to {one['high']:.2f}"


def times_by_arm(blocks: Sequence[Block]) -> dict[str, list[float]]:
    """Step times of all turns."""
    found: dict[str, list[float]] = {}
    for block in blocks:
        found.setdefault(block.arm, []).extend(block.step_ms)
    return found


def table(blocks: Sequence[Block], size: Size, ranks: int) -> list[Report]:
    """A row an arm. What could not be measured here is None."""
    from uniep.pilot.turns import interval

    rows = []
    by_turn = {(block.arm, block.turn): statistics.median(block.step_ms) for block in blocks}
    for name, times in times_by_arm(blocks).items():
        own = [block for block in blocks if block.arm == name]
        step = interval(times)
        moe = interval([one for block in own for one in block.moe_ms])
        ratios = None
        if ("stock", 0) in by_turn:
            ratios = [by_turn["stock", block.turn] / by_turn[name, block.turn] for block in own]
        peaks = [block.peak_mib for block in own if block.peak_mib is not None]
        # The first turn of all has not yet what the process keeps of the others.
        later = [block for block in own if block.turn > 0] or own
        drivers = [block.driver_mib for block in later if block.driver_mib is not None]
        spread = [one for block in own for one in block.rows_max_over_mean.values()]
        rows.append(
            {
                "arm": name,
                "step_ms": step._asdict(),
                "moe_ms": moe._asdict(),
                "tokens_per_second_a_rank": 1e3 * size.sequence * size.batch / step.median,
                "speed_beside_stock": None if ratios is None else [min(ratios), max(ratios)],
                "peak_mib": max(peaks) if peaks else None,
                "driver_mib": max(drivers) if drivers else None,
                "last_loss": own[-1].losses[-1],
                "rows_max_over_mean": max(spread) if spread else None,
            }
        )
    return rows


def all_bits(report: Report) -> list[tuple[str, Report]]:
    """(arm, comparison) of every comparison of bits, deterministic mode's too."""
    found = [(arm, one) for arm, some in report.get("bits", {}).items() for one in some]
    found += [(f"{arm}, deterministic", one["bits"]) for arm, one in report.get("deterministic", {}).items()]
    return found + [(_OURS, one) for one in report.get("repeatable", {}).get("bits", [])]


def passed(report: Report) -> bool:
    """Whether everything holds that UniEP promises; other arms' bits and all times are only told."""
    judged = (_OURS, "uniep") if report["setting"]["device"] == "cpu" else (_OURS,)
    ours = [one["equal"] for arm, one in all_bits(report) if arm in judged]
    kill = report.get("kill")
    alive = kill is None or (kill["resumed"] and kill["same_bits"] and not kill["silent"])
    return all(ours) and alive and not report["failed_parts"] and report.get("began_alike", True)


def words_of_kill(kill: Report) -> str:
    """What happened when a rank was killed."""
    text = f"rank {kill['killed_rank']} was killed in step {kill['killed_in_step']}"
    for one in kill["noticed"]:
        text += f"; rank {one['rank']}:"
        if one["gone_seconds"] is not None:
            text += f" process seen gone after {one['gone_seconds']:.2f} s by the pilot,"
        after = "" if one["error_seconds"] is None else f" after {one['error_seconds']:.2f} s"
        text += f" {one['kind']}{after}: {one['words']}"
    for rank in kill["silent"]:
        text += f"; rank {rank} noticed nothing"
    if not kill["resumed"]:
        return f"{text}; the job did not resume: {kill['words']}"
    same = "the same bits as" if kill["same_bits"] else "OTHER BITS than"
    text += f"; resumed from step {kill['checkpoint_of_step']} to {kill['steps']} with {same} without the kill"
    return text if kill["same_bits"] else f"{text} ({kill['words']})"


def words(report: Report) -> str:
    """The report for a terminal."""
    lines = []
    for row in [*report.get("table", []), *report.get("reserve_sms", [])]:
        step, moe = row["step_ms"], row["moe_ms"]
        lines.append(
            f"{row['arm']:<9} {step['median']:9.2f} ms a step ({range_or_interval(step)}), "
            f"{moe['median']:.2f} ms in MoE layers, {row['tokens_per_second_a_rank']:.0f} tokens/s a rank, "
            f"loss {row['last_loss']:.4f}"
        )
    for arm, why in report.get("timed_out", {}).items():
        lines.append(f"{arm} ended in a time-out: {why}")
    for arm, one in all_bits(report):
        lines.append(f"{arm}: {one['what']}: {'equal bits' if one['equal'] else 'other bits'}")
    if not report.get("began_alike", True):
        lines.append("the arms did not begin with the same parameters: one says nothing about another")
    for part, why in report["failed_parts"].items():
        lines.append(f"failed: {part}: {why}")
    for name, why in report["missing_arms"].items():
        lines.append(f"missing: {name}: {why}")
    return "\n".join(lines)
