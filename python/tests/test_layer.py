"""uniep.moe() in one process: bits, gradients, edges, memory."""

import copy
import gc
import json
import pathlib
import pickle
import struct
import subprocess
import weakref

import numpy
import pytest
import torch
import torch.utils._python_dispatch
from torch.utils.checkpoint import checkpoint

import uniep
import uniep.call
import uniep.engine
from layers import (
    Layer,
    assert_same,
    dense_gradient,
    make_dense,
    make_layer,
    random_layer,
    reference,
    relative_error,
    run_moe,
    same_bits,
)


def write_safetensors(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        kind = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path: pathlib.Path) -> dict[str, torch.Tensor]:
    raw = path.read_bytes()
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    found = {}
    for name, entry in json.loads(raw[8:begin]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        kind = {"BF16": torch.bfloat16, "F32": torch.float32}[entry["dtype"]]
        data = torch.frombuffer(bytearray(raw[begin + first : begin + last]), dtype=torch.uint8)
        found[name] = data.view(kind).view(entry["shape"])
    return found


@pytest.mark.parametrize("ranks", [1, 4])
def test_bits_of_the_command_line(command, scratch, ranks):
    """The C++ engine with 1 and 4 ranks gives the bits of moe() with one."""
    layer = make_layer([37, 0, 64, 5], experts=8, topk=3, unused=0.1)
    one = layer.joined()
    given = {"x": one.x[0], "dy": one.dy[0], "probs": one.probs[0], "w1": one.w1, "w2": one.w2}
    write_safetensors(scratch / "in.safetensors", given)
    numpy.save(scratch / "ids.npy", one.ids[0].numpy())
    counts = "37,0,64,5" if ranks == 4 else "106"
    sizes = f"--ranks {ranks} --tokens {counts} --hidden 64 --intermediate 32 --experts 8 --topk 3 --engine cpu"
    files = ["--tensors", "in.safetensors", "--routing", "ids.npy", "--out", "out.safetensors", "--backward"]
    subprocess.run([command, "run", *sizes.split(), *files], cwd=scratch, check=True, capture_output=True)
    expected = read_safetensors(scratch / "out.safetensors")
    for name, got in run_moe(one, 0, (one.w1, one.w2)).items():
        assert same_bits(got, expected[name]), name


@pytest.mark.parametrize("seed", range(40))
def test_no_option_changes_a_bit(seed):
    layer = random_layer(seed, 1)
    weights = layer.local(0, 1)
    expected = run_moe(layer, 0, weights)
    schedules = ["fusion=none", "fusion=pairs,comm.where=sms", ("fusion=layer", "backward.wgrad=after")]
    for save in ("keep", "redispatch", "rows", "recompute"):
        assert_same(run_moe(layer, 0, weights, save=save, schedule=schedules[seed % 3]), expected)
    assert_same(run_moe(layer, 0, weights, capacity=(4096, 64)), expected)


def test_gradients_against_float64():
    layer = make_layer([256], hidden=128, intermediate=64, experts=8, topk=3)
    expected = reference(layer)
    for name, got in run_moe(layer, 0, layer.local(0, 1)).items():
        assert relative_error(got, getattr(expected, name)) < 8e-3, name


@pytest.mark.parametrize("name", ["x", "probs", "w1", "w2"])
def test_gradients_against_finite_differences(name):
    """Along a random direction: the loss's own differences have bf16's noise, so steps are large."""
    layer = make_layer([128], hidden=64, intermediate=64, experts=4, topk=2)
    tensors = {"x": layer.x[0], "probs": layer.probs[0], "w1": layer.w1, "w2": layer.w2}
    weight = layer.dy[0].double()

    def loss(values):
        y = uniep.moe(values["x"], layer.ids[0], values["probs"], values["w1"], values["w2"])
        return (y.double() * weight).sum()

    leaves = {key: value.clone().requires_grad_() for key, value in tensors.items()}
    loss(leaves).backward()
    gradient = leaves[name].grad.double()
    direction = gradient / gradient.norm() * tensors[name].double().norm() * 0.05
    ahead = {**tensors, name: (tensors[name].double() + direction).to(tensors[name].dtype)}
    behind = {**tensors, name: (tensors[name].double() - direction).to(tensors[name].dtype)}
    with torch.no_grad():
        difference = (loss(ahead) - loss(behind)).item() / 2
    assert difference == pytest.approx((gradient * direction).sum().item(), rel=0.05)


def test_leading_sizes_and_strides():
    layer = make_layer([24])
    weights = layer.local(0, 1)
    expected = run_moe(layer, 0, weights)
    cubes = Layer([layer.x[0].view(4, 6, -1)], [layer.ids[0].view(4, 6, -1)], [layer.probs[0].view(4, 6, -1)],
                  [layer.dy[0].view(4, 6, -1)], layer.w1, layer.w2)  # fmt: skip
    got = run_moe(cubes, 0, weights)
    assert got.y.shape == (4, 6, 64)
    assert_same(type(got)(got.y.view(24, -1), got.dx.view(24, -1), got.dprobs.view(24, -1), got.dw1, got.dw2), expected)
    x = torch.stack([layer.x[0], layer.x[0]], 2)[:, :, 0]
    assert not x.is_contiguous()
    assert same_bits(uniep.moe(x, layer.ids[0], layer.probs[0], *weights), expected.y)


def test_one_tensor_an_expert():
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    w1, w2 = ([one.clone().requires_grad_() for one in weight] for weight in layer.local(0, 1))
    y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], w1, w2)
    y.backward(layer.dy[0])
    assert same_bits(y.detach(), expected.y)
    assert same_bits(torch.stack([one.grad for one in w1]), expected.dw1)
    assert same_bits(torch.stack([one.grad for one in w2]), expected.dw2)


