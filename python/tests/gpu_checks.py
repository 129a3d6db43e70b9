"""uniep.moe() on GPUs: what the CPU tests check, with the native transport beside torch's.

    NCCL_MAX_CTAS=8 torchrun --nproc-per-node 2 python/tests/gpu_checks.py [--only NAME,...] [--cpu]

Runs on 1, 2 or more Hopper GPUs, one a process; needs torch with CUDA, and python/ on PYTHONPATH with UNIEP_LIBRARY
naming the library, or the package installed. Each check prints a line with PASS or FAIL; the exit status is 1 where one
fails. --cpu runs over gloo, which tests the checks: there both transports are the same one.
"""

import argparse
import copy
import datetime
import os
import sys
import threading
import time
import traceback

if "--cpu" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("NCCL_MAX_CTAS", "8")

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import gpu_checks_beside_nccl
import gpu_checks_tuner
import uniep
from gpu_checks_beside_nccl import BESIDE_NCCL
from layers import Layer, Result, make_layer, random_layer, reference, relative_error, run_moe, same_bits


class World:
    """This rank, its groups of both transports, and what has failed in the check that runs."""

    def __init__(self, cpu):
        self.cpu = cpu
        local = int(os.environ["LOCAL_RANK"])
        if not cpu:
            torch.cuda.set_device(local)
        limit = datetime.timedelta(minutes=3)
        dist.init_process_group("gloo" if cpu else "nccl", timeout=limit)
        self.host = dist.new_group(backend="gloo", timeout=limit)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu") if cpu else torch.device("cuda", local)
        self.native = uniep.Group(device=self.device)
        self.torch = uniep.Group(transport="torch", device=self.device, shared=False)
        self.failures = []

    def expect(self, holds, text):
        """Notes a failure; the check goes on, since the other ranks do."""
        if not holds:
            self.failures.append(text)

    def expect_same(self, got, expected, text):
        for (name, one), (_, other) in zip(got.items(), expected.items(), strict=True):
            self.expect(same_bits(one, other), f"{text}: {name} differs")

    def here(self, layer):
        """The layer on this rank's device."""
        lists = [[one.to(self.device) for one in parts] for parts in (layer.x, layer.ids, layer.probs, layer.dy)]
        return Layer(*lists, layer.w1.to(self.device), layer.w2.to(self.device))

    def run(self, layer, group=None, **options):
        weights = layer.local(self.rank, self.ranks)
        return run_moe(layer, self.rank, weights, group=group or self.native, **options)

    def leaves(self, layer):
        """x, ids, probs, w1, w2 of this rank, to be differentiated."""
        x, probs = layer.x[self.rank].clone().requires_grad_(), layer.probs[self.rank].clone().requires_grad_()
        return x, layer.ids[self.rank], probs, *(one.requires_grad_() for one in layer.local(self.rank, self.ranks))

    def medium(self, seed=1, tokens=300):
        counts = [tokens + 40 * rank for rank in range(self.ranks)]
        sizes = (64, 32) if self.cpu else (512, 384)
        return self.here(make_layer(counts, *sizes, experts=8 * self.ranks, topk=4, seed=seed, unused=0.05))

    def synchronize(self):
        if not self.cpu:
            torch.cuda.synchronize()


def result_of(leaves, y):
    x, _, probs, w1, w2 = leaves
    return Result(y.detach(), x.grad, probs.grad, w1.grad, w2.grad)


def check_transports(world):
    """Native is there where all ranks have Hopper GPUs, and has the bits of torch's transport."""
    world.expect(world.cpu or world.native.transport == "native", f"transport {world.native.transport}")
    for seed in range(30):
        layer = world.here(random_layer(seed, world.ranks))
        world.expect_same(world.run(layer), world.run(layer, world.torch), f"layer {seed}")


def check_medium_layer_of_both_transports(world):
    layer = world.medium()
    world.expect_same(world.run(layer), world.run(layer, world.torch), "both transports")


