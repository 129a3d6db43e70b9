"""moe(): the layer as an autograd.Function, and inside of compiled graphs as custom ops (ops.py)."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from uniep import ops
from uniep.call import Call, shaped
from uniep.group import Group, find_group
from uniep.tuning import choose, tuned_sizes

Tensors = torch.Tensor | Sequence[torch.Tensor]
Capacity = tuple[int | float, int]
MainGrad = typing.Literal["param"] | tuple[Tensors, Tensors]

_ROW_ALIGNMENT = 128
_SAVES = ("keep", "redispatch", "recompute")

_Function = typing.TypeVar("_Function", bound=typing.Callable[..., typing.Any])


def outside_of_graphs(function: _Function) -> _Function:
    """A function that torch.compile leaves alone: it runs between two compiled graphs."""
    return typing.cast(_Function, torch._disable_dynamo(function))  # type: ignore[attr-defined]


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    probs: torch.Tensor,
    w1: Tensors,
    w2: Tensors,
    *,
    group: Group | None = None,
    schedule: str | tuple[str, str] = "auto",
    capacity: Capacity | None = None,
    main_grad: MainGrad | None = None,
    save: str = "keep",
) -> torch.Tensor:
    """The experts of a mixture-of-experts layer: y[t] = sum over slots k of w2[e] (silu(gate) * up * probs[t, k]).

    [gate, up] = w1[e] x[t], and e = topk_ids[t, k]. Differentiable in x, probs, w1 and w2. Forward and backward are
    collective: all ranks of the group call, also those without tokens, and either all or none of them run backward.

    Args:
        x: [..., H] bf16; H is a multiple of 8. T, the product of the leading sizes, may differ by rank and be 0.
        topk_ids: [..., K] int32 or int64, global experts; -1 is an unused slot. No expert twice in a token.
        probs: [..., K] fp32, finite.
        w1: [El, 2 I, H] bf16, gate rows before up rows, of this rank's El = E / W experts; or El tensors [2 I, H].
        w2: [El, H, I] bf16, or El tensors [H, I]. I is a multiple of 8.
        group: None is Group(device=x.device).
        schedule: text as in docs/schedule.md, or two, for forward and for backward. Changes no bit.
        capacity: (padded rows of a rank, tokens of a rank), at most and equal on all ranks; more is CapacityError. A
            float in the place of the rows is a factor of tokens K, the rows of a rank under even routing; padding of
            experts comes on top of it.
        main_grad: where gradients of weights are added, in fp32: two entries shaped as w1 and w2 (their gradients
            become None), or "param": `weight.main_grad`, or `weight.get_main_grad()`, of each weight. Then
            `weight.grad_added_to_main_grad` becomes True and the gradient that autograd sees is zero, so that hooks
            run. None: bf16 gradients.
        save: "keep" FC1's output and the dispatched rows for backward; "redispatch": keep x, and dispatch it again for
            the weight gradients; "recompute": keep the arguments only. Changes no bit.

    Returns:
        [..., H] bf16.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and what is legal.
        CapacityError: the routing does not fit. Nothing is dropped.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and main_grad is not None:
        options: dict[str, typing.Any] = {"group": group, "schedule": schedule, "capacity": capacity, "save": save}
        return _moe_outside_of_graphs(x, topk_ids, probs, w1, w2, main_grad=main_grad, **options)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
        w1, w2 = _cast(w1), _cast(w2)
    first, second = _tensors(w1, "w1"), _tensors(w2, "w2")
    _check_tensors(x, topk_ids, probs)
    local, hidden, intermediate = _check_weights(x, first, second)
    if group is None:
        group = default_group(x.device) if compiling else Group(device=x.device)
    if x.device != group.device:
        raise ValueError(f"x: on {x.device}; must be on the group's device, {group.device}")
    experts = local * group.size
    check_topk(topk_ids, experts)
    _check_frozen(first, "w1")
    _check_frozen(second, "w2")
    limits = checked_capacity(capacity, topk_ids.shape[-1], local)
    if schedule == "auto" and compiling:
        for sizes, pair in _tuned(group.name):
            if sizes == (hidden, intermediate, experts, topk_ids.shape[-1]):
                schedule = pair
    elif schedule == "auto":
        schedule = choose(group, hidden, intermediate, experts, topk_ids.shape[-1])
    if compiling:
        texts = _read_schedules(schedule if isinstance(schedule, str) else tuple(schedule), save)
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, probs, first[0], second[0]))
        return ops.run_forward(x, topk_ids, probs, first, second, group.name, texts, limits, save, keep)
    schedules = _schedules(schedule if isinstance(schedule, str) else tuple(schedule), save)
    added = None if main_grad is None else _main_grad(main_grad, first, second)
    call = Call(group, (hidden, intermediate, experts), schedules, limits, save, first, second, added)
    if not torch.is_grad_enabled():
        return call.run(x, topk_ids, probs, (*first, *second), keep=False)[0]
    apply = _apply_moe if not torch._C._are_functorch_transforms_active() else _Moe.apply
    return typing.cast(torch.Tensor, apply(call, x, topk_ids, probs, *first, *second))