def gate_and_up(w1, form):
    """w1 [El, 2 I, H] with gate and up apart: what moe() takes, and the gates and ups in it."""
    gate, up = (half.contiguous() for half in w1.chunk(2, 1))
    if form == "tensors":
        leaves = [gate.requires_grad_()], [up.requires_grad_()]
        return (leaves[0][0], leaves[1][0]), *leaves
    gates, ups = ([one.clone().requires_grad_() for one in half] for half in (gate, up))
    return ((gates, ups) if form == "lists" else list(zip(gates, ups, strict=True))), gates, ups


@pytest.mark.parametrize("form", ["tensors", "lists", "pairs"])
@pytest.mark.parametrize("seed", range(8))
def test_gate_and_up_apart(form, seed):
    layer = random_layer(seed, 1)
    expected = run_moe(layer, 0, layer.local(0, 1))
    for save in ("keep", "redispatch", "rows", "recompute"):
        w1, gates, ups = gate_and_up(layer.w1, form)
        x, probs = layer.x[0].clone().requires_grad_(), layer.probs[0].clone().requires_grad_()
        w2 = layer.w2.clone().requires_grad_()
        y = uniep.moe(x, layer.ids[0], probs, w1, w2, save=save)
        y.backward(layer.dy[0])
        stack = torch.cat if form == "tensors" else torch.stack
        dw1 = torch.cat([stack([one.grad for one in half]) for half in (gates, ups)], 1)
        assert_same(type(expected)(y.detach(), x.grad, probs.grad, dw1, w2.grad), expected)


def test_gate_and_up_apart_frozen_and_cast():
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    w1, (gate,), (up,) = gate_and_up(layer.w1, "tensors")
    uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], w1, layer.w2).backward(layer.dy[0])
    assert same_bits(torch.cat([gate.grad, up.grad], 1), expected.dw1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = [(one.detach().float(), other.detach().float()) for one, other in zip(gate, up, strict=True)]
        assert same_bits(uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], wide, layer.w2), expected.y)


@pytest.mark.parametrize("seed", range(12))
def test_dense_routing(seed):
    layer, (dense,) = make_dense(random_layer(seed, 1))
    expected = run_moe(layer, 0, layer.local(0, 1))
    topk = layer.ids[0].shape[1]
    for save in ("keep", "redispatch", "rows", "recompute"):
        x, probs = layer.x[0].clone().requires_grad_(), dense.probs.clone().requires_grad_()
        w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
        y = uniep.moe(x, dense.routing_map, probs, w1, w2, topk=topk, save=save)
        y.backward(layer.dy[0])
        assert same_bits(probs.grad, dense_gradient(layer.ids[0], expected.dprobs, layer.experts))
        assert_same(type(expected)(y.detach(), x.grad, expected.dprobs, w1.grad, w2.grad), expected)


