"""moe(): the layer as an autograd.Function, and inside of compiled graphs as custom ops (ops.py)."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Sequence

import torch

from uniep import capture, ops, schedules
from uniep.call import Call, shaped
from uniep.derivatives import differentiable_once
from uniep.errors import Unsupported
from uniep.group import Group, find_group
from uniep.numerics import is_gated, read_numerics
from uniep.ordinary import check_ordinary, waited_for
from uniep.shares import all_experts
from uniep.tuning import choose, tuned_sizes

Tensors = torch.Tensor | Sequence[torch.Tensor]
Capacity = tuple[int | float, int]
GateAndUp = Tensors | tuple[Tensors, Tensors] | Sequence[tuple[torch.Tensor, torch.Tensor]]
MainGrad = typing.Literal["param"] | tuple[GateAndUp, Tensors] | tuple[GateAndUp, Tensors, Tensors, Tensors]

_ROW_ALIGNMENT = 128
HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # from PyTorch 2.10 on
_NAMES = ("w1", "w2", "b1", "b2")

_Function = typing.TypeVar("_Function", bound=typing.Callable[..., typing.Any])


def outside_of_graphs(function: _Function) -> _Function:
    """A function that torch.compile leaves alone: it runs between two compiled graphs."""
    return typing.cast(_Function, torch._disable_dynamo(function))  # type: ignore[attr-defined]


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    probs: torch.Tensor,
    w1: GateAndUp,
    w2: Tensors,
    *,
    b1: Tensors | None = None,
    b2: Tensors | None = None,
    topk: int | None = None,
    num_experts: int | None = None,
    group: Group | None = None,
    schedule: str | tuple[str, str] = "auto",
    capacity: Capacity | None = None,
    main_grad: MainGrad | None = None,
    grad_dtype: torch.dtype = torch.bfloat16,
    save: str = "keep",
    activation: str = "swiglu",
    router_weight: str = "activation",
) -> torch.Tensor:
    """The experts of a mixture-of-experts layer: y[t] = sum over slots k of w2[e] (silu(gate) * up * probs[t, k]).

    [gate, up] = w1[e] x[t], and e = topk_ids[t, k]. Differentiable in x, probs, weights and biases. Forward and
    backward are collective: all ranks of the group call, also those without tokens, and either all or none of them run
    backward.

    Args:
        x: [..., H] bf16; H is a multiple of 8. T, the product of the leading sizes, may differ by rank and be 0.
        topk_ids: [..., K] int32 or int64, global experts; -1 is an unused slot. No expert twice in a token. Or a
            routing map [..., E] of bool, with at most `topk` experts a token: its slots are these, ascending.
        probs: [..., K] fp32, finite; with a map [..., E], read where the map is True, and with a gradient of zero
            elsewhere.
        w1: [El, 2 I, H] bf16, gate rows before up rows, of this rank's El = E / W experts; or El tensors [2 I, H]. Or
            gate and up apart: (gate, up) of [El, I, H] each, (gates, ups) of El tensors [I, H] each, or a list of El
            pairs (gate, up). Changes no bit.
        w2: [El, H, I] bf16, or El tensors [H, I]. I is a multiple of 8.
        b1, b2: biases, both or none: [El, 2 I], gate before up (without a gate [El, I]), and [El, H], bf16; or El
            tensors [2 I] (or [I]) and [H]. Gate and up of b1 lie in one always. Not with router_weight="input".
        topk: K of a routing map, equal on all ranks; not needed with ids.
        num_experts: E of all ranks, to check El against; moe() itself takes it from El and the group.
        group: None is Group(device=x.device): all ranks of the job, which have El experts each.
        schedule: text as in docs/schedule.md, or two, for forward and for backward. Changes no bit.
        capacity: (padded rows of a rank, tokens of a rank), at most and equal on all ranks; more is CapacityError. A
            float in the place of the rows is a factor of tokens K, the rows of a rank under even routing; padding of
            experts comes on top of it.
        main_grad: where gradients of weights are added, in fp32: two entries shaped as w1 and w2, or four as w1, w2, b1
            and b2 (their gradients become None), or "param": `weight.main_grad`, or `weight.get_main_grad()`, of each
            weight. Then `weight.grad_added_to_main_grad` becomes True and the gradient that autograd sees is zero, so
            that hooks run. None: gradients of grad_dtype.
        grad_dtype: torch.bfloat16, or torch.float32: gradients of weights and biases before that rounding. Autograd
            keeps it only in leaves with `weight.grad_dtype = torch.float32`, which PyTorch has from 2.10 on. Breaks
            compiled graphs, as `weight.get_main_grad` does.
        save: "keep" FC1's output and the dispatched rows for backward; "redispatch": FC1's output and x, which is
            dispatched again for the weight gradients; "rows": the dispatched rows, and FC1 runs again; "recompute": x
            alone, and both again. Changes no bit.
        activation: "swiglu"; "geglu_tanh" or "geglu_erf": gelu(gate) * up; "relu2" or "silu", without a gate: w1 is
            [El, I, H]. Or "swiglu:alpha=1.702,limit=7,up_offset=1": gate * sigmoid(alpha * gate) * (up + up_offset)
            of a gate of at most `limit` and an up between -limit and limit; `gate_limit` and `up_limit` are one each.
        router_weight: what probs multiply: "activation", before w2; "output", the expert's rounded output with b2,
            behind it; "input": x, before w1.

    Returns:
        [..., H] bf16.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and what is legal.
        CapacityError: the routing does not fit. Nothing is dropped. With the native transport of several ranks it may
            come from a later call, and all ranks call group.recover() after it.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and (grad_dtype is not torch.bfloat16 or (main_grad == "param" and _is_fetched(w1, w2, b1, b2))):
        options: dict[str, typing.Any] = {"group": group, "schedule": schedule, "capacity": capacity, "save": save}
        options |= {"num_experts": num_experts}
        options |= {"topk": topk, "grad_dtype": grad_dtype, "activation": activation, "router_weight": router_weight}
        return _moe_outside_of_graphs(x, topk_ids, probs, w1, w2, b1=b1, b2=b2, main_grad=main_grad, **options)
    if (compiling or torch._C._is_any_autocast_enabled()) and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
        w1, w2 = _cast(w1), _cast(w2)
        b1, b2 = None if b1 is None else _cast(b1), None if b2 is None else _cast(b2)
    if not compiling:
        x, topk_ids, probs = waited_for(x), waited_for(topk_ids), waited_for(probs)
    (first, apart), second = _gate_and_up(w1, "w1"), _tensors(w2, "w2")
    _check_tensors(x, topk_ids, probs)
    local, hidden, intermediate = _check_weights(x, first, second, apart, activation)
    third, fourth = _biases(b1, b2, local, hidden, (2 if is_gated(activation) else 1) * intermediate, x)
    is_default = group is None
    if group is None:
        group = default_group(x.device) if compiling else Group(device=x.device)
    if x.device != group.device:
        raise ValueError(f"x: on {x.device}; must be on the group's device, {group.device}")
    experts = all_experts(local, group, num_experts, is_default and not compiling)
    slots = checked_topk(topk_ids, experts, topk)
    _check_frozen(first, "w1")
    _check_frozen(second, "w2")
    if third:
        _check_frozen(third, "b1")
        _check_frozen(fourth, "b2")
    limits = checked_capacity(capacity, slots, local)
    parts = first, second, third, fourth
    if schedule == "auto" and compiling:
        for sizes, pair in _tuned(group.name, activation, router_weight, bool(third)):
            if sizes == (hidden, intermediate, experts, slots):
                schedule = pair
    elif schedule == "auto":
        schedule = choose(group, hidden, intermediate, experts, slots, activation, router_weight, bool(third))
    if compiling:
        texts = schedules.read(schedule if isinstance(schedule, str) else tuple(schedule), save, group.reserved)
        keep = torch.is_grad_enabled() and any(
            t.requires_grad for t in (x, probs, first[0], second[0], *third[:1], *fourth[:1])
        )
        given = save, slots, apart, activation, router_weight
        sums, marks = _main_grad_in_graph(main_grad, parts, apart), main_grad == "param"
        return ops.run_forward(
            x, topk_ids, probs, first, second, third, fourth, sums, group.name, texts, limits, *given, marks, keep
        )
    written = schedules.encoded(schedule if isinstance(schedule, str) else tuple(schedule), save, group.reserved)
    added = None if main_grad is None else _main_grad(main_grad, parts, apart)
    if grad_dtype is not torch.bfloat16:
        _check_grad_dtype(grad_dtype, parts, added is not None)
    shape = hidden, intermediate, experts
    numerics = read_numerics(activation, router_weight, bool(third))
    counts = len(first), len(second), len(third), len(fourth)
    # Saved tensors may come back as others, without what hangs on them.
    more = numerics, parts if added == "param" else (), getattr(second[0], "uniep_layer", "")
    call = Call(group, shape, written, slots, limits, save, apart, counts, added, grad_dtype, *more)
    if not torch.is_grad_enabled():
        return call.run(x, topk_ids, probs, (*first, *second, *third, *fourth), keep=False)[0]
    apply = _apply_moe if not torch._C._are_functorch_transforms_active() else _Moe.apply
    return typing.cast(torch.Tensor, apply(call, x, topk_ids, probs, *first, *second, *third, *fourth))


