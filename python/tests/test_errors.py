"""A wrong argument is a ValueError that names it, its value and what is legal."""

import types

import pytest
import torch

import uniep
import uniep.call as call_module
import uniep.layer as layer_module
from layers import make_layer
from uniep import late_errors
from uniep.engine import Engine

OUT_OF_MEMORY = 6


def call(**changes):
    layer = make_layer([8])
    given = {"x": layer.x[0], "topk_ids": layer.ids[0], "probs": layer.probs[0], "w1": layer.w1, "w2": layer.w2}
    return uniep.moe(**{**given, **changes})


def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


MAP = torch.arange(8)[:, None].expand(8, 8) == 5
MAP = MAP & (torch.arange(8) < 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": tensor(8, 64, dtype=torch.float32)}, r"x: torch.float32; must be torch.bfloat16"),
        ({"x": tensor(9, 64)}, r"topk_ids: shape \[8, 2\]; must be \[9, 'K'\], as x has \[9, 64\]"),
        ({"x": tensor(8, 72)}, r"w1: shape \[8, 64, 64\]; must be \[8, 64, 72\]"),
        ({"topk_ids": tensor(8, 2, dtype=torch.int16)}, r"topk_ids: torch.int16; must be torch.int32 or torch.int64"),
        ({"topk": 3}, r"topk: 3; must be None or that of topk_ids, 2"),
        ({"topk_ids": MAP, "probs": torch.ones(8, 8)}, r"topk: None; of a routing map it must be 1 to .*, 8"),
        ({"topk_ids": MAP, "probs": torch.ones(8, 8), "topk": 9}, r"topk: 9; of a routing map it must be 1 to .*, 8"),
        ({"topk_ids": MAP[:, :7], "probs": torch.ones(8, 7), "topk": 2}, r"routing_map: 7 experts; must be .*, 8"),
        ({"topk_ids": MAP[:7], "topk": 2}, r"routing_map: shape \[7, 8\]; must be \[8, 'E'\]"),
        (
            {"topk_ids": MAP, "probs": torch.ones(8, 8), "topk": 2},
            r"routing_map: rank 0, token 5 has 3 experts; a token has at most topk, 2",
        ),
        (
            {"topk_ids": MAP, "probs": torch.full((8, 8), torch.inf), "topk": 3},
            r"probs: rank 0, token 5, expert 0 is inf; probs must be finite",
        ),
        ({"topk_ids": torch.full((8, 2), 8)}, r"topk_ids: 8 at token 0, slot 0|topk_ids.*8"),
        ({"topk_ids": torch.full((8, 2), 3)}, r"topk_ids.*3|3.*twice"),
        ({"topk_ids": tensor(8, 9, dtype=torch.int32), "probs": torch.ones(8, 9)}, r"topk_ids: 9 slots.*1 to.*8"),
        ({"probs": tensor(8, 2)}, r"probs: torch.bfloat16; must be torch.float32"),
        ({"probs": torch.ones(8, 3)}, r"probs: shape \[8, 3\]; must be that of topk_ids, \[8, 2\]"),
        ({"probs": torch.full((8, 2), torch.nan)}, r"prob"),
        ({"w1": tensor(8, 64, 64).transpose(1, 2)}, r"w1: strides .*; must be contiguous"),
        ({"w1": tensor(8, 64)}, r"w1: shape \[8, 64\]; must have 3 dimensions"),
        ({"w1": []}, r"w1: must be a tensor with 3 dimensions, or a list"),
        ({"w1": (tensor(8, 64, 64), tensor(8, 64, 64))}, r"w1: shape \[8, 64, 64\]; must be \[8, 32, 64\]"),
        ({"w1": (tensor(8, 32, 64), tensor(8, 24, 64))}, r"w1, up: shape \[8, 24, 64\]; must be \[8, 32, 64\]"),
        ({"w1": ([tensor(32, 64)] * 8, [tensor(32, 64)] * 7)}, r"w1: 8 tensors of gates and 7 of ups; must be alike"),
        ({"w1": [(tensor(32, 64), 1)] * 8}, r"w1, up: must be a tensor with 3 dimensions, or a list"),
        ({"w2": [tensor(64, 32)] * 7}, r"w2: 7 tensors; must be 8, one for each expert, as in w1"),
        ({"w2": tensor(8, 64, 32, dtype=torch.float16)}, r"w2: torch.float16; must be torch.bfloat16"),
        ({"w1": tensor(8, 24, 64), "w2": tensor(8, 64, 12)}, r"intermediate: 12; must be a multiple of 8"),
        ({"schedule": "fusion=some"}, r"fusion"),
        ({"schedule": ("auto", "auto", "auto")}, r"schedule: .*; legal is a text, or two"),
        ({"schedule": None}, r"schedule: None; legal is a text, or two"),
        ({"schedule": ("auto", ["auto"])}, r"schedule: .*; legal is a text, or two"),
        ({"save": "all"}, r"save: 'all'; legal are keep, redispatch, rows, recompute"),
        ({"save": ["keep"]}, r"save: \['keep'\]; legal are keep, redispatch, rows, recompute"),
        ({"capacity": (0, 8)}, r"capacity: \(0, 8\); must be \(rows or a factor, tokens\), both above 0"),
        ({"capacity": 1.0}, r"capacity: 1.0; must be \(rows or a factor, tokens\)"),
        ({"capacity": (True, 8)}, r"capacity: \(True, 8\); must be \(rows or a factor, tokens\)"),
        ({"capacity": (1e30, 8)}, r"capacity: \(1e\+30, 8\); must be .* below 2\^31"),
        ({"capacity": (4096, 1 << 40)}, r"capacity: .*; must be .* below 2\^31"),
        ({"w1": None}, r"w1: None; must be a tensor, or a list"),
        ({"w2": 3}, r"w2: must be a tensor with 3 dimensions, or a list"),
        ({"topk": "2"}, r"topk: '2'; must be None or that of topk_ids, 2"),
        ({"group": "self"}, r"group: 'self'; must be a uniep.Group or None"),
        ({"main_grad": True}, r"main_grad: True; legal are None, 'param' and \(of w1, of w2\)"),
        ({"main_grad": (1, 2)}, r"main_grad: 1.*; must be a tensor, or a list"),
    ],
)
def test_arguments_of_moe(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_overflow():
    with pytest.raises(uniep.CapacityError, match="128"):
        call(capacity=(128, 8))
    with pytest.raises(uniep.CapacityError, match="tokens: 8 on rank 0; the capacity allows 7"):
        call(capacity=(4096, 7))


def test_arguments_of_group():
    for arguments, message in [
        ({"pg": 3}, "pg: 3; legal are a process group, 'self' and None"),
        ({"pg": types.SimpleNamespace(get_group=None)}, r"a process group \(get_group\(\) of a mesh\), 'self' and"),
        ({"transport": "nccl"}, "transport: 'nccl'; legal are auto, native, torch"),
        ({"transport": "torch"}, "transport: 'torch' needs torch.distributed"),
        ({"device": "meta"}, "device: meta; legal are cpu and cuda"),
        ({"workers": -1}, "workers: -1; must be 0"),
        ({"workers": 1.5}, "workers: 1.5; must be 0"),
        ({"workers": "a"}, "workers: 'a'; must be 0"),
        ({"timeout_s": 0}, "timeout_s: 0; must be above 0"),
        ({"timeout_s": "5"}, "timeout_s: '5'; must be above 0"),
        ({"timeout_s": [5]}, r"timeout_s: \[5\]; must be above 0"),
        ({"reserve_sms": [1]}, r"reserve_sms: \[1\]; legal are 'auto' and numbers"),
        ({"arrival_timeout_s": -1}, "arrival_timeout_s: -1; must be above 0, or None"),
    ]:
        with pytest.raises(ValueError, match=message):
            uniep.Group(**arguments)


def test_arguments_of_modules():
    with pytest.raises(ValueError, match="topk: 5; must be 1 to num_experts, 4"):
        uniep.MoELayer(hidden=8, intermediate=8, num_experts=4, topk=5)
    with pytest.raises(
        ValueError,
        match="options: sav; legal are activation, capacity, grad_dtype, main_grad, router_weight, save, schedule",
    ):
        uniep.Experts(num_experts=4, hidden=8, intermediate=8, sav="keep")
    for name, wrong in (
        ("save", "none"),
        ("schedule", "fusion=some"),
        ("schedule", None),
        ("capacity", (0, 8)),
        ("activation", "swigl"),
        ("router_weight", "x"),
        ("main_grad", "x"),
        ("grad_dtype", torch.float16),
    ):
        with pytest.raises(ValueError, match=f"{name}: "):  # not in the first call, which may be hours away
            uniep.Experts(num_experts=4, hidden=8, intermediate=8, **{name: wrong})
    for name in ("hidden", "intermediate"):
        with pytest.raises(ValueError, match=f"{name}: 12; must be a multiple of 8, 8 or more"):
            uniep.MoELayer(**{"hidden": 8, "intermediate": 8, "num_experts": 4, "topk": 2} | {name: 12})


def test_sizes_of_modules_are_given_by_name():
    """Experts and MoELayer would take the same whole numbers in another order."""
    sizes = {"num_experts": 8, "hidden": 64, "intermediate": 32}
    with pytest.raises(TypeError, match="'num_experts', 'hidden', and 'intermediate'"):
        uniep.Experts(8, 64, 32)
    with pytest.raises(TypeError, match="'hidden', 'intermediate', 'num_experts', and 'topk'"):
        uniep.MoELayer(64, 32, 8, 2)
    with pytest.raises(TypeError, match="num_experts, hidden, intermediate: 1 given by their places"):
        uniep.Experts(8, **sizes)
    with pytest.raises(TypeError, match="hidden, intermediate, num_experts, topk: 2 given by their places"):
        uniep.MoELayer(64, 32, **sizes, topk=2)


def test_probs_that_fsdp2_has_cast_are_named():
    layer = make_layer([8])
    with pytest.raises(ValueError, match=r"probs: torch.bfloat16; must be torch.float32; FSDP2 .*cast_forward_inputs"):
        uniep.moe(layer.x[0], layer.ids[0], layer.probs[0].bfloat16(), layer.w1, layer.w2)


@pytest.mark.parametrize("name", ["x", "topk_ids", "probs", "w1", "w2", "b2"])
def test_distributed_tensors_are_named(name):
    class DTensor(torch.Tensor):  # as far as moe() looks
        def to_local(self):
            return self

    layer = make_layer([8])
    given = {"x": layer.x[0], "topk_ids": layer.ids[0], "probs": layer.probs[0], "w1": layer.w1, "w2": layer.w2}
    given |= {"b1": tensor(8, 64), "b2": tensor(8, 64)}
    given[name] = given[name].as_subclass(DTensor)
    with pytest.raises(ValueError, match=f"{name}: DTensor; must be an ordinary tensor, such as to_local"):
        uniep.moe(**given)


def test_an_error_leaves_the_group_usable():
    expected = call()
    with pytest.raises(ValueError):
        call(probs=torch.full((8, 2), torch.inf))
    assert torch.equal(call(), expected)


def steps():
    """y and all gradients."""
    layer = make_layer([8])
    x, probs = layer.x[0].clone().requires_grad_(), layer.probs[0].clone().requires_grad_()
    weights = [weight.requires_grad_() for weight in layer.local(0, 1)]
    y = uniep.moe(x, layer.ids[0], probs, *weights)
    return y.detach(), *torch.autograd.grad(y, (x, probs, *weights), layer.dy[0])


class _Noted:
    """The library, and what its forwards and backwards ended with."""

    def __init__(self, library):
        self.library, self.ends = library, []

    def __getattr__(self, name):
        function = getattr(self.library, name)
        if name not in ("uniep_forward", "uniep_backward"):
            return function

        def noted(*arguments):
            status = function(*arguments)
            self.ends.append((name, status))
            return status

        return noted


@pytest.mark.parametrize(
    ("owner", "name", "skip", "function"),
    [
        (call_module, "rows_of", 2, "uniep_forward"),  # behind those of ids and probs
        (torch, "empty_like", 0, "uniep_forward"),
        (Engine, "_bytes", 0, "uniep_forward"),
        (layer_module, "_gradients", 0, "uniep_backward"),
        (layer_module, "_gradients", 1, "uniep_backward"),
        (Engine, "probs_gradient", 0, "uniep_backward"),
        (torch, "empty_like", 3, "uniep_backward"),  # behind those of y, dw1 and dw2
        (Engine, "_bytes", 2, "uniep_backward"),
    ],
)
def test_other_ranks_are_told_of_memory_that_is_missing(monkeypatch, owner, name, skip, function):
    """By a call without room, which fails. Here one rank says that it is one of two."""
    expected = steps()
    engine, original, calls = uniep.Group().engine, getattr(owner, name), []
    noted = _Noted(engine._library)
    monkeypatch.setattr(engine, "_library", noted)
    monkeypatch.setattr(engine, "ranks", 2)

    def no_room(*arguments, **named):
        calls.append(name)
        if len(calls) > skip:
            raise torch.OutOfMemoryError("none left")
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, no_room)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        steps()
    assert noted.ends[-1] == (function, OUT_OF_MEMORY)
    monkeypatch.undo()
    assert all(torch.equal(one, other) for one, other in zip(steps(), expected, strict=True))