_moe_outside_of_graphs = outside_of_graphs(moe)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def default_group(device: torch.device) -> Group:
    """Group(device=device), made while a graph is compiled."""
    return Group(device=device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tuned(group: str) -> tuple[tuple[tuple[int, ...], tuple[str, str]], ...]:
    """What "auto" stands for, as a graph keeps it: a later autotune() changes no graph."""
    return tuned_sizes(find_group(group))


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, call: Call, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, *weights):  # type: ignore[no-untyped-def]
        keep = True in ctx.needs_input_grad
        recompute = call.save == "recompute"
        y, saved, route = call.run(x, ids, probs, weights, keep and not recompute)
        if keep:
            ctx.call, ctx.probs_shape = call, probs.shape
            if recompute:
                ctx.save_for_backward(x, ids, probs, *weights)
            else:
                ctx.route = route
                ctx.save_for_backward(x if call.save == "redispatch" else None, saved, *weights)
        return y

    @staticmethod
    def backward(ctx: typing.Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        return _backward_once(ctx, dy) if torch.is_grad_enabled() else _backward(ctx, dy)


def _backward(ctx: typing.Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    call: Call = ctx.call
    if call.save == "recompute":
        x, ids, probs, *weights = ctx.saved_tensors
        _, saved, route = call.run(x, ids, probs, weights, keep=True)
        x = None
    else:
        x, saved, *weights = ctx.saved_tensors
        route = ctx.route
    w1, w2 = call.split(weights)
    need = ctx.needs_input_grad
    dw1 = _gradients(call, 0, w1) if need[4] else None
    dw2 = _gradients(call, 1, w2) if need[4 + len(w1)] else None
    dx, dprobs = call.run_backward(route, saved, x, dy, weights, dw1, dw2)
    return (
        None,
        dx if need[1] else None,
        None,
        shaped(dprobs, ctx.probs_shape) if need[3] else None,
        *_returned(call, call.w1, dw1),
        *_returned(call, call.w2, dw2),
    )


_backward_once = once_differentiable(_backward)
# What _Moe.apply() calls behind a look at every argument, for transforms of torch.func alone.
_apply_moe: typing.Callable[..., typing.Any] = super(torch.autograd.Function, _Moe).apply


def _gradients(call: Call, which: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for the gradients of w1 (0) or w2 (1)."""
    if call.main_grad is None:
        return [torch.empty_like(weight) for weight in weights]
    if call.main_grad != "param":
        return call.main_grad[which]
    name = ("w1", "w2")[which]
    found = [_main_grad_of(parameter, name) for parameter in (call.w1, call.w2)[which]]
    _check_main_grad(found, weights, name)
    return found


def _main_grad_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
    getter = getattr(parameter, "get_main_grad", None)
    found = getter() if callable(getter) else getattr(parameter, "main_grad", None)
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{name}: main_grad='param', but a weight has no main_grad; legal is an fp32 tensor there")
    # Megatron-FSDP's memory is not initialized where it goes to other ranks; else it sums micro-batches.
    sharded = getattr(getattr(parameter, "_gbuf", None), "is_data_distributed", True)
    if getattr(parameter, "overwrite_main_grad", False) and sharded:
        found.zero_()
    return found


_zeros: dict[typing.Any, torch.Tensor] = {}


def _returned(
    call: Call, weights: Sequence[torch.Tensor], gradients: list[torch.Tensor] | None
) -> Sequence[torch.Tensor | None]:
    """What autograd gets for the weights."""
    if gradients is None or (call.main_grad is not None and call.main_grad != "param"):
        return [None] * len(weights)
    if call.main_grad is None:
        return gradients
    zeros = []
    for weight in weights:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        key = (weight.shape, weight.dtype, weight.device)
        if key not in _zeros:
            _zeros[key] = torch.zeros_like(weight, requires_grad=False)
        zeros.append(_zeros[key].detach())
    return zeros


def _is_tensor(value: object) -> typing.TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _cast(given: Tensors) -> Tensors:
    return given.to(torch.bfloat16) if _is_tensor(given) else [one.to(torch.bfloat16) for one in given]


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
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: {x.dtype}; must be torch.bfloat16")
    if x.dim() < 1:
        raise ValueError("x: no dimension; must be [..., hidden]")
    sizes, leading = ids.shape, x.shape
    if len(sizes) != len(leading) or (sizes[0] != leading[0] if len(sizes) == 2 else sizes[:-1] != leading[:-1]):
        raise ValueError(f"topk_ids: shape {list(ids.shape)}; must be {[*x.shape[:-1], 'K']}, as x has {list(x.shape)}")
    check_probs(ids, probs)
    device = x.device
    if ids.device != device or probs.device != device:
        name, tensor = ("topk_ids", ids) if ids.device != device else ("probs", probs)
        raise ValueError(f"{name}: on {tensor.device}; must be where x is, on {device}")


def check_probs(ids: torch.Tensor, probs: torch.Tensor) -> None:
    """Raises ValueError unless ids has a type for ids, and probs is fp32 in the shape of ids."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids: {ids.dtype}; must be torch.int32 or torch.int64")
    if probs.dtype != torch.float32:
        raise ValueError(f"probs: {probs.dtype}; must be torch.float32")
    if probs.shape != ids.shape:
        raise ValueError(f"probs: shape {list(probs.shape)}; must be that of topk_ids, {list(ids.shape)}")


def check_topk(ids: torch.Tensor, experts: int) -> None:
    """Raises ValueError unless a token has 1 to E slots."""
    if not 1 <= ids.shape[-1] <= experts:
        raise ValueError(f"topk_ids: {ids.shape[-1]} slots a token; must be 1 to the number of experts, {experts}")


def _check_weights(x: torch.Tensor, w1: list[torch.Tensor], w2: list[torch.Tensor]) -> tuple[int, int, int]:
    """Local experts, H and I."""
    hidden, intermediate = x.shape[-1], w2[0].shape[-1]
    local = w1[0].shape[0] if w1[0].dim() == 3 else len(w1)
    _check_weight(w1, "w1", local, (2 * intermediate, hidden), x)
    _check_weight(w2, "w2", local, (hidden, intermediate), x)
    if hidden < 8 or hidden % 8 != 0:
        raise ValueError(f"hidden: {hidden}; must be a multiple of 8, 8 or more")
    if intermediate < 8 or intermediate % 8 != 0:
        raise ValueError(f"intermediate: {intermediate}; must be a multiple of 8, 8 or more")
    if local < 1:
        raise ValueError("w1: no expert; must be one or more on every rank")
    return local, hidden, intermediate


def _check_weight(
    tensors: list[torch.Tensor], name: str, local: int, columns: tuple[int, int], x: torch.Tensor
) -> None:
    """Each of the tensors is fine, and there are as many as there must be."""
    stacked = tensors[0].dim() == 3
    if not stacked and len(tensors) != local:
        raise ValueError(f"{name}: {len(tensors)} tensors; must be {local}, one for each expert, as in w1")
    expected = (local, *columns) if stacked else columns
    dtype, device = torch.bfloat16, x.device
    for tensor in tensors:
        if tensor.shape == expected and tensor.dtype is dtype and tensor.is_contiguous() and tensor.device == device:
            continue
        if tensor.shape != expected:
            raise ValueError(
                f"{name}: shape {list(tensor.shape)}; must be {list(expected)}, as x has hidden {x.shape[-1]}, w1 "
                f"{local} experts and w2 intermediate {columns[0] // 2 if name == 'w1' else columns[1]}"
            )
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: {tensor.dtype}; must be torch.bfloat16")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}; must be contiguous")
        raise ValueError(f"{name}: on {tensor.device}; must be where x is, on {device}")


def _check_frozen(weights: list[torch.Tensor], name: str) -> None:
    need = weights[0].requires_grad
    if len(weights) > 1 and any(weight.requires_grad != need for weight in weights):
        raise ValueError(f"{name}: some experts require a gradient and others do not; must be all or none")


@functools.lru_cache(maxsize=256)
def _schedules(schedule: str | tuple[str, ...], save: str) -> tuple[bytes, bytes]:
    forward, backward = _read_schedules(schedule, save)
    return forward.encode(), backward.encode()


def _read_schedules(schedule: str | tuple[str, ...], save: str) -> tuple[str, str]:
    if save not in _SAVES:
        raise ValueError(f"save: {save!r}; legal are {', '.join(_SAVES)}")
    texts = (schedule, schedule) if isinstance(schedule, str) else schedule
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"schedule: {schedule!r}; legal is a text, or two: of forward and of backward")
    if save != "redispatch":
        return texts[0], texts[1]
    for text in texts:
        if text.lstrip().startswith("{"):
            raise ValueError("schedule: JSON beside save='redispatch'; legal are 'auto' and key=value,...")
    first, second = ("save.xg=redispatch" if text in ("", "auto") else f"{text},save.xg=redispatch" for text in texts)
    return first, second


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


def _main_grad(
    given: MainGrad, w1: list[torch.Tensor], w2: list[torch.Tensor]
) -> typing.Literal["param"] | tuple[list[torch.Tensor], list[torch.Tensor]]:
    if isinstance(given, str) and given == "param":
        return given
    if isinstance(given, str) or len(given) != 2:
        raise ValueError(f"main_grad: {given!r}; legal are None, 'param' and (of w1, of w2)")
    first, second = ([one] if _is_tensor(one) else list(one) for one in given)
    _check_main_grad(first, w1, "w1")
    _check_main_grad(second, w2, "w2")
    return first, second


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
