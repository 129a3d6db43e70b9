"""What reaches the library lies where GPUs take it, at multiples of 16 bytes, however a caller's tensors lie."""

import pytest
import torch

import uniep
import uniep.addresses
from layers import Result, assert_same, make_layer, run_moe, same_bits
from uniep.engine import Engine


def moved(tensor):
    """A contiguous copy at another place than GPUs take."""
    memory = tensor.new_empty(tensor.numel() + 3)
    copy = memory[3:].view(tensor.shape).copy_(tensor)
    assert copy.is_contiguous() and copy.data_ptr() % 16 != 0
    return copy


@pytest.fixture
def seen(monkeypatch):
    """Names of the engine's calls; each has rows and weights in their places."""
    names = []

    def watch(name):
        run = getattr(Engine, name)

        def watched(self, *arguments, **options):
            names.append(name)
            for one in arguments:
                if isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16:
                    assert one.data_ptr() % 16 == 0, name
                if isinstance(one, uniep.addresses.Weights):
                    assert all(whole is None or whole % 16 == 0 for whole in (one.w1[0], one.w2[0])), name
            return run(self, *arguments, **options)

        monkeypatch.setattr(Engine, name, watched)

    for name in ("forward", "backward", "dispatch", "combine"):
        watch(name)
    return names


@pytest.mark.parametrize("save", ["keep", "recompute"])
def test_x_and_a_gradient_that_is_a_view(seen, save):
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    x, probs = moved(layer.x[0]).requires_grad_(), layer.probs[0].clone().requires_grad_()
    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    y = uniep.moe(x, layer.ids[0], probs, w1, w2, save=save)
    # backward of cat() gives views into one gradient
    torch.cat([layer.dy[0].new_zeros(3), y.flatten()]).backward(
        torch.cat([layer.dy[0].new_ones(3), layer.dy[0].flatten()])
    )
    assert_same(Result(y.detach(), x.grad, probs.grad, w1.grad, w2.grad), expected)
    assert seen[-2:] == ["forward", "backward"]


@pytest.mark.parametrize("save", ["keep", "recompute"])
def test_copies_that_hooks_have_made(seen, save):
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))

    def unpack(tensor):
        return moved(tensor) if tensor.dtype == torch.bfloat16 else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
        assert_same(run_moe(layer, 0, layer.local(0, 1), save=save), expected)
    assert seen[-2:] == ["forward", "backward"]


def test_the_exchange(seen):
    layer = make_layer([40])
    results = []
    for place in (torch.clone, moved):
        x = place(layer.x[0]).requires_grad_()
        plan = uniep.place(layer.ids[0], layer.probs[0], layer.experts, 64)
        rows, _ = uniep.dispatch(x, plan)
        given = place(rows.detach()).requires_grad_()
        y = uniep.combine(given, plan)
        y.backward(place(layer.dy[0]))
        rows.backward(place(given.grad))
        results.append((rows.detach(), y.detach(), given.grad, x.grad))
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))
    assert seen == ["dispatch", "combine", "dispatch", "combine"] * 2