@pytest.mark.parametrize("frozen", [("w1",), ("w2",), ("w1", "w2"), ("x",), ("probs",), ("x", "probs")])
def test_frozen_tensors_have_no_gradient(frozen):
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    for save in ("keep", "redispatch", "rows", "recompute"):
        given = {"x": layer.x[0], "probs": layer.probs[0], "w1": layer.w1, "w2": layer.w2}
        leaves = {name: value.clone().requires_grad_(name not in frozen) for name, value in given.items()}
        y = uniep.moe(leaves["x"], layer.ids[0], leaves["probs"], leaves["w1"], leaves["w2"], save=save)
        y.backward(layer.dy[0])
        for name, leaf in leaves.items():
            if name in frozen:
                assert leaf.grad is None
            else:
                assert same_bits(leaf.grad, getattr(expected, f"d{name}")), name


def test_no_grad():
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1)).y
    with torch.no_grad():
        y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], layer.w1.clone().requires_grad_(), layer.w2)
    assert not y.requires_grad
    assert same_bits(y, expected)


@pytest.mark.parametrize("save", ["keep", "redispatch", "rows", "recompute"])
@pytest.mark.parametrize("case", ["no tokens", "no routed slot", "one expert gets all", "K = E"])
def test_edges(case, save):
    layer = {
        "no tokens": lambda: make_layer([0]),
        "no routed slot": lambda: make_layer([9], unused=1.0),
        "one expert gets all": lambda: make_layer([300], experts=1, topk=1),
        "K = E": lambda: make_layer([33], experts=4, topk=4),
    }[case]()
    got, expected = run_moe(layer, 0, layer.local(0, 1), save=save), reference(layer)
    for name, value in got.items():
        assert relative_error(value, getattr(expected, name)) < 8e-3, name


def test_int64_ids():
    narrow, wide = make_layer([40]), make_layer([40], dtype=torch.int64)
    assert wide.ids[0].dtype == torch.int64
    assert_same(run_moe(wide, 0, wide.local(0, 1)), run_moe(narrow, 0, narrow.local(0, 1)))


def test_autocast_casts_x_and_weights():
    layer = make_layer([40])
    w1, w2 = (weight.float().requires_grad_() for weight in layer.local(0, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = uniep.moe(layer.x[0].float(), layer.ids[0], layer.probs[0], w1, w2)
    y.backward(layer.dy[0])
    expected = run_moe(layer, 0, layer.local(0, 1))
    assert same_bits(y.detach(), expected.y)
    assert same_bits(w1.grad, expected.dw1.float())


def test_retained_graph_and_interleaved_micro_batches():
    layers = [make_layer([40], seed=seed) for seed in (1, 2)]
    expected = [run_moe(layer, 0, layer.local(0, 1)) for layer in layers]
    outputs, leaves = [], []
    for layer in layers:
        w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
        outputs.append(uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], w1, w2))
        leaves.append((w1, w2))
    for index in (0, 1):
        dw1, dw2 = torch.autograd.grad(outputs[index], leaves[index], layers[index].dy[0], retain_graph=True)
        again = torch.autograd.grad(outputs[index], leaves[index], layers[index].dy[0])
        for first, second, name in ((dw1, again[0], "dw1"), (dw2, again[1], "dw2")):
            assert same_bits(first, second)
            assert same_bits(first, getattr(expected[index], name))


