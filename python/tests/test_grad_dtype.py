"""Gradients of weights in fp32, in leaves whose grad_dtype is fp32."""

import copy

import pytest
import torch

import uniep
from layers import make_layer, reference, relative_error, run_moe, same_bits

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10 has no grad_dtype")


def leaf(weight):
    made = torch.nn.Parameter(weight.clone())
    made.grad_dtype = torch.float32
    return made


def call(layer, w1, w2, **options):
    return uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], w1, w2, grad_dtype=torch.float32, **options)


def added(layer):
    """The same gradients, by adding to zeros."""
    zeros = torch.zeros(layer.w1.shape), torch.zeros(layer.w2.shape)
    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], w1, w2, main_grad=zeros).backward(layer.dy[0])
    return zeros


@pytest.mark.parametrize("save", ["keep", "redispatch", "rows", "recompute"])
def test_bf16_is_their_rounding(save):
    layer = make_layer([300])
    w1, w2 = leaf(layer.w1), leaf(layer.w2)
    y = call(layer, w1, w2, save=save)
    y.backward(layer.dy[0])
    rounded = run_moe(layer, 0, layer.local(0, 1))
    assert same_bits(y.detach(), rounded.y)
    exact = reference(layer)
    for weight, once, bf16, true in zip(
        (w1, w2), added(layer), (rounded.dw1, rounded.dw2), (exact.dw1, exact.dw2), strict=True
    ):
        assert weight.grad.dtype == torch.float32
        assert same_bits(weight.grad, once)
        assert same_bits(weight.grad.bfloat16(), bf16)
        assert relative_error(weight.grad, true) < relative_error(bf16, true) < 0.01
    call(layer, w1, w2, save=save).backward(layer.dy[0])
    for weight, once in zip((w1, w2), added(layer), strict=True):
        assert same_bits(weight.grad, once + once)  # summed in fp32


def test_lists_and_gate_and_up_apart():
    layer = make_layer([64])
    expected = added(layer)
    w1, w2 = [leaf(one) for one in layer.w1], [leaf(one) for one in layer.w2]
    call(layer, w1, w2).backward(layer.dy[0])
    for weights, once in zip((w1, w2), expected, strict=True):
        assert same_bits(torch.stack([weight.grad for weight in weights]), once)
    gate, up = (leaf(half.contiguous()) for half in layer.w1.chunk(2, 1))
    call(layer, (gate, up), layer.w2).backward(layer.dy[0])
    assert same_bits(torch.cat([gate.grad, up.grad], 1), expected[0])


def test_one_frozen_weight_and_no_grad():
    layer = make_layer([64])
    w2 = leaf(layer.w2)
    call(layer, layer.w1, w2).backward(layer.dy[0])
    assert same_bits(w2.grad, added(layer)[1])
    with torch.no_grad():
        call(layer, layer.w1.clone().requires_grad_(), layer.w2)


def test_module():
    torch.manual_seed(3)
    layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, grad_dtype=torch.float32)
    torch.manual_seed(3)
    plain = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2)
    x = torch.randn(40, 64).bfloat16()
    for each in (layer, plain):
        each(x).float().square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        fp32, bf16 = getattr(layer.experts, name).grad, getattr(plain.experts, name).grad
        assert (fp32.dtype, bf16.dtype) == (torch.float32, torch.bfloat16)
        assert same_bits(fp32.bfloat16(), bf16)


def test_module_whose_parameters_are_others():
    x = torch.randn(40, 64).bfloat16()
    layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, grad_dtype=torch.float32)
    state = {name: one.clone() for name, one in layer.state_dict().items()}
    compiled = copy.deepcopy(layer)
    compiled.compile(backend="aot_eager")
    assigned = copy.deepcopy(layer)
    assigned.load_state_dict(state, assign=True)
    for each in (layer, copy.deepcopy(layer), assigned, compiled):
        each(x).float().square().sum().backward()
        for own, other in zip(each.parameters(), layer.parameters(), strict=True):
            assert own.grad.dtype == torch.float32 and same_bits(own.grad, other.grad)


def test_adamw_steps_fp32_copies():
    """As docs/pytorch_reference.md has it; it can not step the parameters themselves."""
    layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, grad_dtype=torch.float32)
    parameters, x = list(layer.experts.parameters()), torch.randn(40, 64).bfloat16()
    layer(x).float().square().sum().backward()
    with pytest.raises(RuntimeError, match=r"BFloat16"):
        torch.optim.AdamW(parameters).step()
    masters = copy.deepcopy(layer.experts).float()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
    pairs = list(zip(masters.parameters(), parameters, strict=True))
    for _ in range(2):
        before, gradients = [one.detach().clone() for one, _ in pairs], [one.grad for one in parameters]
        for master, one in pairs:
            master.grad, one.grad = one.grad, None
        assert all(one.grad is gradient for (one, _), gradient in zip(pairs, gradients, strict=True))
        assert all(
            one.dtype == gradient.dtype == torch.float32 for (one, _), gradient in zip(pairs, gradients, strict=True)
        )
        optimizer.step()
        with torch.no_grad():
            for master, one in pairs:
                one.copy_(master)
        assert all((one - old).abs().max() > 0.05 for (one, _), old in zip(pairs, before, strict=True))
        layer(x).float().square().sum().backward()


def test_it_is_between_two_graphs():
    layer = make_layer([40])
    w1, w2 = leaf(layer.w1), leaf(layer.w2)

    def block(x):
        return uniep.moe(x * 1, layer.ids[0], layer.probs[0], w1, w2, grad_dtype=torch.float32) * 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(block, fullgraph=True, backend="aot_eager")(layer.x[0])
    torch.compile(block, backend="aot_eager")(layer.x[0]).backward(layer.dy[0])
    for weight, once in zip((w1, w2), added(layer), strict=True):
        assert same_bits(weight.grad, once)


def test_errors():
    layer = make_layer([8])
    plain, made = layer.w1.clone().requires_grad_(), leaf(layer.w1)
    with pytest.raises(ValueError, match=r"grad_dtype: torch.float16; legal are torch.bfloat16 and torch.float32"):
        uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], made, layer.w2, grad_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"w1: autograd would round .*since its grad_dtype is torch.bfloat16"):
        call(layer, plain, layer.w2)
    with pytest.raises(ValueError, match=r"w2: autograd would round .*since it is no leaf"):
        call(layer, made, layer.w2.clone().requires_grad_() * 1)
    with pytest.raises(ValueError, match=r"grad_dtype: torch.float32 beside main_grad"):
        call(layer, made, layer.w2, main_grad="param")


def test_older_torch(monkeypatch):
    layer = make_layer([8])
    w1, w2 = leaf(layer.w1), leaf(layer.w2)
    monkeypatch.setattr("uniep.layer.HAS_GRAD_DTYPE", False)
    with pytest.raises(uniep.Unsupported, match=r"grad_dtype: torch.float32 needs PyTorch 2.10"):
        call(layer, w1, w2)