_moe_outside_of_graphs = outside_of_graphs(moe)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def default_group(device: torch.device) -> Group:
    """Group(device=device), made while a graph is compiled."""
    return Group(device=device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tuned(group: str, *numerics: typing.Any) -> tuple[tuple[tuple[int, ...], tuple[str, str]], ...]:
    """What "auto" stands for, as a graph keeps it: a later autotune() changes no graph."""
    return tuned_sizes(find_group(group), *numerics)


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, call: Call, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, *weights):  # type: ignore[no-untyped-def]
        keep = True in ctx.needs_input_grad
        y, saved, route = call.run(x, ids, probs, weights, keep)
        if keep:
            ctx.call, ctx.probs_shape, ctx.route = call, probs.shape, route
            ctx.save_for_backward(x if call.sends_x else None, saved, *weights)
        return y

    @staticmethod
    def backward(ctx: typing.Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        return _backward_once(ctx, dy) if torch.is_grad_enabled() else _backward(ctx, dy)


def _backward(ctx: typing.Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    call: Call = ctx.call
    x, saved, *weights = ctx.saved_tensors
    route, dy = ctx.route, waited_for(dy)
    if not _keeps_graph():  # as saved tensors go
        ctx.route = None
    need = ctx.needs_input_grad
    parts = call.parts(weights)
    starts = [4 + sum(map(len, parts[:which])) for which in range(4)]
    wanted = [bool(part) and need[start] for part, start in zip(parts, starts, strict=True)]
    if call.main_grad is not None:
        nodes = ctx.next_functions  # of tensors alone, so without that of `call`
        wanted = [
            one and any(_is_run(node) for node, _ in nodes[start - 1 : start - 1 + len(part)])
            for one, start, part in zip(wanted, starts, parts, strict=True)
        ]
    made: list[list[torch.Tensor] | None] = [None] * 4
    lacking = ""
    for which, part in enumerate(parts):
        if wanted[which]:
            made[which], more = call.made(functools.partial(_gradients, call, which, part), list(part))
            lacking = lacking or more
        elif part and wanted[(which + 2) % 4]:  # those of w1 and b1 are made together, and those of w2 and b2
            kind = torch.float32 if call.main_grad is not None else call.grad_dtype
            made[which] = [torch.zeros_like(weight, dtype=kind) for weight in part]
    dx, dprobs = call.run_backward(route, saved, x, dy, weights, *made, lacking=lacking)
    return (
        None,
        dx if need[1] else None,
        None,
        shaped(dprobs, ctx.probs_shape) if need[3] else None,
        *(
            gradient
            for which in range(4)
            for gradient in _returned(call, which, made[which] if wanted[which] else None)
        ),
    )


_backward_once = differentiable_once(_backward)
_keeps_graph: typing.Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)
# What _Moe.apply() calls behind a look at every argument, for transforms of torch.func alone.
_apply_moe: typing.Callable[..., typing.Any] = super(torch.autograd.Function, _Moe).apply


def _is_run(node: typing.Any) -> bool:
    """Whether this backward runs a node: autograd.grad() of other tensors does not, and adds to no main_grad."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that autograd.grad() was given
        return True


def _gradients(call: Call, which: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for the gradients of w1 (0), w2 (1), b1 (2) or b2 (3)."""
    if call.main_grad is None:
        if call.grad_dtype is torch.bfloat16:
            return [torch.empty_like(weight) for weight in weights]
        return [torch.empty_like(weight, dtype=call.grad_dtype) for weight in weights]
    if call.main_grad != "param":
        return call.main_grad[which]
    name = _NAMES[which]
    found = [main_grad_of(parameter, name) for parameter in call.parameters[which]]
    _check_main_grad(found, weights, name)
    return found


def flat(given: GateAndUp) -> list[torch.Tensor]:
    """The tensors of w1 or w2, however they are given."""
    return [given] if _is_tensor(given) else [one for part in given for one in flat(part)]


def _is_fetched(*given: GateAndUp | None) -> bool:
    """Whether a weight's main_grad is known in its backward alone (Megatron-FSDP): no graph can hold it."""
    return any(
        getattr(one, "get_main_grad", None) is not None or getattr(one, "overwrite_main_grad", False)
        for weights in given
        if weights is not None
        for one in flat(weights)
    )


def _main_grad_in_graph(
    given: MainGrad | None, parts: tuple[list[torch.Tensor], ...], apart: bool
) -> list[torch.Tensor]:
    """What the backward of a graph adds to: that of w1, w2, b1 and b2 behind each other; nothing where it adds to
    nothing."""
    if given is None:
        return []
    added = _main_grad(given, parts, apart)
    if added != "param":
        return [one for part in added for one in part]
    found: list[torch.Tensor] = []
    for name, weights in zip(_NAMES, parts, strict=True):
        needed = weights if weights and weights[0].requires_grad else []
        sums = [main_grad_of(weight, name) for weight in needed]
        _check_main_grad(sums, needed, name)
        # A place for each weight; nothing is added to those of frozen ones.
        found += sums or [weight.new_empty(0) for weight in weights]
    return found


def main_grad_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """What the gradient of a parameter is added to with main_grad="param"; ValueError where it has none."""
    getter = getattr(parameter, "get_main_grad", None)
    found = getter() if callable(getter) else getattr(parameter, "main_grad", None)
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{name}: main_grad='param', but a weight has no main_grad; legal is an fp32 tensor there")
    # Megatron-FSDP's memory is not initialized where it goes to other ranks; else it sums micro-batches. Where a layer
    # is called again before its gradients go, it has those of the other call, and says so.
    sharded = getattr(getattr(parameter, "_gbuf", None), "is_data_distributed", True)
    added = getattr(parameter, "grad_added_to_main_grad", False)
    if getattr(parameter, "overwrite_main_grad", False) and sharded and not added:
        found.zero_()
    return found


_zeros: dict[typing.Any, torch.Tensor] = {}


def _returned(call: Call, which: int, gradients: list[torch.Tensor] | None) -> Sequence[torch.Tensor | None]:
    """What autograd gets for w1 (0), w2 (1), b1 (2) or b2 (3)."""
    if gradients is None or (call.main_grad is not None and call.main_grad != "param"):
        return [None] * call.counts[which]
    if call.main_grad is None:
        return gradients
    weights = call.parameters[which]
    for weight in weights:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    zeros = _zeros_of(weights[0])  # they are of one shape
    return [zeros.detach() for _ in weights]


def _zeros_of(weight: torch.Tensor) -> torch.Tensor:
    key = (weight.shape, weight.dtype, weight.device)
    found = _zeros.get(key)
    if found is None or found._version != 0:  # autograd added another gradient to one that it had been given
        found = torch.zeros_like(weight, requires_grad=False)
        if not capture.is_capturing():  # memory of a graph is the graph's, and zero in its replays
            _zeros[key] = found
    return found


def _is_tensor(value: object) -> typing.TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _cast(given: typing.Any) -> typing.Any:
    if _is_tensor(given):
        return given.to(torch.bfloat16)
    cast = [_cast(one) for one in given]
    return tuple(cast) if isinstance(given, tuple) else cast


def _gate_and_up(given: GateAndUp, name: str) -> tuple[list[torch.Tensor], bool]:
    """The tensors of w1, and whether gate and up lie apart: then all gates, and behind them all ups."""
    if _is_tensor(given):
        return _tensors(given, name), False
    parts: list[typing.Any] = list(given)
    if parts and isinstance(given, list) and all(isinstance(one, tuple) and len(one) == 2 for one in parts):
        parts = [[gate for gate, _ in parts], [up for _, up in parts]]
    elif len(parts) != 2 or any(_is_tensor(one) and one.dim() != 3 for one in parts):
        return _tensors(typing.cast(Tensors, given), name), False
    gate, up = _tensors(parts[0], f"{name}, gate"), _tensors(parts[1], f"{name}, up")
    if len(gate) != len(up) or gate[0].dim() != up[0].dim():
        raise ValueError(f"{name}: {len(gate)} tensors of gates and {len(up)} of ups; must be alike")
    return [*gate, *up], True


def _tensors(given: Tensors, name: str) -> list[torch.Tensor]:
    if _is_tensor(given):
        if given.dim() != 3:
            raise ValueError(
                f"{name}: shape {list(given.shape)}; must have 3 dimensions, or be a list of tensors with 2"
            )
        return [given]
    tensors = list(given)
    if not tensors or not all(_is_tensor(one) and one.dim() == 2 for one in tensors):
        raise ValueError(f"{name}: must be a tensor with 3 dimensions, or a list of tensors with 2, one an expert")
    return tensors


def _check_tensors(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> None:
    check_ordinary("x", x)
    check_ordinary(_routing(ids), ids)
    check_ordinary("probs", probs)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: {x.dtype}; must be torch.bfloat16")
    if x.dim() < 1:
        raise ValueError("x: no dimension; must be [..., hidden]")
    sizes, leading = ids.shape, x.shape
    if len(sizes) != len(leading) or (sizes[0] != leading[0] if len(sizes) == 2 else sizes[:-1] != leading[:-1]):
        expected = [*x.shape[:-1], "E" if ids.dtype == torch.bool else "K"]
        raise ValueError(f"{_routing(ids)}: shape {list(ids.shape)}; must be {expected}, as x has {list(x.shape)}")
    check_probs(ids, probs)
    device = x.device
    if ids.device != device or probs.device != device:
        name, tensor = (_routing(ids), ids) if ids.device != device else ("probs", probs)
        raise ValueError(f"{name}: on {tensor.device}; must be where x is, on {device}")


def _routing(ids: torch.Tensor) -> str:
    return "routing_map" if ids.dtype == torch.bool else "topk_ids"


def check_probs(ids: torch.Tensor, probs: torch.Tensor) -> None:
    """Raises ValueError unless ids has a type for ids or for a map, and probs is fp32 in the shape of ids."""
    if ids.dtype not in (torch.int32, torch.int64, torch.bool):
        raise ValueError(f"topk_ids: {ids.dtype}; must be torch.int32 or torch.int64, or torch.bool for a map")
    if probs.dtype != torch.float32:
        hint = "; FSDP2 casts what a wrapped module is given, but for MixedPrecisionPolicy(cast_forward_inputs=False)"
        cast = probs.dtype in (torch.bfloat16, torch.float16)
        raise ValueError(f"probs: {probs.dtype}; must be torch.float32{hint if cast else ''}")
    if probs.shape != ids.shape:
        raise ValueError(f"probs: shape {list(probs.shape)}; must be that of {_routing(ids)}, {list(ids.shape)}")


def checked_topk(ids: torch.Tensor, experts: int, topk: int | None) -> int:
    """K of ids [..., K] or of a map [..., E]; ValueError unless it is 1 to E, and the sizes agree."""
    slots = ids.shape[-1]
    if ids.dtype == torch.bool:
        if slots != experts:
            raise ValueError(f"routing_map: {slots} experts; must be the number of experts, {experts}")
        if topk is None or not 1 <= topk <= experts:
            raise ValueError(f"topk: {topk}; of a routing map it must be 1 to the number of experts, {experts}")
        return topk
    if not 1 <= slots <= experts:
        raise ValueError(f"topk_ids: {slots} slots a token; must be 1 to the number of experts, {experts}")
    if topk is not None and topk != slots:
        raise ValueError(f"topk: {topk}; must be None or that of topk_ids, {slots}")
    return slots


def _check_weights(
    x: torch.Tensor, w1: list[torch.Tensor], w2: list[torch.Tensor], apart: bool, activation: str
) -> tuple[int, int, int]:
    """Local experts, H and I."""
    hidden, intermediate = x.shape[-1], w2[0].shape[-1]
    half = len(w1) // 2 if apart else len(w1)
    local = w1[0].shape[0] if w1[0].dim() == 3 else half
    gated = is_gated(activation)
    if apart and not gated:
        raise ValueError(f"w1: gate and up; activation {activation!r} has no gate, so that w1 is [El, I, H]")
    rows = intermediate if apart or not gated else 2 * intermediate
    _check_weight(w1[:half], "w1", local, (rows, hidden), intermediate, x)
    if apart:
        _check_weight(w1[half:], "w1, up", local, (rows, hidden), intermediate, x)
    _check_weight(w2, "w2", local, (hidden, intermediate), intermediate, x)
    if hidden < 8 or hidden % 8 != 0:
        raise ValueError(f"hidden: {hidden}; must be a multiple of 8, 8 or more")
    if intermediate < 8 or intermediate % 8 != 0:
        raise ValueError(f"intermediate: {intermediate}; must be a multiple of 8, 8 or more")
    if local < 1:
        raise ValueError("w1: no expert; must be one or more on every rank")
    return local, hidden, intermediate


def _check_weight(
    tensors: list[torch.Tensor], name: str, local: int, columns: tuple[int, int], intermediate: int, x: torch.Tensor
) -> None:
    """Each of the tensors is fine, and there are as many as there must be."""
    stacked = tensors[0].dim() == 3
    if not stacked and len(tensors) != local:
        raise ValueError(f"{name}: {len(tensors)} tensors; must be {local}, one for each expert, as in w1")
    expected = (local, *columns) if stacked else columns
    dtype, device = torch.bfloat16, x.device
    check_ordinary(name, *tensors)
    for tensor in tensors:
        if tensor.shape == expected and tensor.dtype is dtype and tensor.is_contiguous() and tensor.device == device:
            continue
        if tensor.shape != expected:
            raise ValueError(
                f"{name}: shape {list(tensor.shape)}; must be {list(expected)}, as x has hidden {x.shape[-1]}, w1 "
                f"{local} experts and w2 intermediate {intermediate}"
            )
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: {tensor.dtype}; must be torch.bfloat16")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}; must be contiguous")
        raise ValueError(f"{name}: on {tensor.device}; must be where x is, on {device}")


def _biases(
    b1: Tensors | None, b2: Tensors | None, local: int, hidden: int, columns: int, x: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of both, no entries where there are none."""
    if b1 is None and b2 is None:
        return [], []
    if b1 is None or b2 is None:
        given, lacking = ("b2", "b1") if b1 is None else ("b1", "b2")
        raise ValueError(f"{lacking}: None beside {given}; give both or none")
    found = []
    for name, bias, width in (("b1", b1, columns), ("b2", b2, hidden)):
        tensors = [bias] if _is_tensor(bias) else list(bias)
        expected = [local, width] if _is_tensor(bias) else [width]
        check_ordinary(name, *tensors)
        if not _is_tensor(bias) and len(tensors) != local:
            raise ValueError(f"{name}: {len(tensors)} tensors; must be {local}, one for each expert, as in w1")
        for tensor in tensors:
            if list(tensor.shape) != expected:
                raise ValueError(f"{name}: shape {list(tensor.shape)}; must be {expected}")
            if tensor.dtype != torch.bfloat16:
                raise ValueError(f"{name}: {tensor.dtype}; must be torch.bfloat16")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: strides {tensor.stride()}; must be contiguous")
            if tensor.device != x.device:
                raise ValueError(f"{name}: on {tensor.device}; must be where x is, on {x.device}")
        found.append(tensors)
    return found[0], found[1]


def _check_frozen(weights: list[torch.Tensor], name: str) -> None:
    need = weights[0].requires_grad
    if len(weights) > 1 and any(weight.requires_grad != need for weight in weights):
        raise ValueError(f"{name}: some experts require a gradient and others do not; must be all or none")


def checked_capacity(capacity: Capacity | None, topk: int, local: int) -> tuple[int, int] | None:
    """The capacity as (rows, tokens) for K slots a token and El experts; ValueError where it is wrong."""
    if capacity is None:
        return None
    values = tuple(capacity)
    wrong = f"capacity: {capacity!r}; must be (rows or a factor, tokens), both above 0, or None"
    if len(values) != 2 or not isinstance(values[1], int) or not isinstance(values[0], (int, float)):
        raise ValueError(wrong)
    rows, tokens = capacity
    if not 0 < rows < float("inf") or tokens <= 0:
        raise ValueError(wrong)
    if isinstance(rows, int):
        return rows, tokens
    routed = math.ceil(rows * tokens * topk)
    return (-(-routed // _ROW_ALIGNMENT) + local) * _ROW_ALIGNMENT, tokens


def _check_grad_dtype(grad_dtype: object, parts: tuple[Sequence[torch.Tensor], ...], has_main_grad: bool) -> None:
    """Of another one than bf16."""
    if grad_dtype is not torch.float32:
        raise ValueError(f"grad_dtype: {grad_dtype}; legal are torch.bfloat16 and torch.float32")
    if has_main_grad:
        raise ValueError("grad_dtype: torch.float32 beside main_grad, which is fp32 anyway; give one of the two")
    if not torch.is_grad_enabled():
        return
    if not HAS_GRAD_DTYPE:
        raise Unsupported(f"grad_dtype: torch.float32 needs PyTorch 2.10 or newer; this is {torch.__version__}")
    for name, weights in zip(_NAMES, parts, strict=True):
        for weight in weights:
            kept = weight.grad_dtype if weight.is_leaf else weight.dtype
            if weight.requires_grad and kept not in (torch.float32, None):
                why = f"its grad_dtype is {kept}" if weight.is_leaf else "it is no leaf"
                raise ValueError(
                    f"{name}: autograd would round a gradient of torch.float32, since {why}; with grad_dtype="
                    "torch.float32 it must be a leaf whose grad_dtype is torch.float32 or None"
                )


def _main_grad(
    given: MainGrad, parts: tuple[list[torch.Tensor], ...], apart: bool
) -> typing.Literal["param"] | tuple[list[torch.Tensor], ...]:
    if isinstance(given, str) and given == "param":
        return given
    names = _NAMES if parts[2] else _NAMES[:2]
    if isinstance(given, str) or len(given) != len(names):
        shown = repr(given) if isinstance(given, str) else f"{len(given)} entries"
        raise ValueError(f"main_grad: {shown}; legal are None, 'param' and (of {', of '.join(names)})")
    found = []
    for which, one in enumerate(given):
        if which == 0 and apart:
            found.append(_gate_and_up(one, "main_grad")[0])
        else:
            found.append(typing.cast(list[torch.Tensor], [one] if _is_tensor(one) else list(one)))
        _check_main_grad(found[which], parts[which], names[which])
    return tuple(found)


def _check_main_grad(main_grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], name: str) -> None:
    if len(main_grads) != len(weights):
        raise ValueError(f"main_grad: {len(main_grads)} tensors for {name}; must be {len(weights)}")
    for main_grad, weight in zip(main_grads, weights, strict=True):
        if main_grad.dtype != torch.float32:
            raise ValueError(f"main_grad: {main_grad.dtype} for {name}; must be torch.float32")
        if main_grad.shape != weight.shape or not main_grad.is_contiguous() or main_grad.device != weight.device:
            raise ValueError(
                f"main_grad: shape {list(main_grad.shape)}, strides {main_grad.stride()} on {main_grad.device} for "
                f"{name}; must be {list(weight.shape)}, contiguous, on {weight.device}"
            )
