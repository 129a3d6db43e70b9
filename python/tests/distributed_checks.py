"""What test_distributed.py starts: every check is run by all ranks, and compares with one process."""

import contextlib
import itertools
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import traceback
import unittest.mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.checkpoint as checkpoint_files
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import uniep
from layers import (
    Layer,
    Result,
    assert_same,
    dense_gradient,
    make_dense,
    make_layer,
    random_layer,
    run_moe,
    same_bits,
)
from uniep import shares, tuning
from uniep.routes import TorchRoute


def alone():
    """A group of this process."""
    if not hasattr(alone, "group"):
        alone.group = uniep.Group(dist.new_subgroups(group_size=1)[0])
        assert alone.group.transport == "native"
    return alone.group


@contextlib.contextmanager
def value_error(text):
    try:
        yield
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no ValueError with '{text}'")


def expected_of_rank(layer: Layer, rank: int, ranks: int) -> Result:
    """The rank's part of what one process gives for the whole batch."""
    whole = run_moe(layer.joined(), 0, (layer.w1, layer.w2), group=alone())
    first = sum(len(x) for x in layer.x[:rank])
    tokens = slice(first, first + len(layer.x[rank]))
    experts = slice(rank * layer.experts // ranks, (rank + 1) * layer.experts // ranks)
    return Result(whole.y[tokens], whole.dx[tokens], whole.dprobs[tokens], whole.dw1[experts], whole.dw2[experts])


def check_bits_of_one_process(rank: int, ranks: int) -> None:
    for seed in range(25):
        layer = random_layer(seed, ranks)
        expected = expected_of_rank(layer, rank, ranks)
        save = ("keep", "redispatch", "rows", "recompute")[seed % 4]
        capacity = (1 << 16, 64) if seed % 2 else None
        assert_same(run_moe(layer, rank, layer.local(rank, ranks), save=save, capacity=capacity), expected)


def check_gate_and_up_apart_and_dense_routing(rank: int, ranks: int) -> None:
    for seed in range(10):
        layer, dense = make_dense(random_layer(seed, ranks))
        expected = expected_of_rank(layer, rank, ranks)
        topk = layer.ids[rank].shape[1]
        x, probs = layer.x[rank].clone().requires_grad_(), dense[rank].probs.clone().requires_grad_()
        w1, w2 = layer.local(rank, ranks)
        gate, up = (half.contiguous().requires_grad_() for half in w1.chunk(2, 1))
        w2.requires_grad_()
        y = uniep.moe(x, dense[rank].routing_map, probs, (gate, up), w2, topk=topk)
        y.backward(layer.dy[rank])
        assert same_bits(probs.grad, dense_gradient(layer.ids[rank], expected.dprobs, layer.experts))
        dw1 = torch.cat([gate.grad, up.grad], 1)
        assert_same(Result(y.detach(), x.grad, expected.dprobs, dw1, w2.grad), expected)


def check_bad_maps(rank: int, ranks: int) -> None:
    """All ranks get the error of the rank whose map is wrong."""
    layer = make_layer([6] * ranks, experts=8)
    bad = ranks - 1
    for change, message in (
        (lambda routing_map, probs: routing_map[2].fill_(True), f"routing_map: .*8 experts.*token 2.*rank {bad}"),
        (lambda routing_map, probs: probs[3, 4:5].fill_(torch.nan), f"probs: .*token 3, expert 4.*rank {bad}"),
    ):
        routing_map = torch.zeros(6, 8, dtype=torch.bool)
        routing_map[:, 4] = True
        probs = torch.ones(6, 8)
        if rank == bad:
            change(routing_map, probs)
        try:
            uniep.moe(layer.x[rank], routing_map, probs, *layer.local(rank, ranks), topk=2)
        except ValueError as error:
            assert ranks == 1 or re.search(message, str(error)), error
        else:
            raise AssertionError("a wrong map was taken")


def check_checkpointing(rank: int, ranks: int) -> None:
    layer = random_layer(101, ranks)
    expected = expected_of_rank(layer, rank, ranks)
    for reentrant in (False, True):
        x, probs = layer.x[rank].clone().requires_grad_(), layer.probs[rank].clone().requires_grad_()
        w1, w2 = (weight.requires_grad_() for weight in layer.local(rank, ranks))
        y = checkpoint(uniep.moe, x, layer.ids[rank], probs, w1, w2, use_reentrant=reentrant)
        y.backward(layer.dy[rank])
        assert_same(Result(y.detach(), x.grad, probs.grad, w1.grad, w2.grad), expected)
    layer = make_layer([40 + rank for rank in range(ranks)])
    first = layer.ids[rank].roll(1, 0).contiguous()  # rows of a rank's experts as many, and of other tokens
    expected, order = expected_of_rank(layer, rank, ranks), [first, layer.ids[rank]]
    x, probs = layer.x[rank].clone().requires_grad_(), layer.probs[rank].clone().requires_grad_()
    w1, w2 = (weight.requires_grad_() for weight in layer.local(rank, ranks))
    y = checkpoint(lambda x, *more: uniep.moe(x * 1, order.pop(0), *more), x, probs, w1, w2, use_reentrant=False)
    y.backward(layer.dy[rank])
    assert_same(Result(expected.y, x.grad, probs.grad, w1.grad, w2.grad), expected)


def check_compiled(rank: int, ranks: int) -> None:
    """One graph, in which backward places again; also inside of checkpoint, which runs forward again."""

    def block(x, ids, probs, w1, w2):
        return uniep.moe(x * 1, ids, probs, w1, w2) * 1

    def checkpointed(*arguments):
        return checkpoint(block, *arguments, use_reentrant=False) * 1

    layer = make_layer([20 + 3 * r for r in range(ranks)], unused=0.1)
    expected = expected_of_rank(layer, rank, ranks)
    for function in (block, checkpointed):
        torch._dynamo.reset()
        x, probs = layer.x[rank].clone().requires_grad_(), layer.probs[rank].clone().requires_grad_()
        w1, w2 = (weight.requires_grad_() for weight in layer.local(rank, ranks))
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        y = compiled(x, layer.ids[rank], probs, w1, w2)
        y.backward(layer.dy[rank])
        assert_same(Result(y.detach(), x.grad, probs.grad, w1.grad, w2.grad), expected)


def check_a_rank_outside_of_graphs(rank: int, ranks: int) -> None:
    """Backward of a graph places anew, that of others does not: an error of all ranks before they wait in it."""
    if ranks == 1:
        return
    layer = make_layer([6 + r for r in range(ranks)])
    last = ranks - 1
    inside = ", ".join(str(one) for one in range(last))
    text = f"torch.compile: this layer is in a graph on ranks {inside}, and outside of graphs on ranks {last}; must be"

    def run(is_compiled, save="keep"):
        def block(x, ids, probs, w1, w2):
            return uniep.moe(x * 1, ids, probs, w1, w2, save=save) * 1

        torch._dynamo.reset()
        function = torch.compile(block, fullgraph=True, backend="aot_eager") if is_compiled else block
        weights = [one.requires_grad_() for one in layer.local(rank, ranks)]
        y = function(layer.x[rank], layer.ids[rank], layer.probs[rank], *weights)
        if y.requires_grad:
            y.float().sum().backward()
        return y.detach()

    for save in ("keep", "redispatch"):
        expect_error(ValueError, text, lambda: run(rank != last, save))  # noqa: B023
    with torch.no_grad():  # there is no backward
        mixed = run(rank != last)
    assert same_bits(mixed, run(False)) and same_bits(mixed, run(True))


def check_interleaved_micro_batches(rank: int, ranks: int) -> None:
    layers = [make_layer([20 + r for r in range(ranks)], seed=seed) for seed in (1, 2)]
    pairs = []
    for layer in layers:
        x = layer.x[rank].clone().requires_grad_()
        pairs.append((x, uniep.moe(x, layer.ids[rank], layer.probs[rank], *layer.local(rank, ranks))))
    for layer, (x, y) in zip(layers, pairs, strict=True):
        y.backward(layer.dy[rank])
        assert same_bits(x.grad, expected_of_rank(layer, rank, ranks).dx)


def check_main_grad(rank: int, ranks: int) -> None:
    layer = make_layer([30] * ranks)
    whole = [torch.zeros(layer.w1.shape), torch.zeros(layer.w2.shape)]
    joined = layer.joined()
    w1, w2 = layer.w1.clone().requires_grad_(), layer.w2.clone().requires_grad_()
    y = uniep.moe(joined.x[0], joined.ids[0], joined.probs[0], w1, w2, group=alone(), main_grad=tuple(whole))
    y.backward(joined.dy[0])
    weights = [torch.nn.Parameter(weight) for weight in layer.local(rank, ranks)]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    y = uniep.moe(layer.x[rank], layer.ids[rank], layer.probs[rank], *weights, main_grad="param")
    y.backward(layer.dy[rank])
    experts = slice(rank * layer.experts // ranks, (rank + 1) * layer.experts // ranks)
    for weight, total in zip(weights, whole, strict=True):
        assert same_bits(weight.main_grad, total[experts])


def check_fp32_gradients(rank: int, ranks: int) -> None:
    layer = make_layer([30 + rank for rank in range(ranks)])
    whole = torch.zeros(layer.w1.shape), torch.zeros(layer.w2.shape)
    joined = layer.joined()
    w1, w2 = layer.w1.clone().requires_grad_(), layer.w2.clone().requires_grad_()
    y = uniep.moe(joined.x[0], joined.ids[0], joined.probs[0], w1, w2, group=alone(), main_grad=whole)
    y.backward(joined.dy[0])
    weights = [torch.nn.Parameter(weight) for weight in layer.local(rank, ranks)]
    for weight in weights:
        weight.grad_dtype = torch.float32
    y = uniep.moe(layer.x[rank], layer.ids[rank], layer.probs[rank], *weights, grad_dtype=torch.float32)
    y.backward(layer.dy[rank])
    experts = slice(rank * layer.experts // ranks, (rank + 1) * layer.experts // ranks)
    for weight, total in zip(weights, whole, strict=True):
        assert same_bits(weight.grad, total[experts])


def check_exchange(rank: int, ranks: int) -> None:
    for seed in range(10):
        layer = random_layer(seed, ranks)
        joined, hidden = layer.joined(), layer.w1.shape[2]
        results = []
        for batch, own, group in ((layer, rank, None), (joined, 0, alone())):
            x, probs = batch.x[own].clone().requires_grad_(), batch.probs[own].clone().requires_grad_()
            plan = uniep.place(batch.ids[own], probs, layer.experts, hidden, group=group)
            rows, row_probs = uniep.dispatch(x, plan)
            y = uniep.combine((rows.float() * (1 + row_probs[:, None])).bfloat16(), plan)
            y.backward(batch.dy[own])
            results.append((plan, rows.detach(), row_probs.detach(), y.detach(), x.grad, probs.grad))
        (plan, rows, row_probs, *tokens), (whole_plan, whole_rows, whole_probs, *whole_tokens) = results
        first = sum(len(x) for x in layer.x[:rank])
        for got, expected in zip(tokens, whole_tokens, strict=True):
            assert same_bits(got, expected[first : first + len(got)])
        local = layer.experts // ranks
        experts = slice(rank * local, (rank + 1) * local)
        assert torch.equal(plan.counts, whole_plan.counts[experts])
        begin = int(whole_plan.offsets[rank * local - 1]) if rank else 0
        assert torch.equal(plan.offsets, whole_plan.offsets[experts] - begin)
        assert same_bits(rows, whole_rows[begin : begin + plan.rows])
        assert same_bits(row_probs, whole_probs[begin : begin + plan.rows])


def check_modules_do_not_depend_on_the_number_of_ranks(rank: int, ranks: int) -> None:
    torch.manual_seed(5)
    own = uniep.MoELayer(hidden=32, intermediate=16, num_experts=8, topk=2)
    torch.manual_seed(5)
    whole = uniep.MoELayer(hidden=32, intermediate=16, num_experts=8, topk=2, group=alone())
    local = 8 // ranks
    assert same_bits(
        own.experts.down_proj.detach(), whole.experts.down_proj.detach()[rank * local : (rank + 1) * local]
    )
    x = torch.randn(ranks, 12, 32).bfloat16()
    assert same_bits(own(x[rank]).detach(), whole(x).detach()[rank])


def check_torch_transport_of_one_rank(rank: int, ranks: int) -> None:
    group = uniep.Group(alone().process_group, "torch")
    assert group.transport == "torch"
    layer = random_layer(7, 1)
    expected = run_moe(layer, 0, layer.local(0, 1), group=alone())
    assert_same(run_moe(layer, 0, layer.local(0, 1), group=group), expected)


def check_groups(rank: int, ranks: int) -> None:
    group = uniep.Group()
    assert (group.size, group.rank) == (ranks, rank)
    assert group is uniep.Group(dist.group.WORLD)
    own = uniep.Group("self")
    assert (own.size, own.rank, own.transport, own.why) == (1, 0, "native", "one rank")
    assert own is not group
    expect_error(ValueError, "pg: 'all'; legal are a process group, 'self' and None", lambda: uniep.Group("all"))
    if ranks == 1:
        assert (group.transport, group.why) == ("native", "one rank")
        return
    assert (group.transport, group.why) == ("torch", "not every rank has a Hopper GPU")
    text = "transport: 'native' can not be had: not every rank has a Hopper GPU; legal are 'auto' and 'torch'"
    expect_error(ValueError, text, lambda: uniep.Group(transport="native", shared=False))
    for name, given, kept in (
        ("reserve_sms", 8, "'auto'"),
        ("timeout_s", 9.5, "None"),
        ("transport", "torch", "'auto'"),
    ):
        text = f"{name}: {given!r}; the Group that these ranks share on cpu has {kept}. Give that one, close() it first"
        before = uniep.groups()
        expect_error(ValueError, text, lambda options={name: given}: uniep.Group(**options))
        assert uniep.groups() == before and group in before
    expect_error(ValueError, "timeout_s: -1; must be above 0", lambda: uniep.Group(timeout_s=-1))
    with uniep.Group(timeout_s=9.5, shared=False) as beside:
        assert beside is not group and beside is not uniep.Group()
    processes = dist.new_group()
    with uniep.Group(processes, workers=2):  # another process group, and one that is closed before the next is made
        pass
    with uniep.Group(processes, workers=1) as other:
        assert uniep.groups()[-1] is other
    dist.destroy_process_group(processes)
    expect_error(
        ValueError,
        "num_experts: 3; must be a multiple of",
        lambda: uniep.Experts(num_experts=3, hidden=8, intermediate=8),
    )


def expect_error(kind: type[Exception], text: str, call) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error: {text}")


def check_auto_where_the_native_transport_fails(rank: int, ranks: int) -> None:
    """As GPUs of one host that do not reach each other do; here none has a GPU, and one fails alone."""
    if ranks == 1:
        return
    make = uniep.Group._make_engine

    def make_engine(group, *given):
        if group.transport == "native" and rank > 0:
            group._unique_id()
            group.transport = "torch"  # as if the native one had been made
        return make(group, *given)

    with unittest.mock.patch.object(uniep.Group, "_choose", lambda *_: ("native", "told so")):
        with unittest.mock.patch.object(uniep.Group, "_make_engine", make_engine):
            group = uniep.Group(shared=False)
        with group:
            assert group.transport == "torch" and not group.engine.has_ended
            text = "the GPUs have no native transport: launch: processes needs the cuda engine"
            assert group.why.startswith(text), group.why
            layer = make_layer([24, 8, 16, 8][:ranks])
            got = run_moe(layer, rank, layer.local(rank, ranks), group=group)
            assert_same(got, expected_of_rank(layer, rank, ranks))
        for asked in ({"transport": "native"}, {"communicator": "borrow"}):
            try:
                uniep.Group(**asked, shared=False)
            except (uniep.Unsupported, ValueError):  # the latter: gloo's has no communicator to borrow
                continue
            raise AssertionError(f"who asks for {asked} gets nothing else")

        def fails_on_rank_0(group, *given):
            if rank > 0 and not hears:
                return make_engine(group, *given)
            group._unique_id()
            raise MemoryError("planted") if rank == 0 else uniep.DeviceError("rank 0 has left the group")

        for case in itertools.product((True, False), ("auto", "native")):
            hears, transport = case
            with unittest.mock.patch.object(uniep.Group, "_make_engine", fails_on_rank_0):
                try:
                    uniep.Group(transport=transport, shared=False)
                except (MemoryError, uniep.DeviceError) as error:
                    assert isinstance(error, MemoryError) if rank == 0 else "rank 0" in str(error), error
                    continue
            raise AssertionError("what is no want of a transport is no reason for another one")


def check_stats_of_a_rank_that_waits(rank: int, ranks: int) -> None:
    """Rank 0 sends its rows late, forward and backward; the others see that they wait, and where."""
    group = uniep.Group(transport="torch", shared=False)
    layer = make_layer([16] * ranks, experts=4 * ranks, topk=2)
    send, late = TorchRoute.send, 0.1

    def send_late(self, x):
        dist.barrier()  # the others wait for this rank, and it for none of them
        time.sleep(late if rank == 0 else 0)
        return send(self, x)

    uniep.record_stats()
    TorchRoute.send = send_late
    try:
        run_moe(layer, rank, layer.local(rank, ranks), group=group)
        found = uniep.stats()
    finally:
        TorchRoute.send = send
        uniep.record_stats(False)
    assert [one.direction for one in found] == ["forward", "backward"]
    for one in found:
        assert one.wait_ms > one.exposed_dispatch_ms > 0 and one.sum_ms > 0 and one.ms > 0
        if rank > 0:
            assert one.exposed_dispatch_ms > 1e3 * late / 2, one


def check_errors_of_one_rank_are_all_ranks(rank: int, ranks: int) -> None:
    last = ranks - 1
    group = uniep.Group(transport="torch", shared=False)

    def run(change, capacity=None, hidden=64, save="keep"):
        layer = make_layer([8] * ranks, experts=4 * ranks, hidden=hidden)
        if rank == last:
            change(layer)
        given = layer.x[rank], layer.ids[rank], layer.probs[rank], *layer.local(rank, ranks)
        uniep.moe(*given, group=group, capacity=capacity, save=save)

    def set_id(value, slot=1):
        def change(layer):
            layer.ids[last][5, slot] = value

        return change

    def same_ids(layer):
        layer.ids[last][5] = 1

    def set_prob(layer):
        layer.probs[last][2, 1] = torch.nan

    legal = f"legal are -1 (unused) and 0 to {4 * ranks - 1}"
    text = f"topk_ids: 99 at token 5, slot 1 of rank {last}; {legal}"
    expect_error(ValueError, text, lambda: run(set_id(99)))
    expect_error(ValueError, f"topk_ids: -2 at token 5, slot 1 of rank {last}; {legal}", lambda: run(set_id(-2)))
    expect_error(ValueError, f"topk_ids: 1 twice in token 5 of rank {last}", lambda: run(same_ids))
    expect_error(ValueError, f"probs: not finite at token 2, slot 1 of rank {last}", lambda: run(set_prob))
    expect_error(uniep.CapacityError, "capacity: 128 rows; rank 0 needs 512", lambda: run(lambda layer: None, (128, 8)))
    expect_error(
        uniep.CapacityError, "tokens: 8 on rank 0; the capacity allows 7", lambda: run(lambda _: None, (512, 7))
    )
    if ranks > 1:
        text = f"hidden: 72 on rank {last}, 64 on rank 0; must be equal on all ranks"
        expect_error(ValueError, text, lambda: run(lambda _: None, hidden=72 if rank == last else 64))
        ways = {last: "recompute"}
        text = f"save: 'recompute' on rank {last}, 'keep' on rank 0; must be equal on all ranks"
        expect_error(ValueError, text, lambda: run(lambda _: None, save=ways.get(rank, "keep")))
    check_checkpointing(rank, ranks)  # the group goes on


def check_shares_of_experts(rank: int, ranks: int) -> None:
    """All experts in the place of a rank's share: an error where num_experts says so, else a line of rank 0."""
    layer = make_layer([6] * ranks, experts=4 * ranks)
    weights = layer.local(rank, ranks)
    assert same_bits(run_moe(layer, rank, weights, num_experts=4 * ranks).y, run_moe(layer, rank, weights).y)
    if ranks > 1:
        text = f"num_experts: {4 * ranks}; w1 has {4 * ranks} experts of this rank, of {ranks} ranks, so that it must"
        expect_error(ValueError, text, lambda: run_moe(layer, rank, (layer.w1, layer.w2), num_experts=4 * ranks))
    assert ("share" in shares._told) == (rank == 0 and ranks > 1)


def check_ranks_agree_on_tuned_schedules(rank: int, ranks: int) -> None:
    """The slowest rank decides, and rank 0's file is everybody's."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"uniep_tuning_{os.getppid()}_{rank}"
    before = os.environ.get("UNIEP_CACHE_DIR")
    os.environ["UNIEP_CACHE_DIR"] = str(folder)
    slow_here = {"queue=dynamic": 0.1 if rank == 0 else 5.0, "fusion=none": 0.5}
    measure = tuning._Measurement._times
    tuning._Measurement._times = lambda self, pairs: [tuple(slow_here.get(one, 1.0) for one in pair) for pair in pairs]
    try:
        with uniep.Group(workers=3, shared=False) as group:
            layer = uniep.MoELayer(hidden=32, intermediate=16, num_experts=8, topk=2, group=group)
            expected = "queue=dynamic" if ranks == 1 else "fusion=none"
            assert uniep.autotune(layer, tokens=16, seconds=0.1) == (expected, expected)
            tuning._Measurement._times = measure
            uniep.autotune(
                uniep.MoELayer(hidden=32, intermediate=16, num_experts=8, topk=3, group=group), tokens=16, seconds=0.01
            )
        assert (folder / "schedules.json").exists() == (rank == 0)
        with uniep.Group(workers=3, shared=False) as group:
            assert tuning.choose(group, 32, 16, 8, 2) == (expected, expected)
            assert len(group.tuned) == 2
    finally:
        tuning._Measurement._times = measure
        os.environ.pop("UNIEP_CACHE_DIR")
        if before is not None:
            os.environ["UNIEP_CACHE_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


def check_what_asynchronous_collectives_give(rank: int, ranks: int) -> None:
    """Tensors without memory of their own: waited for, but for weights."""
    layer = make_layer([16])
    expected = run_moe(layer, 0, (layer.w1, layer.w2), group=alone())

    def gathered(tensor):
        part = tensor.chunk(ranks)[rank].contiguous()
        found = functional_collectives.all_gather_tensor(part, 0, dist.group.WORLD)
        assert type(found) is not torch.Tensor
        return found

    x = layer.x[0].clone().requires_grad_()
    given = [gathered(one) for one in (layer.ids[0], layer.probs[0])]
    y = uniep.moe(x, *given, layer.w1, layer.w2, group=alone())
    (dx,) = torch.autograd.grad(y, x, gathered(layer.dy[0]))
    assert same_bits(y, expected.y) and same_bits(dx, expected.dx)
    y = uniep.moe(gathered(layer.x[0]), *given, layer.w1, layer.w2, group=alone())
    assert same_bits(y, expected.y)
    with value_error("w2: AsyncCollectiveTensor; must be an ordinary tensor, such as trigger_wait"):
        uniep.moe(layer.x[0], *given, layer.w1, gathered(layer.w2), group=alone())


def check_checkpoints_of_experts_that_fsdp2_has_sharded(rank: int, ranks: int) -> None:
    layer = uniep.MoELayer(hidden=32, intermediate=16, num_experts=4 * ranks, topk=2)
    mesh = init_device_mesh("cpu", (ranks,))
    state = {name: DTensor.from_local(one, mesh, [Shard(0)]) for name, one in layer.state_dict().items()}
    with (
        value_error("must be on ranks that hold the same experts, one of each of the job's groups")
        if ranks > 1
        else contextlib.nullcontext()
    ):
        uniep.checkpoint_state(layer, state)


def check_checkpoints(rank: int, ranks: int) -> None:
    """Every rank's experts and what the optimizer keeps of them come back, also on another number of ranks."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"uniep_checkpoint_{os.getppid()}"

    def make(group):
        torch.manual_seed(rank)
        layer = uniep.MoELayer(hidden=32, intermediate=16, num_experts=4 * ranks, topk=2, group=group, bias=True)
        dist.broadcast(layer.router.weight.data, 0)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
        layer(torch.randn(8, 32).bfloat16()).float().square().sum().backward()
        dist.all_reduce(layer.router.weight.grad)
        optimizer.step()
        kept = state_dict.get_optimizer_state_dict(layer, optimizer)
        state = {"model": uniep.checkpoint_state(layer), "optimizer": uniep.checkpoint_state(layer, kept)}
        return layer, optimizer, kept, state

    layer, optimizer, kept, state = make(uniep.Group())
    before = {name: one.clone() for name, one in layer.state_dict().items()}
    moments = {name: optimizer.state[one]["exp_avg"].clone() for name, one in layer.named_parameters()}
    checkpoint_files.save(state, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()
    checkpoint_files.load(state, checkpoint_id=folder)
    state_dict.set_optimizer_state_dict(layer, optimizer, kept)
    for name, parameter in layer.named_parameters():
        assert same_bits(parameter, before[name]), name
        assert same_bits(optimizer.state[parameter]["exp_avg"], moments[name]), name
    one, _, _, state = make(alone())
    checkpoint_files.load(state, checkpoint_id=folder, no_dist=True)
    for name, parameter in one.named_parameters():
        part = parameter.chunk(ranks)[rank] if name.startswith("experts.") else parameter
        assert same_bits(part, before[name]), name
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def check_data_parallel_router(rank: int, ranks: int) -> None:
    """DistributedDataParallel that leaves experts alone, as docs/pytorch_parallel.md has it."""
    torch.manual_seed(0)
    layer = uniep.MoELayer(hidden=32, intermediate=16, num_experts=4 * ranks, topk=2)
    before = [parameter.detach().clone() for parameter in layer.experts.parameters()]
    names = [name for name, _ in layer.named_parameters() if name.startswith("experts.")]
    data_parallel = torch.nn.parallel.DistributedDataParallel
    data_parallel._set_params_and_buffers_to_ignore_for_model(layer, names)
    model = data_parallel(layer)
    assert all(same_bits(one, other) for one, other in zip(layer.experts.parameters(), before, strict=True))
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(8, 32, generator=generator).bfloat16()).float().square().sum().backward()
    gradients = [torch.empty_like(layer.router.weight) for _ in range(ranks)]
    dist.all_gather(gradients, layer.router.weight.grad)
    assert all(same_bits(one, gradients[0]) for one in gradients)


@contextlib.contextmanager
def disabled(value: str = "1"):
    """With UNIEP_DISABLE."""
    os.environ["UNIEP_DISABLE"] = value
    try:
        yield
    finally:
        del os.environ["UNIEP_DISABLE"]


def run_checks(names: dict, set_up=lambda: None) -> int:
    """Runs every check_... of a module; the exit status is 1 where one fails."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    set_up()
    checks = {name: value for name, value in names.items() if name.startswith("check_")}
    for name, check in checks.items():
        try:
            check(rank, ranks)
        except Exception:
            traceback.print_exc()
            print(f"rank {rank}: {name} failed", flush=True)
            return 1
    if rank == 0:
        print(f"{len(checks)} checks passed on {ranks} ranks", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    import checkpoint_checks  # which import this file
    import verifier_checks

    sys.exit(run_checks(globals() | vars(verifier_checks) | vars(checkpoint_checks)))
