"""moe(): the layer as an autograd.Function."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from uniep import library
from uniep.engine import Owned, Weights
from uniep.group import Group
from uniep.routes import Route, place_routing

Tensors = torch.Tensor | Sequence[torch.Tensor]
GateAndUp = Tensors | tuple[Tensors, Tensors] | Sequence[tuple[torch.Tensor, torch.Tensor]]
MainGrad = typing.Literal["param"] | tuple[GateAndUp, Tensors]

_SAVES = ("keep", "redispatch", "recompute")

_Function = typing.TypeVar("_Function", bound=typing.Callable[..., typing.Any])


def outside_of_graphs(function: _Function) -> _Function:
    """A function that torch.compile leaves alone: it runs between two compiled graphs."""
    return typing.cast(_Function, torch._disable_dynamo(function))  # type: ignore[attr-defined]


@outside_of_graphs
def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    probs: torch.Tensor,
    w1: GateAndUp,
    w2: Tensors,
    *,
    topk: int | None = None,
    group: Group | None = None,
    schedule: str | tuple[str, str] = "auto",
    capacity: tuple[int, int] | None = None,
    main_grad: MainGrad | None = None,
    save: str = "keep",
) -> torch.Tensor:
    """The experts of a mixture-of-experts layer: y[t] = sum over slots k of w2[e] (silu(gate) * up * probs[t, k]).

    [gate, up] = w1[e] x[t], and e = topk_ids[t, k]. Differentiable in x, probs, w1 and w2. Forward and backward are
    collective: all ranks of the group call, also those without tokens, and either all or none of them run backward.

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
        topk: K of a routing map, equal on all ranks; not needed with ids.
        group: None is Group(device=x.device).
        schedule: text as in docs/schedule.md, or two, for forward and for backward. Changes no bit.
        capacity: (padded rows of a rank, tokens of a rank), at most and equal on all ranks; more is CapacityError.
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
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
        w1, w2 = _cast(w1), _cast(w2)
    (first, apart), second = _gate_and_up(w1, "w1"), _tensors(w2, "w2")
    _check_tensors(x, topk_ids, probs)
    local, hidden, intermediate = _check_weights(x, first, second, apart)
    if group is None:
        group = Group(device=x.device)
    if x.device != group.device:
        raise ValueError(f"x: on {x.device}; must be on the group's device, {group.device}")
    slots = checked_topk(topk_ids, local * group.size, topk)
    call = _Call(
        group,
        (hidden, intermediate, local * group.size),
        _schedules(schedule, save),
        slots,
        checked_capacity(capacity),
        save,
        apart,
        first,
        second,
        _main_grad(main_grad, first, second, apart),
    )
    weights_need = {tensor.requires_grad for tensor in first}, {tensor.requires_grad for tensor in second}
    for name, need in zip(("w1", "w2"), weights_need, strict=True):
        if len(need) > 1:
            raise ValueError(f"{name}: some experts require a gradient and others do not; must be all or none")
    ids = topk_ids.reshape(-1, topk_ids.shape[-1]).contiguous()
    routing = ids, probs.reshape(ids.shape)
    y = _Moe.apply(call, x.reshape(-1, hidden), *routing, *first, *second)  # type: ignore[no-untyped-call]
    return typing.cast(torch.Tensor, y).view(x.shape)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What one call was asked for, beside its tensors."""

    group: Group
    shape: tuple[int, int, int]  # H, I, E
    schedules: tuple[bytes, bytes]
    topk: int
    capacity: tuple[int, int] | None
    save: str
    apart: bool  # w1 is all gates, then all ups
    w1: list[torch.Tensor]
    w2: list[torch.Tensor]
    main_grad: typing.Literal["param"] | tuple[list[torch.Tensor], list[torch.Tensor]] | None

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, _State]:
        route = place_routing(self.group, self.shape, ids, probs, self.topk, self.capacity)
        w1, w2 = self.split(weights)
        rows = route.send(x)
        y, saved = self.group.engine.forward(
            route.config(), self.schedules[0], route.placement, rows, Weights.of(w1, self.apart), Weights.of(w2)
        )
        return route.sum_slots(y), _State(route, saved)

    def split(self, weights: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        return weights[: len(self.w1)], weights[len(self.w1) :]


class _State(typing.NamedTuple):
    """What a forward leaves for its backward."""

    route: Route
    saved: Owned


def _hold(state: _State) -> torch.Tensor:
    """A tensor of one byte, to be saved for backward, with whose storage the state lives and dies."""
    holder = torch.empty(1, dtype=torch.uint8)
    holder.untyped_storage().uniep_state = state  # type: ignore[attr-defined]
    return holder


def _held(holder: torch.Tensor) -> _State:
    state = getattr(holder.untyped_storage(), "uniep_state", None)
    if state is None:
        raise RuntimeError(
            "a hook on saved tensors has copied what uniep.moe() saved, and copies hold no state; use save='recompute'"
        )
    return typing.cast(_State, state)


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, call: _Call, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, *weights):  # type: ignore[no-untyped-def]
        x, probs = x.contiguous(), probs.contiguous()
        y, state = call.run(x, ids, probs, weights)
        if any(ctx.needs_input_grad):
            ctx.call = call
            if call.save == "recompute":
                ctx.save_for_backward(x, ids, probs, *weights)
            else:
                kept = (x,) if call.save == "redispatch" else ()
                ctx.save_for_backward(_hold(state), *kept, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: typing.Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        call: _Call = ctx.call
        saved = list(ctx.saved_tensors)
        x = None
        if call.save == "recompute":
            x, ids, probs = saved[:3]
            weights = saved[3:]
            state = call.run(x, ids, probs, weights)[1]
        else:
            state = _held(saved[0])
            x = saved[1] if call.save == "redispatch" else None
            weights = saved[2:] if call.save == "redispatch" else saved[1:]
        route = state.route
        w1, w2 = call.split(weights)
        need1, need2 = ctx.needs_input_grad[4], ctx.needs_input_grad[4 + len(w1)]
        dw1 = _gradients(call, 0, w1) if need1 else None
        dw2 = _gradients(call, 1, w2) if need2 else None
        dprobs = torch.empty(route.engine_tokens, dtype=torch.float32, device=dy.device)
        accumulates = call.main_grad is not None
        dx = call.group.engine.backward(
            route.config(library.WEIGHT_GRADIENT_MAIN_GRAD if accumulates else library.WEIGHT_GRADIENT_BF16),
            call.schedules[1],
            state.saved,
            route.send(dy.contiguous()),
            route.send(x) if call.save == "redispatch" and x is not None else None,
            Weights.of(w1, call.apart),
            Weights.of(w2),
            dprobs,
            Weights.of(dw1, call.apart),
            Weights.of(dw2),
        )
        # Collective, so whoever needs them.
        dx, dprobs = route.sum_slots(dx), route.gather_probs(dprobs)
        return (
            None,
            dx if ctx.needs_input_grad[1] else None,
            None,
            dprobs if ctx.needs_input_grad[3] else None,
            *_returned(call, call.w1, dw1),
            *_returned(call, call.w2, dw2),
        )


def _gradients(call: _Call, which: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
    return found


_zeros: dict[typing.Any, torch.Tensor] = {}


def _returned(
    call: _Call, weights: Sequence[torch.Tensor], gradients: list[torch.Tensor] | None
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


def _cast(given: typing.Any) -> typing.Any:
    if _is_tensor(given):
        return given.to(torch.bfloat16)
    return tuple(map(_cast, given)) if isinstance(given, tuple) else [_cast(one) for one in given]


def _gate_and_up(given: GateAndUp, name: str) -> tuple[list[torch.Tensor], bool]:
    """The tensors of w1, and whether gate and up lie apart: then all gates, and behind them all ups."""
    if _is_tensor(given):
        return _tensors(given, name), False
    parts: list[typing.Any] = list(given)
    if parts and isinstance(given, list) and all(isinstance(one, tuple) and len(one) == 2 for one in parts):
        parts = [[gate for gate, _ in parts], [up for _, up in parts]]
    elif len(parts) != 2 or any(_is_tensor(one) and one.dim() != 3 for one in parts):
        return _tensors(typing.cast(Tensors, given), name), False
    gate, up = (_tensors(half, f"{name}, {of}") for half, of in zip(parts, ("gate", "up"), strict=True))
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
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: {x.dtype}; must be torch.bfloat16")
    if x.dim() < 1:
        raise ValueError("x: no dimension; must be [..., hidden]")
    routing, width = ("routing_map", "E") if ids.dtype == torch.bool else ("topk_ids", "K")
    if ids.dim() < 1 or ids.shape[:-1] != x.shape[:-1]:
        expected = [*x.shape[:-1], width]
        raise ValueError(f"{routing}: shape {list(ids.shape)}; must be {expected}, as x has {list(x.shape)}")
    check_probs(ids, probs)
    for name, tensor in ((routing, ids), ("probs", probs)):
        if tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}; must be where x is, on {x.device}")


def check_probs(ids: torch.Tensor, probs: torch.Tensor) -> None:
    """Raises ValueError unless ids has a type for ids or for a map, and probs is fp32 in the shape of ids."""
    if ids.dtype not in (torch.int32, torch.int64, torch.bool):
        raise ValueError(f"topk_ids: {ids.dtype}; must be torch.int32 or torch.int64, or torch.bool for a map")
    if probs.dtype != torch.float32:
        raise ValueError(f"probs: {probs.dtype}; must be torch.float32")
    if probs.shape != ids.shape:
        raise ValueError(f"probs: shape {list(probs.shape)}; must be that of topk_ids, {list(ids.shape)}")


def checked_topk(ids: torch.Tensor, experts: int, topk: int | None) -> int:
    """K of ids [..., K] or of a map [..., E]; ValueError unless it is 1 to E, and the sizes agree."""
    slots = ids.shape[-1]
    if ids.dtype == torch.bool:
        if slots != experts:
            raise ValueError(f"routing_map: {slots} experts; must be the number of experts, {experts}")
        if not isinstance(topk, int) or not 1 <= topk <= experts:
            raise ValueError(f"topk: {topk}; of a routing map it must be 1 to the number of experts, {experts}")
        return topk
    if not 1 <= slots <= experts:
        raise ValueError(f"topk_ids: {slots} slots a token; must be 1 to the number of experts, {experts}")
    if topk is not None and topk != slots:
        raise ValueError(f"topk: {topk}; must be None or that of topk_ids, {slots}")
    return slots


def _check_weights(
    x: torch.Tensor, w1: list[torch.Tensor], w2: list[torch.Tensor], apart: bool
) -> tuple[int, int, int]:
    """Local experts, H and I."""
    hidden, intermediate = x.shape[-1], w2[0].shape[-1]
    half = len(w1) // 2 if apart else len(w1)
    local = w1[0].shape[0] if w1[0].dim() == 3 else half
    rows = intermediate if apart else 2 * intermediate
    checked = [("w1", w1[:half], (rows, hidden)), ("w2", w2, (hidden, intermediate))]
    if apart:
        checked.insert(1, ("w1, up", w1[half:], (rows, hidden)))
    for name, tensors, columns in checked:
        stacked = tensors[0].dim() == 3
        if not stacked and len(tensors) != local:
            raise ValueError(f"{name}: {len(tensors)} tensors; must be {local}, one for each expert, as in w1")
        expected = [local, *columns] if stacked else list(columns)
        for tensor in tensors:
            if list(tensor.shape) != expected:
                raise ValueError(
                    f"{name}: shape {list(tensor.shape)}; must be {expected}, as x has hidden {hidden}, w1 {local} "
                    f"experts and w2 intermediate {intermediate}"
                )
            if tensor.dtype != torch.bfloat16:
                raise ValueError(f"{name}: {tensor.dtype}; must be torch.bfloat16")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: strides {tensor.stride()}; must be contiguous")
            if tensor.device != x.device:
                raise ValueError(f"{name}: on {tensor.device}; must be where x is, on {x.device}")
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size < 8 or size % 8 != 0:
            raise ValueError(f"{name}: {size}; must be a multiple of 8, 8 or more")
    if local < 1:
        raise ValueError("w1: no expert; must be one or more on every rank")
    return local, hidden, intermediate


def _schedules(schedule: str | tuple[str, str], save: str) -> tuple[bytes, bytes]:
    if save not in _SAVES:
        raise ValueError(f"save: {save!r}; legal are {', '.join(_SAVES)}")
    texts = (schedule, schedule) if isinstance(schedule, str) else tuple(schedule)
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"schedule: {schedule!r}; legal is a text, or two: of forward and of backward")
    if save != "redispatch":
        return texts[0].encode(), texts[1].encode()
    for text in texts:
        if text.lstrip().startswith("{"):
            raise ValueError("schedule: JSON beside save='redispatch'; legal are 'auto' and key=value,...")
    first, second = ("save.xg=redispatch" if text in ("", "auto") else f"{text},save.xg=redispatch" for text in texts)
    return first.encode(), second.encode()


def checked_capacity(capacity: tuple[int, int] | None) -> tuple[int, int] | None:
    """The capacity; ValueError where it is not (rows, tokens)."""
    if capacity is None:
        return None
    values = tuple(capacity)
    if len(values) != 2 or not all(isinstance(value, int) and value > 0 for value in values):
        raise ValueError(f"capacity: {capacity!r}; must be (rows, tokens), both above 0, or None")
    return values


def _main_grad(
    given: MainGrad | None, w1: list[torch.Tensor], w2: list[torch.Tensor], apart: bool
) -> typing.Literal["param"] | tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    if given is None or (isinstance(given, str) and given == "param"):
        return given
    if isinstance(given, str) or len(given) != 2:
        raise ValueError(f"main_grad: {given!r}; legal are None, 'param' and (of w1, of w2)")
    second = [given[1]] if _is_tensor(given[1]) else list(given[1])
    first = _gate_and_up(given[0], "main_grad")[0] if apart else [given[0]] if _is_tensor(given[0]) else list(given[0])
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
