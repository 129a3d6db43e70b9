"""Biases of experts: how they are given, that no way of it changes a bit, and what is refused.

test_activations.py compares gpt-oss's layer, which has them, with its own formula in float64.
"""

from __future__ import annotations

import typing

import pytest
import torch

import uniep
from layers import make_layer, relative_error, same_bits

OSS = {"activation": "swiglu:alpha=1.702,limit=7,up_offset=1", "router_weight": "output"}
EXPERTS, HIDDEN, INTERMEDIATE = 4, 32, 24
NAMES = ("y", "dx", "dprobs", "dw1", "dw2", "db1", "db2")


def batch() -> typing.Any:
    return make_layer([40], HIDDEN, INTERMEDIATE, EXPERTS, topk=2, seed=4, unused=0.1)


def parameters() -> list[torch.Tensor]:
    """w1, w2, b1 and b2."""
    generator = torch.Generator().manual_seed(9)
    biases = [torch.randn(EXPERTS, columns, generator=generator).bfloat16() for columns in (2 * INTERMEDIATE, HIDDEN)]
    layer = batch()
    return [layer.w1.clone(), layer.w2.clone(), *biases]


def call(weights: typing.Sequence[typing.Any], **options: typing.Any) -> dict[str, torch.Tensor]:
    """y, dx and dprobs; gradients of the weights stay with them."""
    layer = batch()
    x, probs = layer.x[0].requires_grad_(), layer.probs[0].requires_grad_()
    w1, w2, b1, b2 = weights
    y = uniep.moe(x, layer.ids[0], probs, w1, w2, b1=b1, b2=b2, group=uniep.Group("self"), **options)
    y.backward(layer.dy[0])
    return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}


def run(**options: typing.Any) -> dict[str, torch.Tensor]:
    weights = [one.requires_grad_() for one in parameters()]
    found = call(weights, **options)
    return found | dict(zip(NAMES[3:], (one.grad for one in weights), strict=True))


def formula(router_weight: str) -> dict[str, torch.Tensor]:
    """SwiGLU with biases by plain loops in float64."""
    layer = batch()
    x, probs = layer.x[0].double().requires_grad_(), layer.probs[0].double().requires_grad_()
    w1, w2, b1, b2 = weights = [one.double().requires_grad_() for one in parameters()]
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = (layer.ids[0] == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w1[expert].T + b1[expert]).chunk(2, -1)
        inside, outside = probs[token, slot, None], torch.ones(())
        if router_weight == "output":
            inside, outside = outside, inside
        a = torch.nn.functional.silu(gate) * up * inside
        y = y.index_add(0, token, (a @ w2[expert].T + b2[expert]) * outside)
    y.backward(layer.dy[0].double())
    return dict(zip(NAMES, (y.detach(), x.grad, probs.grad, *(one.grad for one in weights)), strict=True))


@pytest.mark.parametrize("router_weight", ["activation", "output"])
def test_beside_the_formula_in_float64(router_weight):
    expected, found = formula(router_weight), run(router_weight=router_weight)
    for name, want in expected.items():
        assert relative_error(found[name], want) < 0.01, name


def test_memory_modes_schedules_and_forms_keep_the_bits():
    expected = run(**OSS)
    for more in ({"save": "redispatch"}, {"save": "recompute"}, {"schedule": "fusion=none"}, {"capacity": (4096, 64)}):
        found = run(**OSS, **more)
        assert all(same_bits(found[name], expected[name]) for name in NAMES), more
    w1, w2, b1, b2 = parameters()
    halves = [[half.contiguous().requires_grad_() for half in one.chunk(2)] for one in w1]
    lists = [[one.clone().requires_grad_() for one in whole] for whole in (w2, b1, b2)]
    found = call([[(gate, up) for gate, up in halves], *lists], **OSS)
    gradients = [torch.stack([torch.cat([gate.grad, up.grad]) for gate, up in halves])]
    gradients += [torch.stack([one.grad for one in own]) for own in lists]
    found |= dict(zip(NAMES[3:], gradients, strict=True))
    assert all(same_bits(found[name], expected[name]) for name in NAMES)


def test_zero_biases_change_no_bit():
    first, second, *biases = parameters()
    results = []
    for own in ([None, None], [torch.zeros_like(one) for one in biases]):
        w1, w2 = first.clone().requires_grad_(), second.clone().requires_grad_()
        results.append(call([w1, w2, *own], **OSS) | {"dw1": w1.grad, "dw2": w2.grad})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])  # but for the sign of zeros


def test_some_frozen():
    expected = run(**OSS)
    for trained in ((0,), (2,), (3,), (1, 2), (0, 1), (2, 3)):
        weights = [one.requires_grad_(which in trained) for which, one in enumerate(parameters())]
        found = call(weights, **OSS)
        assert same_bits(found["dx"], expected["dx"])
        for which, weight in enumerate(weights):
            assert weight.grad is None if which not in trained else same_bits(weight.grad, expected[NAMES[3 + which]])


def test_main_grad_and_fp32():
    rounded = run(**OSS)
    sums = [torch.zeros(one.shape) for one in parameters()]
    call([one.requires_grad_() for one in parameters()], main_grad=tuple(sums), **OSS)
    for name, once in zip(NAMES[3:], sums, strict=True):
        assert same_bits(once.bfloat16(), rounded[name]), name
    weights = [torch.nn.Parameter(one) for one in parameters()]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    for _ in range(2):
        call(weights, main_grad="param", **OSS)
    for weight, once in zip(weights, sums, strict=True):
        assert same_bits(weight.main_grad, once + once) and weight.grad_added_to_main_grad
    with pytest.raises(
        ValueError, match=r"main_grad: 2 entries; legal are None, 'param' and \(of w1, of w2, of b1, of b2\)"
    ):
        call([one.requires_grad_() for one in parameters()], main_grad=tuple(sums[:2]), **OSS)
    if hasattr(torch.Tensor, "grad_dtype"):
        weights = [torch.nn.Parameter(one) for one in parameters()]
        for weight in weights:
            weight.grad_dtype = torch.float32
        call(weights, grad_dtype=torch.float32, **OSS)
        assert all(same_bits(weight.grad, once) for weight, once in zip(weights, sums, strict=True))