def check_errors_against_float64(world):
    layer = world.medium()
    exact = reference(Layer(*[[one.cpu() for one in parts] for parts in (layer.x, layer.ids, layer.probs, layer.dy)],
                            layer.w1.cpu(), layer.w2.cpu()))  # fmt: skip
    first = sum(len(x) for x in layer.x[: world.rank])
    tokens = slice(first, first + len(layer.x[world.rank]))
    local = layer.experts // world.ranks
    experts = slice(world.rank * local, (world.rank + 1) * local)
    parts = Result(exact.y[tokens], exact.dx[tokens], exact.dprobs[tokens], exact.dw1[experts], exact.dw2[experts])
    for (name, got), (_, expected) in zip(world.run(layer).items(), parts.items(), strict=True):
        error = relative_error(got.cpu(), expected)
        world.expect(error < 8e-3, f"{name}: relative error {error:.4f}")


def check_save_and_schedules_change_no_bit(world):
    layer = world.medium()
    expected = world.run(layer)
    for save in ("keep", "redispatch", "rows", "recompute"):
        for schedule in ("auto", "fusion=none", BESIDE_NCCL if not world.cpu else "fusion=pairs"):
            for group in (world.native, world.torch):
                got = world.run(layer, group, save=save, schedule=schedule)
                world.expect_same(got, expected, f"save {save}, schedule {schedule}, {group.transport}")


def check_checkpointing(world):
    layer = world.medium()
    expected = world.run(layer)
    for reentrant in (False, True):
        leaves = world.leaves(layer)
        y = checkpoint(lambda *given: uniep.moe(*given, group=world.native), *leaves, use_reentrant=reentrant)
        y.backward(layer.dy[world.rank])
        world.expect_same(result_of(leaves, y), expected, f"reentrant {reentrant}")


def check_main_grad(world):
    """Exactly one rounded addition an element and call; and hooks run."""
    layer = world.medium()
    bf16 = world.run(layer)
    added = {}
    for group in (world.native, world.torch):
        weights = [torch.nn.Parameter(one) for one in layer.local(world.rank, world.ranks)]
        for start in (0, 1):
            sums = [torch.randn(one.shape, device=world.device) * start for one in weights]
            for weight, one in zip(weights, sums, strict=True):
                weight.main_grad = one.clone()
            x, ids, probs, *_ = world.leaves(layer)
            uniep.moe(x, ids, probs, *weights, group=group, main_grad="param").backward(layer.dy[world.rank])
            for name, weight, before, rounded in zip(
                ("w1", "w2"), weights, sums, (bf16.dw1, bf16.dw2), strict=True
            ):  # fmt: skip
                text = f"{name}, {group.transport}"
                world.expect(weight.grad_added_to_main_grad, f"{text}: grad_added_to_main_grad")
                if start == 0:
                    world.expect(same_bits(weight.main_grad.bfloat16(), rounded), f"{text}: not the bf16 gradient")
                    other = added.setdefault(name, weight.main_grad)
                    world.expect(same_bits(weight.main_grad, other), f"{text}: transports differ")
                else:
                    world.expect(same_bits(weight.main_grad, before + added[name]), f"{text}: not one addition")


