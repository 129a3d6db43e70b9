"""Gradients of weights that are added to fp32 memory of the caller."""

import types

import pytest
import torch
import torch._dynamo

import uniep
import uniep.layer
from layers import make_layer, same_bits


def exact(layer):
    """The fp32 gradients, by adding to zeros."""
    zeros = torch.zeros(layer.w1.shape), torch.zeros(layer.w2.shape)
    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], w1, w2, main_grad=zeros)
    y.backward(layer.dy[0])
    assert w1.grad is None and w2.grad is None
    return zeros


def test_tensors():
    layer = make_layer([64])
    expected = exact(layer)
    bf16 = [torch.nn.Parameter(weight) for weight in layer.local(0, 1)]
    uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *bf16).backward(layer.dy[0])
    for sums, weight in zip(expected, bf16, strict=True):
        assert same_bits(sums.bfloat16(), weight.grad)
    start = torch.randn(layer.w1.shape), torch.randn(layer.w2.shape)
    sums = start[0].clone(), start[1].clone()
    uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *bf16, main_grad=sums).backward(layer.dy[0])
    for before, after, added in zip(start, sums, expected, strict=True):
        assert same_bits(after, before + added)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("getter", [True, False])
def test_param(stacked, getter):
    layer = make_layer([64])
    expected = exact(layer)
    weights = [torch.nn.Parameter(w) for w in layer.local(0, 1)] if stacked else [
        torch.nn.Parameter(one.clone()) for w in layer.local(0, 1) for one in w]  # fmt: skip
    hooks, sums = [], []
    for weight in weights:
        total = torch.zeros(weight.shape)
        sums.append(total)
        if getter:
            weight.get_main_grad = lambda total=total: total
        else:
            weight.main_grad = total
        weight.register_post_accumulate_grad_hook(lambda weight: hooks.append(weight.grad_added_to_main_grad))
    half = len(weights) // 2
    w1, w2 = (weights[0], weights[1]) if stacked else (weights[:half], weights[half:])
    for _ in range(2):
        y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], w1, w2, main_grad="param")
        y.backward(layer.dy[0])
    assert hooks == [True] * 2 * len(weights)
    assert all(not weight.grad.any() for weight in weights)
    both = (sums[0], sums[1]) if stacked else (torch.stack(sums[:half]), torch.stack(sums[half:]))
    for total, once in zip(both, expected, strict=True):
        assert same_bits(total, once + once)


def test_memory_of_megatron_fsdp():
    """overwrite_main_grad: what main_grad holds is no sum of earlier micro-batches, but where its buffer is not
    sharded. Before its gradients go to other ranks a layer may be called again."""
    layer = make_layer([64])
    expected = exact(layer)
    for sharded in (True, False):
        weights = [torch.nn.Parameter(w) for w in layer.local(0, 1)]
        for weight in weights:
            weight.main_grad = torch.full(weight.shape, torch.nan if sharded else 0.0)
            weight.overwrite_main_grad = True
            weight._gbuf = types.SimpleNamespace(is_data_distributed=sharded)
        for _ in range(2):
            for weight in weights:
                weight.grad_added_to_main_grad = False  # as Megatron-FSDP does behind each reduction
            y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *weights, main_grad="param")
            y.backward(layer.dy[0])
        for weight, once in zip(weights, expected, strict=True):
            assert same_bits(weight.main_grad, once if sharded else once + once)
        uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *weights, main_grad="param").backward(layer.dy[0])
        for weight, once in zip(weights, expected, strict=True):
            assert same_bits(weight.main_grad, once + once if sharded else once + once + once)


def test_gate_and_up_apart():
    layer = make_layer([64])
    expected = exact(layer)
    gate, up = (torch.nn.Parameter(half.contiguous()) for half in layer.w1.chunk(2, 1))
    w2 = torch.nn.Parameter(layer.w2.clone())
    sums = (torch.zeros(gate.shape), torch.zeros(up.shape)), torch.zeros(w2.shape)
    uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], (gate, up), w2, main_grad=sums).backward(layer.dy[0])
    assert same_bits(torch.cat(sums[0], 1), expected[0])
    assert same_bits(sums[1], expected[1])
    for weight in (gate, up, w2):
        weight.main_grad = torch.zeros(weight.shape)
    uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], (gate, up), w2, main_grad="param").backward(layer.dy[0])
    assert same_bits(torch.cat([gate.main_grad, up.main_grad], 1), expected[0])
    with pytest.raises(ValueError, match="main_grad: 1 tensors for w1; must be 2"):
        uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], (gate, up), w2, main_grad=(sums[1], sums[1]))


def test_zero_gradients_take_the_memory_of_one_weight():
    layer = make_layer([8], experts=4)
    weights = [torch.nn.Parameter(one.clone()) for one in layer.w1]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], weights, list(layer.w2), main_grad="param")
    y.backward(layer.dy[0])
    assert len({weight.grad.untyped_storage().data_ptr() for weight in weights}) == 1


