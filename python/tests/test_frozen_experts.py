"""Experts that are frozen beside others of their rank."""

import pytest
import torch
import torch._dynamo

import uniep
from layers import make_layer, same_bits
from uniep.layer_stats import name_layer

FROZEN = {"w1": (0, 3, 4), "w2": (0, 7)}


def experts(layer, frozen):
    """w1 and w2, one tensor an expert."""
    parts = {"w1": layer.w1, "w2": layer.w2}
    return {
        name: [
            torch.nn.Parameter(one.clone(), requires_grad=at not in frozen.get(name, ())) for at, one in enumerate(w)
        ]
        for name, w in parts.items()
    }


def run(frozen, prepare=lambda weight: None, **options):
    """dx, and the weights behind a backward."""
    layer = make_layer([64])
    parts = experts(layer, frozen)
    for weights in parts.values():
        for weight in weights:
            if weight.requires_grad:
                prepare(weight)
    x = layer.x[0].clone().requires_grad_()
    y = uniep.moe(x, layer.ids[0], layer.probs[0], parts["w1"], parts["w2"], **options)
    y.backward(layer.dy[0])
    return x.grad, parts


@pytest.mark.parametrize("frozen", [FROZEN, {"w1": (0,)}, {"w1": range(8), "w2": (1,)}, {"w2": range(1, 8)}], ids=str)
@pytest.mark.parametrize("save", ["keep", "recompute"])
def test_gradients_of_the_others(frozen, save):
    (expected_dx, expected), (dx, found) = (run(one, save=save) for one in ({}, frozen))
    assert same_bits(dx, expected_dx)
    for name, weights in found.items():
        for at, (weight, other) in enumerate(zip(weights, expected[name], strict=True)):
            assert weight.grad is None if at in frozen.get(name, ()) else same_bits(weight.grad, other.grad)


def give_main_grad(weight):
    weight.main_grad = torch.zeros(weight.shape)


def ask_for_fp32(weight):
    weight.grad_dtype = torch.float32


def test_main_grad_of_parameters():
    """Frozen ones have none, as those of Megatron's DDP."""
    (expected_dx, expected), (dx, found) = (run(one, give_main_grad, main_grad="param") for one in ({}, FROZEN))
    assert same_bits(dx, expected_dx)
    for name, weights in found.items():
        for at, (weight, other) in enumerate(zip(weights, expected[name], strict=True)):
            if at in FROZEN[name]:
                assert weight.grad is None and not hasattr(weight, "grad_added_to_main_grad")
            else:
                assert same_bits(weight.main_grad, other.main_grad) and weight.grad_added_to_main_grad


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="PyTorch before 2.10")
def test_fp32_gradients():
    (_, expected), (_, found) = (run(one, ask_for_fp32, grad_dtype=torch.float32) for one in ({}, FROZEN))
    for name, weights in found.items():
        for at, (weight, other) in enumerate(zip(weights, expected[name], strict=True)):
            assert weight.grad is None if at in FROZEN[name] else same_bits(weight.grad, other.grad)


def test_biases_and_gate_and_up_apart():
    layer = make_layer([64])
    results = []
    for is_frozen in (False, True):
        gates, ups = ([torch.nn.Parameter(one.clone()) for one in half] for half in layer.w1.chunk(2, 1))
        w2 = [torch.nn.Parameter(one.clone()) for one in layer.w2]
        b1 = [torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(8)]
        b2 = [torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(8)]
        for one in (ups[2], b1[0], b2[1]) if is_frozen else ():
            one.requires_grad_(False)
        given = (gates, [one.contiguous() for one in ups]), w2
        y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *given, b1=b1, b2=b2, router_weight="output")
        y.backward(layer.dy[0])
        results.append([one.grad for one in (*gates, *ups, *w2, *b1, *b2)])
    lacking = [at for at, one in enumerate(results[1]) if one is None]
    assert lacking == [8 + 2, 24 + 0, 32 + 1]
    assert all(same_bits(*pair) for at, pair in enumerate(zip(*results, strict=True)) if at not in lacking)


def test_nothing_is_kept():
    """Gradients that are thrown away are so before y is."""
    layer = make_layer([64])
    parts = experts(layer, FROZEN)
    y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], parts["w1"], parts["w2"])
    leaves = [node.variable for node, _ in y.grad_fn.next_functions if hasattr(node, "variable")]
    assert sum(leaf not in {*parts["w1"], *parts["w2"]} for leaf in leaves) == 5
    y.backward(layer.dy[0])
    known = {*parts["w1"], *parts["w2"]}
    assert all((leaf.grad is not None) is (leaf in known) for leaf in leaves)


def test_the_layer_keeps_its_name():
    layer = make_layer([64])
    parts = experts(layer, FROZEN)
    name_layer(parts["w2"][0], "layer 5")
    uniep.record_stats()
    try:
        uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], parts["w1"], parts["w2"])
        assert [one.layer for one in uniep.stats()] == ["layer 5"]
    finally:
        uniep.record_stats(False)


def test_without_gradients():
    layer = make_layer([64])
    parts = experts(layer, FROZEN)
    with torch.no_grad():
        y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], parts["w1"], parts["w2"])
    assert same_bits(y, uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], layer.w1, layer.w2))


def test_compiled_graphs_refuse():
    layer = make_layer([64])
    parts = experts(layer, FROZEN)
    torch._dynamo.reset()
    compiled = torch.compile(uniep.moe, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="w1: some experts require a gradient and others do not; in a compiled graph"):
        compiled(layer.x[0], layer.ids[0], layer.probs[0], parts["w1"], parts["w2"])