def test_memory_that_torch_has_not_is_torchs_error(monkeypatch):
    """The library's allocations are torch's, so is their error."""

    def no_room(engine, count):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(Engine, "_bytes", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        call()
    monkeypatch.undo()
    call()


class Several:
    """Stands for a Group whose last call has failed, which its next call would tell."""

    transport = "native"

    def __init__(self, size, raises=True):
        self.size, self.raises, self.waits = size, raises, 0
        self.engine = types.SimpleNamespace(has_ended=False)

    def synchronize(self):
        self.waits += 1
        if self.raises:
            raise TimeoutError("rank 1 did not come")


def weight_and_optimizer():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_no_optimizer_steps_with_what_a_failed_call_left():
    weight, optimizer = weight_and_optimizer()
    group = Several(2)
    late_errors.note_call(group, None)
    with pytest.raises(TimeoutError, match="rank 1 did not come"):
        optimizer.step()
    assert group.waits == 1 and torch.equal(weight, torch.ones(2))
    optimizer.step()  # of a step without a call
    assert group.waits == 1 and torch.equal(weight, torch.zeros(2))


def test_no_optimizer_waits_for_calls_that_return_with_their_errors():
    by_torch, one_rank = Several(2), Several(1)
    by_torch.transport = "torch"
    ended = Several(2)
    ended.engine.has_ended = True
    for group in (by_torch, one_rank, ended):
        late_errors.note_call(group, None)
    weight, optimizer = weight_and_optimizer()
    optimizer.step()
    assert (by_torch.waits, one_rank.waits, ended.waits) == (0, 0, 0) and torch.equal(weight, torch.zeros(2))
    late_errors.note_call(one_rank, (128, 8))
    with pytest.raises(TimeoutError):
        optimizer.step()


def test_optimizers_inside_of_backward_do_not_wait():
    weight, optimizer = weight_and_optimizer()
    group = Several(2)
    late_errors.note_call(group, None)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    weight.sum().backward()
    assert group.waits == 0 and torch.equal(weight, -torch.ones(2))
    with pytest.raises(TimeoutError):
        optimizer.step()


@pytest.mark.parametrize("kind", ["moe", "exchange"])
def test_calls_are_known_to_the_optimizer(kind, monkeypatch):
    _, optimizer = weight_and_optimizer()
    with uniep.Group("self", workers=3) as group:
        waits = []
        monkeypatch.setattr(group, "synchronize", lambda: waits.append(kind))
        layer = make_layer([8])
        if kind == "moe":
            call(group=group, capacity=(2048, 8))
        else:
            uniep.place(layer.ids[0], layer.probs[0], num_experts=8, hidden=64, group=group, capacity=(2048, 8))
        optimizer.step()
    assert waits == [kind]


def test_a_backward_behind_an_optimizers_step_is_known_to_the_next(monkeypatch):
    """As of two losses, whose optimizers take turns."""
    _, optimizer = weight_and_optimizer()
    with uniep.Group("self", workers=3) as group:
        waits = []
        monkeypatch.setattr(group, "synchronize", lambda: waits.append(len(waits)))
        layer = make_layer([8])
        x = layer.x[0].clone().requires_grad_()
        y = call(group=group, capacity=(2048, 8), x=x)
        optimizer.step()
        assert waits == [0]
        y.sum().backward()
        optimizer.step()
        assert waits == [0, 1]
        optimizer.step()
        assert waits == [0, 1]
