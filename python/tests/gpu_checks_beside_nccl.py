"""Checks of gpu_checks.py, which starts them: layers beside collectives of NCCL."""

import itertools
import random
import time

import torch
import torch.distributed as dist

import uniep
from layers import same_bits

BESIDE_NCCL = "comm.reserve_sms=24"  # NCCL's CTAs and some room, docs/processes.md


class Blocks(torch.nn.Module):
    """Dense layers, whose gradients are averaged, between MoE layers, whose experts' are not."""

    def __init__(self, world, hidden, count, group, schedule):
        super().__init__()
        self.dense = torch.nn.ModuleList([torch.nn.Linear(hidden, hidden) for _ in range(count)])
        options = {"schedule": "auto" if world.cpu else schedule}
        self.moe = torch.nn.ModuleList(
            [
                uniep.MoELayer(
                    hidden=hidden, intermediate=64, num_experts=4 * world.ranks, topk=2, group=group, **options
                )
                for _ in range(count)
            ]
        )
        self.dense.to(world.device, torch.bfloat16)

    def forward(self, x):
        for dense, moe in zip(self.dense, self.moe, strict=True):
            x = x + moe(torch.nn.functional.rms_norm(dense(x), x.shape[-1:]))
        return x


def train(world, group, steps, overlapped, schedule=BESIDE_NCCL):
    """Parameters after some steps; the averages of dense gradients run beside backward (DDP), or behind it."""
    torch.manual_seed(7)
    hidden = 64 if world.cpu else 512
    model = Blocks(world, hidden, 4, group, schedule)
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    shared = [one for name, one in model.named_parameters() if name not in experts]
    for one in shared:
        dist.broadcast(one.data, 0)
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2) if overlapped else model
    draw = random.Random(world.rank)
    generator = torch.Generator().manual_seed(11 + world.rank)
    x, target = (torch.randn(256, hidden, generator=generator).bfloat16().to(world.device) for _ in range(2))
    losses = []
    for _ in range(steps):
        if overlapped:
            time.sleep(draw.choice([0.0, 0.0, 0.02]))
            if not world.cpu:
                torch.cuda._sleep(draw.choice([0, 10**6, 10**7]))
        loss = (wrapped(x) - target).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for one in shared if not overlapped else ():
                one.grad.div_(world.ranks)
                dist.all_reduce(one.grad)
            for one in model.parameters():
                one.sub_(one.grad.sign(), alpha=2e-3)
                one.grad = None
    return losses, [one.detach().clone() for one in model.parameters()]


def check_training_beside_overlapped_all_reduces(world):
    """50 steps under DDP, with delays, SMs kept and lent, against torch's transport with nothing beside it."""
    expected_losses, expected = train(world, world.torch, 50, overlapped=False)
    for schedule in (BESIDE_NCCL, f"{BESIDE_NCCL},comm.lend_sms=on"):
        losses, parameters = train(world, world.native, 50, overlapped=True, schedule=schedule)
        world.expect(losses[-1] < 0.9 * losses[0], f"losses {losses[0]} to {losses[-1]}")
        # With more ranks the order of NCCL's sum is its own.
        if world.ranks <= 2:
            world.expect(losses == expected_losses, f"losses differ with {schedule}")
            for one, other in zip(parameters, expected, strict=True):
                world.expect(same_bits(one, other), f"a parameter of shape {list(one.shape)} differs with {schedule}")


LATE_S = 2.0


def beside_a_collective(world, group, collectives, layer, late, layer_first):
    """With rank `late` coming late to one of the two, seconds until the other one is over; and the layer's results."""
    side, over = torch.cuda.Stream(), torch.cuda.Event()
    values = torch.ones(32 << 20, device=world.device)
    tokens = max(len(x) for x in layer.x)
    capacity = (world.ranks * (4 * tokens + 128 * 8), tokens)  # so that no host waits
    cycles = int(LATE_S * 1e3 * torch.cuda.get_device_properties(world.device).clock_rate) if world.rank == late else 0

    def collective(behind):
        with torch.cuda.stream(side):
            torch.cuda._sleep(behind)
            dist.all_reduce(values, group=collectives)
            if layer_first:
                over.record()

    def calls(behind):
        torch.cuda._sleep(behind)
        results = world.run(layer, group, capacity=capacity)
        if not layer_first:
            over.record()
        return results

    world.synchronize()
    dist.barrier(group=world.host)
    got = calls(cycles) if layer_first else collective(cycles)
    time.sleep(0.2)  # so that what waits for the late rank is on its SMs
    begin = time.perf_counter()
    if layer_first:
        collective(0)
    else:
        got = calls(0)
    while not over.query() and time.perf_counter() - begin < 30:
        time.sleep(0.001)
    taken = time.perf_counter() - begin
    world.synchronize()
    return taken, got


def check_reserved_sms_are_enough(world):
    """What reserve_sms="auto" leaves, or lends to collectives of high priority: a layer and a collective of NCCL never
    wait for each other for ever, whichever is there first and waits for a rank that comes late, and however NCCL's CTAs
    are clustered.

    Prints how long the second one took. About LATE_S means that it did not fit beside the first: clusters need SMs of
    one GPC, both NCCL's and the layer's.
    """
    if world.cpu or world.ranks == 1:
        return
    layer = world.medium()
    expected = world.run(layer)
    for cluster, first in ((None, False), (1, False), (2, False), (4, False), (None, True), (1, True), (4, True)):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=first)
        options.config.max_ctas = 8
        if cluster is not None:
            options.config.cga_cluster_size = cluster
        collectives = dist.new_group(backend="nccl", pg_options=options)
        with uniep.Group(device=world.device, timeout_s=20, shared=False) as group:
            group.run_beside(collectives)
            world.expect(group.lends == first, f"lends: {group.lends}")
            for late, layer_first in itertools.product((None, *range(world.ranks)), (False, True)):
                taken, got = beside_a_collective(world, group, collectives, layer, late, layer_first)
                if late is None:
                    continue  # the first time makes what both need
                earlier = "layer" if layer_first else "NCCL"
                text = f"{'lent, ' * first}clusters of {cluster or 'its choice'}, rank {late} late, {earlier} first"
                if world.rank == (late + 1) % world.ranks:
                    print(f"  {text}: {taken:.3f} s", flush=True)
                world.expect(taken < 2 * LATE_S, f"{text}: waited {taken:.3f} s")
                world.expect_same(got, expected, text)
        dist.destroy_process_group(collectives)
