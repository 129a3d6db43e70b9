"""moe(): the layer as an autograd.Function, and inside of compiled graphs as custom ops (ops.py)."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Sequence

import torch

from uniep import capture, ops, schedules, tickets
from uniep.addresses import check_apart
from uniep.arguments import Capacity, GateAndUp, Given, Tensors, cast_to_bf16, flat, gate_and_up, is_tensor, validated
from uniep.call import Call, shaped
from uniep.derivatives import differentiable_once
from uniep.errors import Unsupported
from uniep.group import Group, find_group
from uniep.numerics import read_numerics
from uniep.ordinary import waited_for
from uniep.tuning import choose, tuned_sizes

MainGrad = typing.Literal["param"] | tuple[GateAndUp, Tensors] | tuple[GateAndUp, Tensors, Tensors, Tensors]

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
            after it; "input": x, before w1.

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
        if main_grad == "param" and torch.is_grad_enabled():
            _check_not_cast(w1, w2, b1, b2)
        x = x.to(torch.bfloat16)
        w1, w2 = cast_to_bf16(w1), cast_to_bf16(w2)
        b1, b2 = None if b1 is None else cast_to_bf16(b1), None if b2 is None else cast_to_bf16(b2)
    if not compiling:
        x, topk_ids, probs = waited_for(x), waited_for(topk_ids), waited_for(probs)
    given = validated(x, topk_ids, probs, (w1, w2, b1, b2), activation, topk, num_experts, group, capacity)
    numerics = activation, router_weight
    if compiling:
        return _run_in_graph(given, schedule, save, main_grad, *numerics)
    return _run(given, schedule, save, main_grad, grad_dtype, *numerics)


def _run_in_graph(
    given: Given,
    schedule: str | tuple[str, str],
    save: str,
    main_grad: MainGrad | None,
    activation: str,
    router_weight: str,
) -> torch.Tensor:
    """moe() inside of a compiled graph: by custom ops."""
    x, ids, probs, parts, apart, shape, topk, group, capacity = given
    given_schedule = schedules.text_or_pair(schedule, save)
    if given_schedule == "auto":
        for sizes, pair in _tuned(group.name, activation, router_weight, bool(parts[2]), save):
            if sizes == (*shape, topk):
                given_schedule = pair
    texts = schedules.read(given_schedule, save, group.reserved, group.lends)
    first, second, third, fourth = parts
    keep = torch.is_grad_enabled() and any(
        one.requires_grad for one in (x, probs, first[0], second[0], *third[:1], *fourth[:1])
    )
    marks = main_grad == "param"
    sums = _main_grad_in_graph(main_grad, parts, apart) if keep or not marks else []
    options = save, topk, apart, activation, router_weight
    return ops.run_forward(
        x, ids, probs, first, second, third, fourth, sums, group.name, texts, capacity, *options, marks, keep
    )


def _run(
    given: Given,
    schedule: str | tuple[str, str],
    save: str,
    main_grad: MainGrad | None,
    grad_dtype: torch.dtype,
    activation: str,
    router_weight: str,
) -> torch.Tensor:
    """moe() outside of graphs."""
    x, ids, probs, parts, apart, shape, topk, group, capacity = given
    has_biases = bool(parts[2])
    given_schedule = schedules.text_or_pair(schedule, save)
    if given_schedule == "auto":
        given_schedule = choose(group, *shape, topk, activation, router_weight, has_biases, save)
    written = schedules.encoded(given_schedule, save, group.reserved, group.lends)
    added = None if main_grad is None else _main_grad(main_grad, parts, apart)
    if grad_dtype is not torch.bfloat16:
        _check_grad_dtype(grad_dtype, parts, added is not None)
    numerics = read_numerics(activation, router_weight, has_biases)
    first, second, third, fourth = parts
    counts = len(first), len(second), len(third), len(fourth)
    # Saved tensors may come back as others, without what hangs on them.
    more = numerics, parts if added == "param" else (), getattr(second[0], "uniep_layer", "")
    call = Call(group, shape, written, topk, capacity, save, apart, counts, added, grad_dtype, *more)
    if not torch.is_grad_enabled():
        return call.run(x, ids, probs, (*first, *second, *third, *fourth), keep=False)[0]
    apply = _apply_moe if not torch._C._are_functorch_transforms_active() else _Moe.apply
    return typing.cast(torch.Tensor, apply(call, x, ids, probs, *first, *second, *third, *fourth))


_moe_outside_of_graphs = outside_of_graphs(moe)


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
            ctx.call, ctx.probs_shape = call, probs.shape
            ctx.ticket, number = tickets.issue(route)
            ctx.save_for_backward(number, x if call.sends_x else None, saved, *weights)
        return y

    @staticmethod
    def backward(ctx: typing.Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        return _backward_once(ctx, dy) if torch.is_grad_enabled() else _backward(ctx, dy)


def _backward(ctx: typing.Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    call: Call = ctx.call
    number, x, saved, *weights = ctx.saved_tensors
    route, dy = tickets.held_beside(number, ctx.ticket), waited_for(dy)
    need = ctx.needs_input_grad
    parts = call.parts(weights)
    starts = [4 + sum(map(len, parts[:which])) for which in range(4)]
    wanted = [bool(part) and need[start] for part, start in zip(parts, starts, strict=True)]
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
    if not _keeps_graph():  # as saved tensors go; where this has raised it stays, for another try
        ctx.ticket = None
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
# What _Moe.apply() calls after a look at every argument, for transforms of torch.func alone.
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


def _is_fetched(*given: GateAndUp | None) -> bool:
    """Whether a weight's main_grad is known in its backward alone (Megatron-FSDP): no graph can hold it."""
    return any(
        getattr(one, "get_main_grad", None) is not None or getattr(one, "overwrite_main_grad", False)
        for weights in given
        if weights is not None
        for one in flat(weights)
    )


def _check_not_cast(*given: GateAndUp | None) -> None:
    for name, weights in zip(_NAMES, given, strict=True):
        for weight in () if weights is None else flat(weights):
            if weight.dtype != torch.bfloat16 and weight.requires_grad:
                raise ValueError(
                    f"{name}: {weight.dtype}, and autocast makes copies, which have no main_grad; with "
                    "main_grad='param' must be torch.bfloat16, or give main_grad=(w1.main_grad, w2.main_grad)"
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
    device = weight.device  # and on another stream it may not be zero yet
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    key = (weight.shape, weight.dtype, device, stream)
    found = _zeros.get(key)
    if found is None or found._version != 0:  # autograd added another gradient to one that it had been given
        found = torch.zeros_like(weight, requires_grad=False)
        if not capture.is_capturing():  # memory of a graph is the graph's, and zero in its replays
            _zeros[key] = found
    return found


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
    is_several = isinstance(given, (list, tuple))
    if not is_several or len(given) != len(names):
        shown = f"{len(given)} entries" if is_several else repr(given)
        raise ValueError(f"main_grad: {shown}; legal are None, 'param' and (of {', of '.join(names)})")
    found = []
    for which, one in enumerate(given):
        if which == 0 and apart:
            found.append(gate_and_up(one, "main_grad")[0])
        else:
            if not isinstance(one, Iterable):
                raise ValueError(f"main_grad: {one!r} of {names[which]}; must be a tensor, or a list of tensors")
            found.append(typing.cast(list[torch.Tensor], [one] if is_tensor(one) else list(one)))
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
    if not torch.compiler.is_compiling():
        check_apart(main_grads, name)