def test_zero_gradients_stay_zero_where_autograd_added_to_one():
    layer = make_layer([8])
    weights = [torch.nn.Parameter(one) for one in layer.local(0, 1)]
    others = [torch.nn.Parameter(one) for one in layer.local(0, 1)]
    for weight in (*weights, *others):
        weight.main_grad = torch.zeros(weight.shape)
    uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *weights, main_grad="param").backward(layer.dy[0])
    weights[0].float().square().sum().backward()
    assert weights[0].grad.any()
    for _ in range(2):
        uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *others, main_grad="param").backward(layer.dy[0])
        assert not any(weight.grad.any() for weight in others)


def test_zero_gradients_of_two_streams_are_apart(monkeypatch):
    """On the second one the first one's may not be zero yet. Here no GPU has streams: torch is told to say so."""
    streams = iter([1, 1, 2])
    monkeypatch.setattr(uniep.layer, "_zeros", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: next(streams), raising=False)
    monkeypatch.setattr(torch, "zeros_like", lambda weight, **_: torch.zeros(weight.shape))
    weight = types.SimpleNamespace(shape=(2, 3), dtype=torch.bfloat16, device=torch.device("cuda", 0))
    first, second, other = (uniep.layer._zeros_of(weight) for _ in range(3))
    assert first is second and other is not first


@pytest.mark.parametrize("param", [True, False])
def test_gradients_of_other_tensors_add_nothing(param):
    layer = make_layer([64])
    expected = exact(layer)
    x = layer.x[0].clone().requires_grad_()
    w1, w2 = (torch.nn.Parameter(one) for one in layer.local(0, 1))
    sums = [torch.zeros(one.shape) for one in (w1, w2)]
    w1.main_grad, w2.main_grad = sums
    y = uniep.moe(x, layer.ids[0], layer.probs[0], w1, w2, main_grad="param" if param else tuple(sums))
    (dx,) = torch.autograd.grad(y, x, layer.dy[0], retain_graph=True)
    assert not sums[0].any() and not sums[1].any() and not hasattr(w1, "grad_added_to_main_grad")
    torch.autograd.grad(y, (x, w2), layer.dy[0], retain_graph=True, allow_unused=True)
    assert not sums[0].any() and same_bits(sums[1], expected[1])
    sums[1].zero_()
    y.backward(layer.dy[0])
    assert all(same_bits(one, other) for one, other in zip(sums, expected, strict=True)) and same_bits(x.grad, dx)


def test_one_frozen_weight():
    layer = make_layer([64])
    expected = exact(layer)
    w2 = layer.w2.clone().requires_grad_()
    w2.main_grad = torch.zeros(w2.shape)
    uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], layer.w1, w2, main_grad="param").backward(layer.dy[0])
    assert same_bits(w2.main_grad, expected[1])


def test_one_memory_for_two_experts_is_an_error():
    layer = make_layer([8])
    w2 = list(layer.w2)
    shared, *others = (torch.nn.Parameter(one.clone()) for one in layer.w1)
    for weight in (shared, *others):
        weight.main_grad = torch.zeros(weight.shape)
    y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], [shared, shared, *others[1:]], w2, main_grad="param")
    message = "main_grad: the same memory for two experts of w1; must be different for each expert"
    with pytest.raises(ValueError, match=message):
        y.backward(layer.dy[0])
    sums = [one.main_grad for one in (shared, *others)], [torch.zeros(w2[0].shape)] * 8
    with pytest.raises(ValueError, match=message.replace("w1", "w2")):
        uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], [shared, *others], w2, main_grad=sums)


def test_param_where_autocast_copies_the_weights():
    """Parameters have main_grad, and copies have not; tensors serve both."""
    layer = make_layer([64])
    expected = exact(layer)
    weights = [torch.nn.Parameter(one.float()) for one in layer.local(0, 1)]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)

    def call(main_grad):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *weights, main_grad=main_grad)

    message = r"w1: torch.float32, and autocast makes copies.*give main_grad=\(w1.main_grad, w2.main_grad\)"
    with pytest.raises(ValueError, match=message):
        call("param")
    call(tuple(weight.main_grad for weight in weights)).backward(layer.dy[0])
    assert all(same_bits(weight.main_grad, one) for weight, one in zip(weights, expected, strict=True))


def test_param_without_gradients_needs_no_main_grad():
    layer = make_layer([64])
    weights = [torch.nn.Parameter(one) for one in layer.local(0, 1)]
    given = layer.x[0], layer.ids[0], layer.probs[0], *weights

    def call(*tensors):
        return uniep.moe(*tensors, main_grad="param")

    torch._dynamo.reset()
    with torch.no_grad():
        for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            assert same_bits(run(*given), uniep.moe(*given))


def test_errors():
    layer = make_layer([8])
    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    zeros = torch.zeros(layer.w1.shape), torch.zeros(layer.w2.shape)

    def call(main_grad):
        return uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], w1, w2, main_grad=main_grad)

    with pytest.raises(ValueError, match="main_grad: 'params'; legal are None, 'param'"):
        call("params")
    with pytest.raises(ValueError, match="main_grad: torch.bfloat16 for w1; must be torch.float32"):
        call((zeros[0].bfloat16(), zeros[1]))
    with pytest.raises(ValueError, match=r"main_grad: shape \[8, 64, 64\].* for w2; must be \[8, 64, 32\]"):
        call((zeros[0], zeros[0]))
    with pytest.raises(ValueError, match="w1: main_grad='param', but a weight has no main_grad"):
        call("param").backward(layer.dy[0])
