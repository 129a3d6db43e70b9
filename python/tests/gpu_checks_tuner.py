"""Checks of gpu_checks.py, which starts them: a training that tunes itself."""

import collections
import tempfile

import torch

import uniep
from layers import same_bits
from uniep import candidate_check

_check = candidate_check.CandidateCheck.check


def cheap_check(self, *arguments):
    """On CPUs checks weigh more than the calls of so small a layer; there they are not to use up the budget."""
    return *_check(self, *arguments)[:2], 1e-3


def train(world, group, tuner=None):
    """Losses of all micro-batches and the last weights. Some steps, each of several micro-batches."""
    hidden, intermediate, tokens = (64, 32, 40) if world.cpu else (1024, 512, 1024)
    torch.manual_seed(3)
    layer = uniep.MoELayer(hidden=hidden, intermediate=intermediate, num_experts=8 * world.ranks, topk=4, group=group)
    layer.to(world.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for step in range(16 if world.cpu else 40):
        generator = torch.Generator().manual_seed(100 * step + world.rank)
        for _ in range(4):
            x = torch.randn(tokens + 8 * world.rank, hidden, generator=generator).to(world.device, torch.bfloat16)
            loss = layer(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if tuner is not None:
            tuner.step()
            tuner.begin_round()
    return [torch.stack(losses), *(weight.detach() for weight in layer.parameters())]


def check_tuner(world):
    """Candidates run on all ranks, those whose kernels are compiled meanwhile, too; no bit of the training changes."""
    if world.cpu:
        candidate_check.CandidateCheck.check = cheap_check
    for group in (world.native, world.torch):
        expected = train(world, group)
        with tempfile.TemporaryDirectory() as folder, uniep.Tuner(budget=1, folder=folder) as tuner:
            for number, (one, other) in enumerate(zip(train(world, group, tuner), expected, strict=True)):
                world.expect(same_bits(one, other), f"{group.transport}: tensor {number} differs")
            spent, verdicts = tuner.spent, collections.Counter(one.verdict for one in tuner.decisions)
        world.expect(spent.tried_calls > 0, f"{group.transport}: nothing was tried, {spent}")
        world.expect(not verdicts.keys() - {"taken", "slower", "refused"}, f"{group.transport}: {verdicts}")
        if world.rank == 0:
            print(f"  {group.transport}: {spent.tried_calls} calls tried, {dict(verdicts)}", flush=True)