def check_capacity(world):
    layer = world.medium()
    expected = world.run(layer)
    tokens = max(len(x) for x in layer.x)
    enough = (128 * (tokens * 4 // 128 + 1) * world.ranks + 128 * 8, tokens)
    for group in (world.native, world.torch):
        world.expect_same(world.run(layer, group, capacity=enough), expected, f"capacity {enough}, {group.transport}")
        raised = ""
        try:
            x, ids, probs, w1, w2 = world.leaves(layer)
            uniep.moe(x, ids, probs, w1, w2, group=group, capacity=(128, tokens))
            group.synchronize()
        except uniep.CapacityError as error:
            raised = str(error)
        world.expect(raised, f"{group.transport}: no CapacityError")
        group.recover()
        world.expect_same(world.run(layer, group), expected, f"behind an overflow, {group.transport}")


def check_no_optimizer_steps_behind_a_failed_call(world):
    """The last rank comes to backward later than the others wait. Nobody's weights change, as it is told as well."""
    if world.cpu or world.ranks == 1:
        return
    layer, late = world.medium(), world.rank == world.ranks - 1
    expected = world.run(layer)
    with uniep.Group(device=world.device, timeout_s=5, arrival_timeout_s=2, shared=False) as group:
        world.expect_same(world.run(layer, group), expected, "before")
        leaves = world.leaves(layer)
        before = [weight.detach().clone() for weight in leaves[3:]]
        y = uniep.moe(*leaves, group=group)
        group.synchronize()
        dist.barrier(group=world.host)
        time.sleep(6 if late else 0)
        raised = ""
        try:
            y.backward(layer.dy[world.rank])
            torch.optim.SGD(leaves[3:], lr=1.0).step()
        except TimeoutError as error:
            raised = str(error)
        world.expect(raised, "no TimeoutError")
        unchanged = all(same_bits(weight, kept) for weight, kept in zip(leaves[3:], before, strict=True))
        world.expect(unchanged, "the optimizer has stepped")
        dist.barrier(group=world.host)
        group.recover()
        world.expect_same(world.run(layer, group), expected, "behind it")


def check_autograd_thread(world):
    layer = world.medium()
    expected = world.run(layer)
    leaves = world.leaves(layer)
    y = uniep.moe(*leaves, group=world.native)
    thread = threading.Thread(target=lambda: y.backward(layer.dy[world.rank]))
    thread.start()
    thread.join()
    world.synchronize()
    world.expect_same(result_of(leaves, y), expected, "backward on another thread")


def check_streams(world):
    """Calls on streams of their own, with memory that torch gives away at once where nobody holds it."""
    if world.cpu:
        return
    layers = [world.medium(seed, 200) for seed in (1, 2)]
    expected = [world.run(layer) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    for step in range(10):
        for layer, stream, result in zip(layers, streams, expected, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got = world.run(layer)
            junk = [torch.full((1 << 20,), float("nan"), device=world.device) for _ in range(8)]
            torch.cuda.current_stream().wait_stream(stream)
            world.expect_same(got, result, f"step {step}")
            del junk


def check_interleaved_micro_batches(world):
    layers = [world.medium(seed) for seed in (1, 2, 3)]
    expected = [world.run(layer) for layer in layers]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        leaves = [world.leaves(layer) for layer in layers]
        ys = [uniep.moe(*one, group=world.native) for one in leaves]
        for index in order:
            ys[index].backward(layers[index].dy[world.rank])
        for index in order:
            world.expect_same(result_of(leaves[index], ys[index]), expected[index], f"order {order}, batch {index}")


def check_retained_graph(world):
    layer = world.medium()
    expected = world.run(layer)
    x, ids, probs, w1, w2 = world.leaves(layer)
    y = uniep.moe(x, ids, probs, w1, w2, group=world.native)
    for retain in (True, True, False):
        got = torch.autograd.grad(y, (x, probs, w1, w2), layer.dy[world.rank], retain_graph=retain)
        world.expect_same(Result(y.detach(), *got), expected, f"retain_graph {retain}")


def check_edges(world):
    generous = {"hidden": 64, "intermediate": 64, "experts": 4 * world.ranks}
    cases = {
        "no tokens on rank 0": make_layer([0] + [50] * (world.ranks - 1), **generous),
        "no tokens at all": make_layer([0] * world.ranks, **generous),
        "no routed slot": make_layer([20] * world.ranks, **generous, unused=1.0),
        "K = E": make_layer([33] * world.ranks, **generous, topk=4 * world.ranks),
        "int64": make_layer([33] * world.ranks, **generous, dtype=torch.int64),
    }
    one = make_layer([200] * world.ranks, **generous, topk=1)
    for ids in one.ids:
        ids.zero_()
    cases["one expert gets all"] = one
    for name, layer in cases.items():
        layer = world.here(layer)
        for save in ("keep", "redispatch", "rows", "recompute"):
            world.expect_same(world.run(layer, save=save), world.run(layer, world.torch), f"{name}, save {save}")


def check_frozen_tensors(world):
    layer = world.medium()
    expected = world.run(layer)
    for frozen in ("w1", "w2", "w1 w2", "x", "probs"):
        x, ids, probs, w1, w2 = world.leaves(layer)
        given = {"x": x, "probs": probs, "w1": w1, "w2": w2}
        for name in frozen.split():
            given[name].requires_grad_(False)
        uniep.moe(x, ids, probs, w1, w2, group=world.native).backward(layer.dy[world.rank])
        for name, leaf in given.items():
            if name in frozen.split():
                world.expect(leaf.grad is None, f"{name} is frozen and has a gradient")
            else:
                world.expect(same_bits(leaf.grad, getattr(expected, f"d{name}")), f"{frozen} frozen: d{name} differs")


def check_one_tensor_an_expert(world):
    layer = world.medium()
    expected = world.run(layer)
    x, ids, probs, *weights = world.leaves(layer)
    w1, w2 = ([one.detach().clone().requires_grad_() for one in weight] for weight in weights)
    y = uniep.moe(x, ids, probs, w1, w2, group=world.native)
    y.backward(layer.dy[world.rank])
    gradients = [torch.stack([one.grad for one in weight]) for weight in (w1, w2)]
    world.expect_same(Result(y.detach(), x.grad, probs.grad, *gradients), expected, "lists")


def check_gate_and_up_apart_and_dense_routing(world):
    layer = world.medium()
    expected = world.run(layer)
    x, ids, probs, w1, w2 = world.leaves(layer)
    used = ids >= 0
    dense = torch.zeros(len(ids), layer.experts, device=world.device)
    dense[used.nonzero()[:, 0], ids[used].long()] = probs.detach()[used]
    routing_map = torch.zeros(dense.shape, dtype=torch.bool, device=world.device)
    routing_map[used.nonzero()[:, 0], ids[used].long()] = True
    gate, up = (half.detach().clone().requires_grad_() for half in w1.chunk(2, 1))
    for group in (world.native, world.torch):
        x, ids, probs, _, w2 = world.leaves(layer)
        gate.grad = up.grad = None
        y = uniep.moe(x, ids, probs, (gate, up), w2, group=group)
        y.backward(layer.dy[world.rank])
        got = Result(y.detach(), x.grad, probs.grad, torch.cat([gate.grad, up.grad], 1), w2.grad)
        world.expect_same(got, expected, f"gate and up apart, {group.transport}")
    results = []
    for group in (world.native, world.torch):
        x, _, _, *weights = world.leaves(layer)
        given = dense.clone().requires_grad_()
        y = uniep.moe(x, routing_map, given, *weights, topk=ids.shape[1], group=group)
        y.backward(layer.dy[world.rank])
        results.append(Result(y.detach(), x.grad, given.grad, *(one.grad for one in weights)))
        unused = given.grad[~routing_map]
        world.expect(same_bits(unused, torch.zeros_like(unused)), f"dprobs of unused experts, {group.transport}")
    world.expect_same(*results, "dense routing")


def check_biases(world):
    """gpt-oss's experts, in both transports and as lists; and biases of zero, which change no bit."""
    layer = world.medium()
    local, hidden = layer.w2.shape[0] // world.ranks, layer.w2.shape[1]
    generator = torch.Generator().manual_seed(3 + world.rank)
    biases = [
        torch.randn(local, columns, generator=generator).bfloat16().to(world.device)
        for columns in (layer.w1.shape[1], hidden)
    ]

    def run(given, group=world.native, as_lists=False, **options):
        x, ids, probs, *weights = world.leaves(layer)
        leaves = [*weights, *given]
        if as_lists:
            leaves = [[one.detach().clone().requires_grad_() for one in leaf] for leaf in leaves]
        else:
            leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        w1, w2, b1, b2 = leaves
        y = uniep.moe(x, ids, probs, w1, w2, b1=b1, b2=b2, group=group, **options)
        y.backward(layer.dy[world.rank])
        grads = [torch.stack([one.grad for one in leaf]) if as_lists else leaf.grad for leaf in leaves]
        return Result(y.detach(), x.grad, probs.grad, *grads[:2]), grads[2:]

    def same(one, other, text):
        world.expect_same(one[0], other[0], text)
        for name, got, expected in zip(("db1", "db2"), one[1], other[1], strict=True):
            world.expect(same_bits(got, expected), f"{text}: {name} differs")

    oss = {"activation": "swiglu:alpha=1.702,limit=7,up_offset=1", "router_weight": "output"}
    for options in ({}, oss):
        expected = run(biases, **options)
        same(run(biases, world.torch, **options), expected, f"both transports, {options}")
        same(run(biases, as_lists=True, save="recompute", **options), expected, f"lists, recomputed, {options}")
    none = [torch.zeros_like(one) for one in biases]
    world.expect_same(run(none)[0], world.run(layer), "zero biases")


def check_experts_without_a_gate_and_weights_on_the_input(world):
    """Both transports, and recomputed."""
    layer = world.medium()

    def run(group=world.native, save="keep", **options):
        x, ids, probs, w1, w2 = world.leaves(layer)
        if options.get("activation") == "relu2":
            w1 = w1.detach()[:, : w2.shape[2]].contiguous().requires_grad_()
        y = uniep.moe(x, ids, probs, w1, w2, group=group, save=save, **options)
        y.backward(layer.dy[world.rank])
        return result_of((x, ids, probs, w1, w2), y)

    forms = ("swiglu", "input"), ("relu2", "activation"), ("relu2", "output"), ("relu2", "input")
    for activation, router_weight in forms:
        options = {"activation": activation, "router_weight": router_weight}
        expected = run(**options)
        world.expect_same(run(world.torch, **options), expected, f"both transports, {options}")
        world.expect_same(run(save="recompute", **options), expected, f"recomputed, {options}")


def check_uninitialized_memory_may_hold_anything(world):
    layer = world.medium()
    expected = world.run(layer)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for save in ("keep", "redispatch", "rows", "recompute"):
            world.expect_same(world.run(layer, save=save), expected, f"memory filled with NaN, save {save}")
    finally:
        torch.use_deterministic_algorithms(False)


def check_memory_stays(world):
    if world.cpu:
        return
    layer = world.medium()
    for step in range(200):
        world.run(layer, save=("keep", "redispatch", "rows", "recompute")[step % 4])
        if step == 20:
            world.synchronize()
            before = torch.cuda.memory_allocated()
    world.synchronize()
    world.expect(torch.cuda.memory_allocated() == before, f"{before} bytes, then {torch.cuda.memory_allocated()}")


def check_memory_that_torch_caches(world):
    """A layer grows where torch has cached all that was free on one rank."""
    if world.cpu:
        return
    layer = world.medium(tokens=1000)
    expected = world.run(layer)
    small, large = (world.medium(seed=2, tokens=tokens) for tokens in (100, 60000))
    with uniep.Group(device=world.device, shared=False) as group:
        world.run(small, group)
        torch.cuda.empty_cache()
        if world.rank == world.ranks - 1:
            free, _ = torch.cuda.mem_get_info()
            piece = 1 << 30
            hoard = [torch.empty(piece, dtype=torch.uint8, device=world.device) for _ in range(free // piece)]
            hoard.append(torch.empty(max(free % piece - (64 << 20), 1), dtype=torch.uint8, device=world.device))
            del hoard
        before = torch.cuda.memory_reserved()
        world.run(large, group)
        given = before - torch.cuda.memory_reserved()
        world.expect(given > 0 or world.rank < world.ranks - 1, f"torch has {-given >> 20} MiB more than before")
        world.expect_same(world.run(layer, group), expected, "behind it")


def check_groups(world):
    world.expect(copy.deepcopy(world.native) is world.native, "deepcopy")
    other = uniep.Group(device=world.device, timeout_s=30, shared=False)
    layer = world.medium()
    world.expect_same(world.run(layer, other), world.run(layer), "another group")
    other.close()


def check_borrowed_communicator(world):
    """A Group whose id went over the NCCL communicator of torch; over gloo, and with one rank, nothing is borrowed."""
    layer = world.medium()
    with uniep.Group(device=world.device, communicator="borrow", shared=False) as group:
        world.expect(group.transport == world.native.transport, f"transport {group.transport}")
        world.expect_same(world.run(layer, group), world.run(layer), "a borrowed communicator")
        dist.barrier()  # the process group's communicator still serves it


def check_cuda_graphs(world):
    """Forward and backward in a graph, replayed with other routings; and what a graph can not hold is refused."""
    if world.cpu:
        return
    batches = [world.medium(seed, tokens=200) for seed in (1, 2, 3)]
    tokens = max(len(x) for x in batches[0].x)
    capacity = (4.0, tokens)
    expected = [world.run(Layer(one.x, one.ids, one.probs, one.dy, batches[0].w1, batches[0].w2)) for one in batches]
    x, ids, probs, w1, w2 = world.leaves(batches[0])
    ids, dy = ids.clone(), batches[0].dy[world.rank].clone()
    sums = [torch.zeros(one.shape, device=world.device) for one in (w1, w2)]

    def step(main_grad=None):
        y = uniep.moe(x, ids, probs, w1, w2, group=world.native, capacity=capacity, main_grad=main_grad)
        # autograd.grad() must name the weights, though they have no gradient then: main_grad of others is left alone.
        return y.detach(), *torch.autograd.grad(y, (x, probs, w1, w2), dy, allow_unused=main_grad is not None)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(), step(tuple(sums))
    torch.cuda.current_stream().wait_stream(side)
    graph, adding = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
        for options, words in (({"group": world.native}, "capacity: None"), ({"group": world.torch}, "transport")):
            try:
                uniep.moe(x, ids, probs, w1, w2, **options)
                world.expect(False, f"captured with {options}")
            except ValueError as error:
                world.expect(words in str(error), f"refused with {error}")
    with torch.cuda.graph(adding):
        step(tuple(sums))
    for turn in (0, 1, 2, 0):
        batch = batches[turn]
        with torch.no_grad():
            for static, new in ((x, batch.x), (ids, batch.ids), (probs, batch.probs), (dy, batch.dy)):
                static.copy_(new[world.rank])
        graph.replay()
        world.synchronize()
        world.expect_same(Result(*results), expected[turn], f"replay with batch {turn}")
        for one in sums:
            one.zero_()
        adding.replay()
        world.synchronize()
        for name, one in zip(("dw1", "dw2"), sums, strict=True):
            world.expect(same_bits(one.bfloat16(), getattr(expected[turn], name)), f"main_grad {name}, batch {turn}")
    world.native.synchronize()
    world.expect_same(world.run(batches[1]), world.run(batches[1], world.torch), "a call behind replays")


def check_large_layer(world):
    """Qwen3-30B's shape: bits of both transports, and milliseconds."""
    if world.cpu:
        return
    layer = world.here(make_layer([4096] * world.ranks, 2048, 768, 128, 8))
    weights = [one.requires_grad_() for one in layer.local(world.rank, world.ranks)]
    x, ids, probs = (one[world.rank] for one in (layer.x, layer.ids, layer.probs))
    x.requires_grad_()
    results = []
    for group in (world.native, world.torch):
        times = {}
        for both in (False, True):
            for step in range(8):
                if step == 3:
                    dist.barrier()
                    world.synchronize()
                    begin = time.perf_counter()
                y = uniep.moe(x, ids, probs, *weights, group=group)
                if both:
                    x.grad, weights[0].grad, weights[1].grad = None, None, None
                    y.backward(layer.dy[world.rank])
            world.synchronize()
            times[both] = (time.perf_counter() - begin) / 5 * 1e3
        results.append([y.detach(), x.grad.clone(), weights[0].grad.clone(), weights[1].grad.clone()])
        if world.rank == 0:
            print(f"  {group.transport}: forward {times[False]:.3f} ms, both ways {times[True]:.3f} ms", flush=True)
    for name, one, other in zip(("y", "dx", "dw1", "dw2"), *results, strict=True):
        world.expect(same_bits(one, other), f"{name} differs")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="names without check_, with commas")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    world = World(options.cpu)
    if world.rank == 0:
        device = "CPU" if world.cpu else torch.cuda.get_device_name()
        print(f"{world.ranks} x {device}, torch {torch.__version__}, {world.native}", flush=True)
    names = globals() | vars(gpu_checks_beside_nccl) | vars(gpu_checks_tuner)
    checks = {name[6:]: value for name, value in names.items() if name.startswith("check_")}
    wanted = options.only.split(",") if options.only else list(checks)
    failed = 0
    for name in wanted:
        world.failures, begin = [], time.perf_counter()
        try:
            checks[name](world)
            world.synchronize()
        except Exception:
            # The other ranks may be in any collective by now, so nothing more can be run.
            traceback.print_exc()
            print(f"FAIL {name}: an exception on rank {world.rank}", flush=True)
            os._exit(1)
        everybodys = [None] * world.ranks
        dist.all_gather_object(everybodys, world.failures, group=world.host)
        texts = [f"rank {rank}: {text}" for rank, found in enumerate(everybodys) for text in found]
        failed += bool(texts)
        if world.rank == 0:
            print(f"{'FAIL' if texts else 'PASS'} {name} ({time.perf_counter() - begin:.1f} s)", flush=True)
            for text in texts[:20]:
                print(f"  {text}")
    if world.rank == 0:
        print(f"{len(wanted) - failed} of {len(wanted)} checks passed", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