def test_compiled_graphs_have_the_bits():
    layer, group = batch(), uniep.Group("self")

    def layer_of(x, probs, w1, w2, b1, b2):
        return uniep.moe(x, layer.ids[0], probs, w1, w2, b1=b1, b2=b2, group=group, **OSS)

    expected = run(**OSS)
    inputs = [one.requires_grad_() for one in (layer.x[0], layer.probs[0], *parameters())]
    y = torch.compile(layer_of, fullgraph=True, backend="aot_eager")(*inputs)
    y.backward(layer.dy[0])
    found = dict(zip(NAMES, (y.detach(), *(one.grad for one in inputs)), strict=True))
    assert all(same_bits(found[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize("given", ["param", "tensors"])
@pytest.mark.parametrize("save", ["keep", "recompute"])
@pytest.mark.parametrize("trained", [(0, 1, 2, 3), (0, 3), (2,)], ids=str)
def test_main_grad_in_compiled_graphs_has_the_bits(given, save, trained):
    """Two calls each, so that the second adds to what the first left."""
    torch._dynamo.reset()  # a limit of compilations counts those of all cases
    layer, group = batch(), uniep.Group("self")
    results = []
    for compiling in (False, True):
        weights = [torch.nn.Parameter(one, which in trained) for which, one in enumerate(parameters())]
        sums = [torch.ones(weight.shape) for weight in weights]
        for weight, one in zip(weights, sums, strict=True):
            weight.main_grad = one

        def layer_of(x, probs, weights=weights, sums=sums):
            w1, w2, b1, b2 = weights
            added = "param" if given == "param" else tuple(sums)
            options = {"main_grad": added, "save": save, "group": group, **OSS}
            return uniep.moe(x, layer.ids[0], probs, w1, w2, b1=b1, b2=b2, **options)

        run_once = torch.compile(layer_of, fullgraph=True, backend="aot_eager") if compiling else layer_of
        for _ in range(2):
            x, probs = (one.detach().requires_grad_() for one in (layer.x[0], layer.probs[0]))
            y = run_once(x, probs)
            y.backward(layer.dy[0])
        for which, weight in enumerate(weights):
            marked = given == "param" and which in trained
            assert getattr(weight, "grad_added_to_main_grad", False) == marked
            assert weight.grad is None if not marked else not weight.grad.any()
            assert (sums[which] != 1).any() == (which in trained)
        results.append([y.detach(), x.grad, probs.grad, *sums])
    for eager, compiled in zip(*results, strict=True):
        assert same_bits(eager, compiled)


def test_a_bias_whose_main_grad_is_fetched_breaks_the_graph():
    layer, group = batch(), uniep.Group("self")
    w1, w2, b1, b2 = weights = [torch.nn.Parameter(one) for one in parameters()]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    b2.get_main_grad = lambda: b2.main_grad

    def layer_of(x):
        return uniep.moe(
            x * 1, layer.ids[0], layer.probs[0], w1, w2, b1=b1, b2=b2, main_grad="param", group=group, **OSS
        )

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer_of, fullgraph=True, backend="aot_eager")(layer.x[0])
    torch.compile(layer_of, backend="aot_eager")(layer.x[0]).backward(layer.dy[0])
    expected = run(**OSS)
    for name, weight in zip(NAMES[3:], weights, strict=True):
        assert same_bits(weight.main_grad.bfloat16(), expected[name]), name


def test_module():
    layer = batch()
    experts = uniep.Experts(
        num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, group=uniep.Group("self"), bias=True, **OSS
    )
    assert not experts.gate_up_bias.any() and experts.gate_up_bias.shape == (EXPERTS, 2 * INTERMEDIATE)
    assert not experts.down_bias.any() and experts.down_bias.shape == (EXPERTS, HIDDEN)
    experts(layer.x[0], layer.ids[0], layer.probs[0]).backward(layer.dy[0])
    assert experts.gate_up_bias.grad.any() and experts.down_bias.grad.any()
    assert (
        uniep.Experts(
            num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, group=uniep.Group("self")
        ).down_bias
        is None
    )


def test_what_is_wrong_is_named():
    w1, w2, b1, b2 = parameters()

    def expect(text: str, *given: typing.Any, **options: typing.Any) -> None:
        with pytest.raises(ValueError, match=f"^{text}"):
            call([w1.requires_grad_(), w2, *given], **options)

    expect("b2: None beside b1; give both or none", b1, None)
    expect("b1: None beside b2; give both or none", None, b2)
    expect(r"b1: shape \[4, 24\]; must be \[4, 48\]", b1[:, :24].contiguous(), b2)
    expect(r"b2: shape \[24\]; must be \[32\]", b1, [one[:24] for one in b2])
    expect("b2: 3 tensors; must be 4, one for each expert", b1, list(b2[:3]))
    expect("b1: torch.float32; must be torch.bfloat16", b1.float(), b2)
    expect(r"b2: strides \(64, 2\); must be contiguous", b1, torch.cat([b2, b2], 1)[:, ::2])
    expect(
        "illegal schedule: bias=1: not with router_weight=input; legal with activation", b1, b2, router_weight="input"
    )
