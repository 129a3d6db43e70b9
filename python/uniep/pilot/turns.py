"""The timed part: arms take turns in blocks of steps, each from the same parameters and on the same data."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
import typing
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from uniep.layer_stats import LayerStats, record_stats, stats
from uniep.pilot.arms import Arm
from uniep.pilot.kept import Entry, Kept
from uniep.pilot.trace import Span, moe_ms, traced
from uniep.pilot.training import Setting, Training, mean_of_ranks

TRACED_STEPS = 3


@dataclasses.dataclass
class Block:
    """One turn of an arm. Times are the slowest rank's."""

    arm: str
    turn: int
    deterministic: bool
    step_ms: list[float]  # without those of warming up
    losses: list[float]  # of all steps
    begins_with: str  # digests of the parameters
    ends_with: str
    moe_ms: list[float]
    peak_mib: float | None  # torch's, the rank with most
    driver_mib: float | None  # what the driver counts more than before any arm: NCCL's and UniEP's memory, too
    rows_max_over_mean: dict[str, float]
    timeline: list[Span]  # of rank 0
    stats: list[LayerStats]  # of this rank, of UniEP's layers alone


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def used_bytes(device: torch.device) -> int:
    """Of a GPU's memory, as the driver counts."""
    if device.type != "cuda":
        return 0
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def slowest(values: list[float]) -> list[float]:
    """Of all ranks, entry by entry. Collective."""
    given = torch.tensor(values, dtype=torch.float64)
    if torch.cuda.is_available():
        given = given.cuda()
    dist.all_reduce(given, op=dist.ReduceOp.MAX)
    return [float(one) for one in given.tolist()]


def run_block(setting: Setting, arm: Arm, turn: int, warm: int, steps: int) -> Block:
    """Steps of an arm from the parameters of the setting's seed. Collective."""
    device = setting.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = Training(setting, arm)
    try:
        begins_with = training.digest()
        losses, times = [], []
        for step in range(warm + steps):
            _synchronize(device)
            begin = time.perf_counter()
            loss = training.step()
            _synchronize(device)
            if step >= warm:
                times.append(1e3 * (time.perf_counter() - begin))
            losses.append(loss)
        peak = driver = None
        if device.type == "cuda":
            more = used_bytes(device) - setting.used_bytes
            peak, driver = slowest([torch.cuda.max_memory_allocated() / 2**20, more / 2**20])
        ends_with = training.digest()
        in_moe, spans, rows = [], [], {}
        record_stats(arm.schedule is not None)
        for _ in range(TRACED_STEPS):
            with traced(training) as trace:
                training.step()
                spans = trace.spans()
                rows = trace.rows_max_over_mean()
            in_moe.append(moe_ms(spans))
        return Block(
            arm=arm.name,
            turn=turn,
            deterministic=setting.deterministic,
            step_ms=slowest(times),
            losses=mean_of_ranks(losses),
            begins_with=begins_with,
            ends_with=ends_with,
            moe_ms=slowest(in_moe),
            peak_mib=peak,
            driver_mib=driver,
            rows_max_over_mean=rows,
            timeline=spans,
            stats=stats(),
        )
    finally:
        record_stats(False)
        training.close()


def entry_of(block: Block) -> Entry:
    """For Kept; of turns behind the first without what only the first is shown with."""
    if block.turn > 0:
        block = dataclasses.replace(block, timeline=[], stats=[])
    return dataclasses.asdict(block)


def block_of(entry: Entry) -> Block:
    shown = {
        "timeline": [Span(*one) for one in entry["timeline"]],
        "stats": [LayerStats(*one) for one in entry["stats"]],
    }
    return Block(**(entry | shown))


def take_turns(
    setting: Setting,
    arms: Sequence[Arm],
    turns: int,
    warm: int,
    steps: int,
    tell: Callable[[str], None],
    kept: Kept | None = None,
) -> Iterator[list[Block]]:
    """Blocks of all arms, in another order each turn. After each turn, all so far; `kept` has those that are known."""
    known = {(entry["arm"], entry["turn"]): entry for entry in kept.entries} if kept is not None else {}
    blocks: list[Block] = []
    for turn in range(turns):
        for place in range(len(arms)):
            arm = arms[(turn + place) % len(arms)]
            if (arm.name, turn) in known:
                blocks.append(block_of(known[arm.name, turn]))
                continue
            block = run_block(setting, arm, turn, warm, steps)
            if kept is not None:
                kept.add(entry_of(block))
            words = ", deterministic mode" if setting.deterministic else ""
            tell(f"turn {turn + 1} of {turns}, {arm.name}{words}: {statistics.median(block.step_ms):.2f} ms a step")
            blocks.append(block)
        yield list(blocks)


def began_alike(blocks: Sequence[Block]) -> bool:
    """Whether all began with the same parameters. Where they did not, one arm says nothing about another."""
    return len({block.begins_with for block in blocks}) == 1


class Interval(typing.NamedTuple):
    """A median, and where that of many more steps lies with 95 % confidence if steps are independent."""

    median: float
    low: float
    high: float
    steps: int


def interval(values: Sequence[float]) -> Interval:
    """By ranks of the ordered values, without a distribution. Below six values it is the whole range."""
    ordered = sorted(values)
    count = len(ordered)
    reach = math.ceil(0.98 * math.sqrt(count))
    middle = (count - 1) / 2
    low, high = max(0, math.floor(middle - reach)), min(count - 1, math.ceil(middle + reach))
    return Interval(statistics.median(ordered), ordered[low], ordered[high], count)
