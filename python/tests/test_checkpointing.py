"""Checkpointing where the second forward routes otherwise, as a router on a GPU may: gradients are the second's."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import uniep
from layers import make_layer, same_bits
from test_exchange import own_gemms
from uniep import tickets

SAVES = ("keep", "redispatch", "rows", "recompute")


def routings(layer, one_slot=False):
    """Two with equal numbers of rows of experts, or that differ in one slot."""
    first = layer.ids[0]
    if not one_slot:
        return first, first.roll(1, 0).contiguous()
    second = first.clone()
    second[5, 0] = next(expert for expert in range(layer.experts) if expert not in first[5].tolist())
    return first, second


def gradients(layer, block):
    """Of block(x, probs, w1, w2)."""
    given = layer.x[0], layer.probs[0], layer.w1, layer.w2
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    block(*leaves).backward(layer.dy[0])
    return [leaf.grad for leaf in leaves]


def checkpointed(layer, ids, run, **options):
    """Gradients where forward runs with the first ids and the one in backward with the second."""
    calls = []

    def block(*tensors):
        calls.append(1)
        return run(ids[len(calls) - 1], *tensors)

    found = gradients(layer, lambda *tensors: checkpoint(block, *tensors, use_reentrant=False, **options))
    assert len(calls) == 2
    return found


def assert_those_of_the_second(layer, ids, run, **options):
    first, second = (gradients(layer, lambda *tensors, one=one: run(one, *tensors)) for one in ids)
    got = checkpointed(layer, ids, run, **options)
    assert all(map(same_bits, got, second))
    assert not all(map(same_bits, first, second))


def run_layer(**options):
    return lambda ids, x, probs, w1, w2: uniep.moe(x * 1, ids, probs, w1, w2, **options)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("capacity", [None, (8192, 256)])
def test_another_routing(save, capacity):
    layer = make_layer([200])
    assert_those_of_the_second(layer, routings(layer), run_layer(save=save, capacity=capacity))


@pytest.mark.parametrize("options", [{}, {"save": "recompute"}, {"capacity": (8192, 2000)}], ids=str)
def test_one_slot_of_another_routing(options):
    layer = make_layer([2000])
    assert_those_of_the_second(layer, routings(layer, one_slot=True), run_layer(**options))


@pytest.mark.parametrize("options", [{"save": "recompute"}, {"capacity": (8192, 256)}], ids=str)
def test_other_numbers_of_rows(options):
    """What is saved has one size then, so that checkpoint() finds nothing to refuse."""
    layer = make_layer([200], experts=4)
    first = layer.ids[0]
    second = torch.tensor([0, 1], dtype=first.dtype).expand_as(first).contiguous()
    assert_those_of_the_second(layer, (first, second), run_layer(**options))


def test_other_numbers_of_rows_without_the_check_of_checkpoint():
    layer = make_layer([200], experts=4)
    first = layer.ids[0]
    second = torch.tensor([0, 1], dtype=first.dtype).expand_as(first).contiguous()
    for save in SAVES:
        assert_those_of_the_second(layer, (first, second), run_layer(save=save), determinism_check="none")


def test_a_router_inside():
    torch.manual_seed(0)
    layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2)
    x, weights = torch.randn(2000, 64).bfloat16(), [torch.randn(8, 64), torch.randn(8, 64)]

    def run(first, second, reentrant=None):
        order = [first, second]

        def block(x):
            with torch.no_grad():
                layer.router.weight.copy_(weights[order.pop(0)])
            return layer(x * 1)

        layer.zero_grad()
        given = x.clone().requires_grad_()
        options = {"use_reentrant": reentrant, "determinism_check": "none"}
        y = block(given) if reentrant is None else checkpoint(block, given, **options)
        y.backward(torch.ones_like(y))
        return [given.grad, *(one.grad for one in layer.parameters())]

    expected = run(1, 1)
    assert all(map(same_bits, run(0, 1, reentrant=False), expected))
    assert not all(map(same_bits, run(0, 1), expected))


@pytest.mark.parametrize("places_inside", [True, False])
def test_the_exchange(places_inside):
    layer = make_layer([200])
    ids = routings(layer)

    def run(one, x, probs, w1, w2):
        return own_gemms(x * 1, uniep.place(one, probs, layer.experts, 64), w1, w2)

    if places_inside:
        assert_those_of_the_second(layer, ids, run)
        return
    expected = gradients(layer, lambda *tensors: run(ids[0], *tensors))

    def outside(x, probs, w1, w2):
        plan = uniep.place(ids[0], probs, layer.experts, 64)
        return checkpoint(lambda x, w1, w2: own_gemms(x * 1, plan, w1, w2), x, w1, w2, use_reentrant=False)

    assert all(map(same_bits, gradients(layer, outside), expected))


def test_several_layers_and_a_retained_graph():
    """Each backward runs forward again, with the routing that it finds then."""
    layer = make_layer([200])
    first, second = routings(layer)
    now = [first]
    leaves = [one.clone().requires_grad_() for one in (layer.x[0], layer.probs[0], layer.w1, layer.w2)]

    def block(x, probs, w1, w2):
        for _ in range(2):
            x = uniep.moe(x * 1, now[0], probs, w1, w2)
        return x

    def run(ids, own):
        now[0] = ids
        return torch.autograd.grad(own, leaves, layer.dy[0], retain_graph=True)

    own = checkpoint(block, *leaves, use_reentrant=False)
    for ids in (second, first, second):
        got = run(ids, own)
        assert all(map(same_bits, got, run(ids, block(*leaves))))
    del own, got
    assert not tickets._issued


def test_offloading_inside_and_around():
    layer = make_layer([200])
    ids = routings(layer)

    def offloaded(ids, x, probs, w1, w2):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one.clone()):
            return uniep.moe(x, ids, probs, w1, w2)

    expected = gradients(layer, lambda *tensors: run_layer()(ids[0], *tensors))
    assert all(map(same_bits, gradients(layer, lambda *tensors: offloaded(ids[0], *tensors)), expected))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one.clone()):
        assert_those_of_the_second(layer, ids, run_layer())


def test_tensors_of_another_forward_without_its_routing_are_an_error():
    layer = make_layer([16])
    kept, now = [], [0]

    def unpack(index):
        return kept[index + now[0]]

    def pack(tensor):
        kept.append(tensor.clone())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        x = layer.x[0].requires_grad_()
        y = uniep.moe(x, layer.ids[0], layer.probs[0], layer.w1, layer.w2)
        now[0] = len(kept)
        uniep.moe(x, layer.ids[0], layer.probs[0], layer.w1, layer.w2)
    with pytest.raises(RuntimeError, match="tensors of another forward, whose routing is gone"):
        y.sum().backward()
