"""place(), dispatch() and combine() in one process, and modules."""

import pytest
import torch

import uniep
from layers import dense_gradient, make_dense, make_layer, same_bits


def own_gemms(x, plan, w1, w2):
    """The layer with torch's products on dispatched rows."""
    rows, row_probs = uniep.dispatch(x, plan)
    parts, begin = [], 0
    for expert, end in enumerate(plan.offsets.tolist()):
        gate, up = (rows[begin:end] @ w1[expert].T).chunk(2, -1)
        weighted = torch.nn.functional.silu(gate.float()) * up.float() * row_probs[begin:end, None]
        parts.append(weighted.bfloat16() @ w2[expert].T)
        begin = end
    return uniep.combine(torch.cat(parts), plan)


def test_own_gemms_against_moe():
    layer = make_layer([300], unused=0.1)
    results = []
    for own in (False, True):
        x, probs = layer.x[0].clone().requires_grad_(), layer.probs[0].clone().requires_grad_()
        w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
        if own:
            plan = uniep.place(layer.ids[0], probs, layer.experts, x.shape[1])
            y = own_gemms(x, plan, w1, w2)
        else:
            y = uniep.moe(x, layer.ids[0], probs, w1, w2)
        y.backward(layer.dy[0])
        results.append([y.detach(), x.grad, probs.grad, w1.grad, w2.grad])
    for expected, got in zip(*results, strict=True):
        assert (got.double() - expected.double()).norm() < 0.01 * expected.double().norm()


def test_rows():
    layer = make_layer([300], experts=4, topk=3, unused=0.3)
    ids = layer.ids[0].view(3, 100, 3)
    plan = uniep.place(ids, layer.probs[0].view(3, 100, 3), 4, 64)
    rows, row_probs = uniep.dispatch(layer.x[0].view(3, 100, 64), plan)
    assert rows.shape == (plan.rows, 64)
    begin = 0
    for expert, end in enumerate(plan.offsets.tolist()):
        token, slot = (layer.ids[0] == expert).nonzero(as_tuple=True)
        count = len(token)
        assert plan.counts[expert] == count
        assert same_bits(rows[begin : begin + count], layer.x[0][token])
        assert same_bits(row_probs[begin : begin + count], layer.probs[0][token, slot])
        assert not rows[begin + count : end].any()
        assert not row_probs[begin + count : end].any()
        begin = end
    assert begin == plan.rows
    assert uniep.combine(rows, plan).shape == (3, 100, 64)


@pytest.mark.parametrize("tokens", [0, 40])
def test_dense_routing(tokens):
    layer, (dense,) = make_dense(make_layer([tokens], experts=6, topk=3, unused=0.2))
    results = []
    for ids, given, topk in ((layer.ids[0], layer.probs[0], None), (dense.routing_map, dense.probs, 3)):
        x, probs = layer.x[0].clone().requires_grad_(), given.clone().requires_grad_()
        plan = uniep.place(ids, probs, 6, 64, topk=topk)
        rows, row_probs = uniep.dispatch(x, plan)
        y = uniep.combine((rows.float() * row_probs[:, None]).bfloat16(), plan)
        y.backward(layer.dy[0])
        results.append((rows.detach(), row_probs.detach(), y.detach(), x.grad, probs.grad))
    (*expected, dprobs), (*got, dense_dprobs) = results
    for one, other in zip(got, expected, strict=True):
        assert same_bits(one, other)
    assert same_bits(dense_dprobs, dense_gradient(layer.ids[0], dprobs, 6))


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_gradients_are_each_others_forward(tokens):
    layer = make_layer([tokens], unused=0.2)
    x, probs = layer.x[0].requires_grad_(), layer.probs[0].requires_grad_()
    plan = uniep.place(layer.ids[0], probs, 8, 64)
    rows, row_probs = uniep.dispatch(x, plan)
    drows, drow_probs = torch.randn_like(rows), torch.randn_like(row_probs)
    dx, dprobs = torch.autograd.grad((rows, row_probs), (x, probs), (drows, drow_probs))
    assert same_bits(dx, uniep.combine(drows, plan))
    assert dprobs.sum() == pytest.approx(drow_probs[row_probs != 0].sum().item(), rel=1e-4, abs=1e-4)
    leaf = rows.detach().requires_grad_()
    (got,) = torch.autograd.grad(uniep.combine(leaf, plan), leaf, layer.dy[0])
    assert same_bits(got, uniep.dispatch(layer.dy[0], plan)[0])


def test_counts_are_on_the_host_whatever_torchs_default_device_is():
    layer = make_layer([40])
    expected = uniep.place(layer.ids[0], layer.probs[0], 8, 64).counts
    with torch.device("meta"):
        plan = uniep.place(layer.ids[0], layer.probs[0], 8, 64, group=uniep.Group())
    assert torch.equal(plan.counts, expected)


def test_errors():
    layer = make_layer([8])
    ids, probs = layer.ids[0], layer.probs[0]
    plan = uniep.place(ids, probs, 8, 64)
    for wrong, message in [
        (lambda: uniep.place(ids, probs, 8, 60), "hidden: 60; must be a multiple of 8"),
        (lambda: uniep.place(ids, probs, 0, 64), "num_experts: 0; must be a multiple of the number of ranks, 1"),
        (lambda: uniep.place(ids, probs, 1, 64), "topk_ids: 2 slots a token; must be 1 to the number of experts, 1"),
        (lambda: uniep.place(ids, probs.half(), 8, 64), "probs: torch.float16; must be torch.float32"),
        (lambda: uniep.dispatch(layer.x[0][:7], plan), r"x: shape \[7, 64\]; must be \[8, 64\]"),
        (lambda: uniep.combine(layer.x[0], plan), r"rows: shape \[8, 64\]; must be"),
        (lambda: uniep.dispatch(layer.x[0].float(), plan), "x: torch.float32; must be torch.bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


def test_modules_train():
    torch.manual_seed(0)
    layer = uniep.MoELayer(hidden=32, intermediate=16, num_experts=4, topk=2)
    assert set(layer.state_dict()) == {"router.weight", "experts.gate_up_proj", "experts.down_proj"}
    assert layer.experts.gate_up_proj.shape == (4, 32, 32)
    assert layer.experts.down_proj.shape == (4, 32, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    x, target = torch.randn(2, 64, 32).bfloat16(), torch.randn(2, 64, 32) * 0.1
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