@pytest.mark.parametrize("save", ["keep", "recompute"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(save, reentrant):
    layer = make_layer([40], unused=0.1)
    expected = run_moe(layer, 0, layer.local(0, 1))
    x, probs = layer.x[0].clone().requires_grad_(), layer.probs[0].clone().requires_grad_()
    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    y = checkpoint(uniep.moe, x, layer.ids[0], probs, w1, w2, save=save, use_reentrant=False) if not reentrant else (
        checkpoint(lambda *args: uniep.moe(*args, save=save), x, layer.ids[0], probs, w1, w2, use_reentrant=True)
    )  # fmt: skip
    y.backward(layer.dy[0])
    assert_same(type(expected)(y.detach(), x.grad, probs.grad, w1.grad, w2.grad), expected)


@pytest.mark.parametrize("save", ["keep", "redispatch", "rows", "recompute"])
def test_saved_tensor_hooks(save):
    """Saved state is a tensor like others: copies of it, at another address, serve backward as well."""
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    with torch.autograd.graph.save_on_cpu():
        assert_same(run_moe(layer, 0, layer.local(0, 1), save=save), expected)
    packed = []

    def pack(tensor):
        packed.append(tensor.numel() * tensor.element_size())
        return tensor.to("cpu", copy=True).numpy(force=True) if tensor.dtype == torch.uint8 else tensor.clone()

    def unpack(value):
        if isinstance(value, torch.Tensor):
            return value
        moved = torch.empty(value.size + 8, dtype=torch.uint8)[8:]  # not aligned
        return moved.copy_(torch.from_numpy(value))

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert_same(run_moe(layer, 0, layer.local(0, 1), save=save), expected)
    assert packed


def test_uninitialized_memory_may_hold_anything():
    layer = random_layer(3, 1)
    expected = run_moe(layer, 0, layer.local(0, 1))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert_same(run_moe(layer, 0, layer.local(0, 1)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_double_backward_is_an_error():
    layer = make_layer([8])
    x = layer.x[0].requires_grad_()
    y = uniep.moe(x, layer.ids[0], layer.probs[0], layer.w1, layer.w2)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="higher derivatives are not there"):
        dx.sum().backward()


def test_double_backward_of_a_plain_sum_is_an_error():
    """dy then needs no gradient, so that nothing of torch's asks."""
    layer = make_layer([8])
    x, w1 = layer.x[0].requires_grad_(), layer.w1.clone().requires_grad_()
    y = uniep.moe(x, layer.ids[0], layer.probs[0], w1, layer.w2)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="higher derivatives are not there"):
        dx.float().square().sum().backward()
    uniep.moe(x, layer.ids[0], layer.probs[0], w1, layer.w2).sum().backward(create_graph=True)
    assert x.grad.abs().sum() > 0 and w1.grad.abs().sum() > 0


def test_a_placement_goes_with_its_backward():
    layer = make_layer([8])
    x = layer.x[0].requires_grad_()
    y = uniep.moe(x, layer.ids[0], layer.probs[0], layer.w1, layer.w2)
    route = weakref.ref(y.grad_fn.ticket.held)
    y.sum().backward(retain_graph=True)
    assert route() is not None
    y.sum().backward()
    assert route() is None
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_a_backward_that_failed_can_be_run_again(monkeypatch):
    layer = make_layer([8])
    expected = run_moe(layer, 0, layer.local(0, 1))
    x = layer.x[0].clone().requires_grad_()
    y = uniep.moe(x, layer.ids[0], layer.probs[0], layer.w1, layer.w2)
    with monkeypatch.context() as patch, pytest.raises(uniep.CapacityError, match="this once"):
        patch.setattr(uniep.engine.Engine, "backward", failing)
        y.backward(layer.dy[0])
    y.backward(layer.dy[0])
    assert same_bits(x.grad, expected.dx)


def failing(*_arguments, **_options):
    raise uniep.CapacityError("this once")


def test_weight_gradients_that_nobody_asks_for_are_not_made(monkeypatch):
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    x, (w1, w2) = layer.x[0].clone().requires_grad_(), (one.requires_grad_() for one in layer.local(0, 1))
    made, run = [], uniep.call.Call.run_backward

    def noted(self, route, saved, x, dy, weights, dw1, dw2, *more, **options):
        made.append((dw1 is not None, dw2 is not None))
        return run(self, route, saved, x, dy, weights, dw1, dw2, *more, **options)

    monkeypatch.setattr(uniep.call.Call, "run_backward", noted)
    y = uniep.moe(x, layer.ids[0], layer.probs[0], w1, w2)
    wanted = {"x": x, "w2": w2, "w1": w1}
    for names in (("x",), ("x", "w2"), ("w1",), ("w1", "w2")):
        leaves = [wanted[name] for name in names]
        for name, got in zip(names, torch.autograd.grad(y, leaves, layer.dy[0], retain_graph=True), strict=True):
            assert same_bits(got, getattr(expected, f"d{name}"))
    y.backward(layer.dy[0])
    assert made == [(False, False), (False, True), (True, False), (True, True), (True, True)]
    assert_same(type(expected)(y.detach(), x.grad, expected.dprobs, w1.grad, w2.grad), expected)


class _Tensors(torch.utils._python_dispatch.TorchDispatchMode):
    """Storages of the uint8 tensors that are made, which are those that the library works in."""

    def __init__(self):
        super().__init__()
        self.made = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.uint8:
            self.made.add(out)
        return out

    def bytes(self):
        return sum(tensor.numel() for tensor in self.made)


def test_saved_state_goes_with_its_backward():
    """What forward keeps goes behind backward, though the graph is still there; a workspace behind its call."""
    layer = make_layer([64])
    x = layer.x[0].requires_grad_()
    rows = 8 * 128
    saved = rows * 2 * (2 * 32) + rows * 2 * 64
    for options, kept in [({}, saved), ({"save": "redispatch"}, rows * 2 * (2 * 32)), ({"save": "recompute"}, 0)]:
        with _Tensors() as tensors:
            y = uniep.moe(x, layer.ids[0], layer.probs[0], layer.w1, layer.w2, **options)
            assert tensors.bytes() == kept
            y.sum().backward()
            assert tensors.bytes() == 0
            y = uniep.moe(x, layer.ids[0], layer.probs[0], layer.w1, layer.w2, **options)
            del y
            assert tensors.bytes() == 0
            with torch.no_grad():
                uniep.moe(x, layer.ids[0], layer.probs[0], layer.w1, layer.w2, **options)
            assert len(tensors.made) == 0


@pytest.mark.parametrize("checkpointed", [True, False])
def test_copies_of_weights_go_with_what_autograd_saves(checkpointed):
    layer = make_layer([16])
    master = [weight.float().requires_grad_() for weight in layer.local(0, 1)]
    copies = []

    def run(x):
        cast = [weight.bfloat16() for weight in master]
        copies.extend(map(weakref.ref, cast))
        return uniep.moe(x, layer.ids[0], layer.probs[0], *cast)

    x = layer.x[0].clone().requires_grad_()
    uniep.record_stats()
    y = checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
    assert sum(one() is not None for one in copies) == (0 if checkpointed else 2)
    y.backward(layer.dy[0])
    assert all(one() is None for one in copies) and len(copies) == (4 if checkpointed else 2)
    uniep.record_stats(False)


def test_a_thousand_steps_leak_nothing():
    import resource

    layer = make_layer([16], hidden=8, intermediate=8)
    weights = layer.local(0, 1)
    for step in range(1000):
        run_moe(layer, 0, weights)
        if step == 200:
            peak, held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, uniep.Group().memory()
    assert uniep.Group().memory() == held
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4096  # KiB


def test_group():
    group = uniep.Group()
    assert uniep.Group() is group
    assert (
        copy.deepcopy(torch.nn.ModuleList([uniep.Experts(num_experts=4, hidden=8, intermediate=8, group=group)]))[
            0
        ].group
        is group
    )
    assert (group.transport, group.size, group.rank) == ("native", 1, 0)
    with pytest.raises(TypeError, match="can not be pickled"):
        pickle.dumps(group)
    with uniep.Group(workers=2) as other:
        assert other is not group
        assert other.engine.workers == 2
        layer = make_layer([40])
        assert_same(run_moe(layer, 0, layer.local(0, 1), group=other), run_moe(layer, 0, layer.local(0, 1)))
        experts = layer.w1.clone().requires_grad_()
        y = uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], experts, layer.w2, group=other)
    assert "closed" in repr(other)
    with pytest.raises(ValueError, match="group: closed"):
        y.sum().backward()
    assert uniep.Group(workers=2) is not other
    uniep.Group(workers=2).close()
    dead = weakref.ref(other)
    del other, y
    gc.collect()
    assert dead() is None


def test_modules_on_meta_are_drawn_later():
    """As FSDP2 and torchtitan make models: on meta, then on their device."""
    torch.manual_seed(5)
    expected = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, bias=True)
    with torch.device("meta"):
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, bias=True)
    assert all(one.is_meta for one in layer.parameters())
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.router.reset_parameters()
    layer.experts.reset_parameters()
    for own, other in zip(layer.parameters(), expected.parameters(), strict=True):
        assert same_bits(own, other)


def test_a_router_that_somebody_put_in_runs():
    layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2)
    x = torch.randn(16, 64).bfloat16()
    before = layer(x)
    plain, seen = layer.router, []
    hook = plain.register_forward_hook(lambda module, given, logits: seen.append(logits))
    assert same_bits(layer(x), before) and seen[0].shape == (16, 8)
    hook.remove()
    layer.router = torch.nn.Linear(64, 8, bias=True)
    layer.router.weight = plain.weight
    torch.nn.init.constant_(layer.router.bias, 0.0)
    assert same_bits(layer(x), before)
    with torch.no_grad():
        layer.router.bias[:2] = 100.0
    y = layer(x)
    assert not same_bits(y, before)
    y.float().square().sum().backward()
    assert layer.router.bias.grad.abs().sum() > 0
