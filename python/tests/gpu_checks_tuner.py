"""Checks of gpu_checks.py, which starts them: a training that tunes itself."""

import collections
import contextlib
import json
import os
import pathlib
import statistics
import tempfile
import time
import unittest.mock

import torch
import torch.distributed as dist

import uniep
from layers import same_bits
from uniep import candidate_check, tuning

_COMPILED = "compiled on all ranks: "
_SECONDS = 120  # for a kernel, which takes some ten, and for calls that are timed with it
_check = candidate_check.CandidateCheck.check


class Compiled:
    """Candidates whose kernels were compiled in the background, as rank 0 sees them."""

    def __init__(self):
        self.lines, self.checked, self.candidates = 0, [], set()

    def line(self, text):
        self.lines += _COMPILED in text

    def check(self, check, direction, candidate, incumbent):
        self.checked.append((direction, candidate.decode()))
        equal, refused, milliseconds = _check(check, direction, candidate, incumbent)
        # On CPUs checks weigh more than the calls of so small a layer; there they are not to use up the budget.
        return equal, refused, milliseconds if check.call.group.device.type == "cuda" else 1e-3

    def end_round(self):
        """A round checks those that have waited behind the others."""
        self.candidates |= set(self.checked[len(self.checked) - self.lines :])
        self.lines, self.checked = 0, []

    def has_one_been_timed(self, tuner):
        return any(one.pairs > 0 and (one.direction, one.schedule) in self.candidates for one in tuner.decisions)


@contextlib.contextmanager
def no_kernels():
    """What earlier runs have compiled is not there."""
    before = os.environ.get("UNIEP_CACHE_DIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a kernel may still come
        os.environ["UNIEP_CACHE_DIR"] = folder
        try:
            yield folder
        finally:
            del os.environ["UNIEP_CACHE_DIR"]
            if before is not None:
                os.environ["UNIEP_CACHE_DIR"] = before


def train(world, group, goes_on, end_step=lambda: None):
    """Losses of all micro-batches and the last weights. Steps while `goes_on(step)`, each of several micro-batches."""
    hidden, intermediate, tokens = (64, 32, 40) if world.cpu else (1024, 512, 1024)
    torch.manual_seed(3)
    layer = uniep.MoELayer(hidden=hidden, intermediate=intermediate, num_experts=8 * world.ranks, topk=4, group=group)
    layer.to(world.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    step = 0
    while goes_on(step):
        generator = torch.Generator().manual_seed(100 * step + world.rank)
        for _ in range(4):
            x = torch.randn(tokens + 8 * world.rank, hidden, generator=generator).to(world.device, torch.bfloat16)
            loss = layer(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        end_step()
        step += 1
    return [torch.stack(losses), *(weight.detach() for weight in layer.parameters())]


def train_tuned(world, group, tuner, compiled):
    """What train() gives. On GPUs it trains on until a candidate is timed, natively one that waited for its kernel.

    First checks take longer than all calls of 40 steps, and are paid back before anything is tried.
    """
    until = time.monotonic() + (0 if world.cpu else _SECONDS)

    def has_seen_enough():
        return compiled.has_one_been_timed(tuner) if group is world.native else tuner.spent.tried_calls > 0

    def goes_on(step):
        wanted = [step < (16 if world.cpu else 40)]
        wanted[0] |= time.monotonic() < until and not has_seen_enough()
        dist.broadcast_object_list(wanted, 0, group=world.host)
        return wanted[0]

    def end_step():
        tuner.step()
        tuner.begin_round()
        compiled.end_round()

    return train(world, group, goes_on, end_step)


def check_tuner(world):
    """Candidates run on all ranks, those whose kernels are compiled meanwhile, too; no bit of the training changes."""
    for group in (world.native, world.torch):
        compiled = Compiled()
        candidate_check.CandidateCheck.check = lambda self, *given, compiled=compiled: compiled.check(self, *given)
        train(world, group, lambda step: step < 1)  # loads the kernels that it begins with
        with no_kernels() as folder, uniep.Tuner(budget=1, folder=folder, on_line=compiled.line) as tuner:
            tuned = train_tuned(world, group, tuner, compiled)
            spent, verdicts = tuner.spent, collections.Counter(one.verdict for one in tuner.decisions)
            timed = compiled.has_one_been_timed(tuner)
        candidate_check.CandidateCheck.check = _check
        steps = len(tuned[0]) // 4
        expected = train(world, group, steps.__gt__)
        for number, (one, other) in enumerate(zip(tuned, expected, strict=True)):
            world.expect(same_bits(one, other), f"{group.transport}: tensor {number} differs")
        world.expect(spent.tried_calls > 0, f"{group.transport}: nothing was tried, {spent}")
        world.expect(not verdicts.keys() - {"taken", "slower", "refused"}, f"{group.transport}: {verdicts}")
        if world.rank == 0:
            if group is world.native and not world.cpu:
                count = len(compiled.candidates)
                world.expect(timed, f"{count} candidates waited for kernels, in {steps} steps none of them was timed")
            print(
                f"  {group.transport}: {spent.tried_calls} calls tried in {steps} steps, {dict(verdicts)}", flush=True
            )


def seconds_of_calls(world, measurement, pairs):
    """Medians of forward and backward under each pair of Schedules, on the slowest rank: by the host's clock, many
    calls of a kind behind each other, the kinds in turn, so that queueing a call is hidden by the one before."""
    calls, rounds = (2, 15) if world.cpu else (20, 8)
    times = {pair: [] for pair in pairs}
    for number in range(rounds + 1):
        for pair in pairs:
            dist.barrier(group=world.host)
            begin = time.perf_counter()
            for _ in range(calls):
                measurement._run(pair)
            world.synchronize()
            if number > 0:
                times[pair].append((time.perf_counter() - begin) / calls)
    everybodys = [None] * world.ranks
    dist.all_gather_object(everybodys, [statistics.median(times[pair]) for pair in pairs], group=world.host)
    return [max(ones) for ones in zip(*everybodys, strict=True)]


def check_autotune(world):
    """What autotune() says that calls take is what they take, and what it chooses is no slower than "auto"."""
    hidden, intermediate, experts, tokens = (64, 32, 4, 64) if world.cpu else (2048, 768, 16, 8192)
    group = world.native
    sizes = {"hidden": hidden, "intermediate": intermediate, "num_experts": experts * world.ranks}
    layer = uniep.MoELayer(**sizes, topk=4 if world.cpu else 8, group=group).to(world.device)
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder) / "schedules.json"
        with unittest.mock.patch.object(tuning, "_file", lambda: kept):
            begin = time.perf_counter()
            chosen = uniep.autotune(layer, tokens=tokens, seconds=2 if world.cpu else 10)
            took = time.perf_counter() - begin
        entry = json.loads(kept.read_text())["schedules"] if world.rank == 0 else {}
    world.expect(all(weight.grad is None for weight in layer.parameters()), "there are gradients")
    measurement = tuning._Measurement(layer.experts, tokens, layer.topk)
    del group.tuned[measurement.key]
    default, own = seconds_of_calls(world, measurement, [("auto", "auto"), chosen])
    world.expect(own < (2 if world.cpu else 1.03) * default, f"{chosen}: {own} s, auto {default} s")
    if world.rank == 0:
        said = sum(entry[tuning.machine(group)][measurement.key]["seconds"])
        world.expect(world.cpu or abs(said / own - 1) < 0.1, f"{chosen}: {own} s, autotune says {said}")
        print(f"  {chosen}: {1e3 * own:.3f} ms, said {1e3 * said:.3f}, auto {1e3 * default:.3f}, after {took:.0f} s")
