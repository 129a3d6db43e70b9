"""Checks of gpu_checks.py, which starts them: a training that tunes itself."""

import collections
import contextlib
import os
import tempfile
import time

import torch
import torch.distributed as dist

import uniep
from layers import same_bits
from uniep import candidate_check

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
