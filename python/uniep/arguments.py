"""What moe() is given, checked: types and shapes, before anything runs."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Iterable, Sequence

import torch

from uniep.group import Group
from uniep.numerics import is_gated
from uniep.ordinary import check_ordinary
from uniep.rows import ROW_ALIGNMENT, padded
from uniep.shares import all_experts

_MOST = 1 << 31  # rows or tokens: below

Tensors = torch.Tensor | Sequence[torch.Tensor]
Capacity = tuple[int | float, int]
GateAndUp = Tensors | tuple[Tensors, Tensors] | Sequence[tuple[torch.Tensor, torch.Tensor]]


class Given(typing.NamedTuple):
    """Arguments of moe() that are right."""

    x: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor
    parts: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]  # w1, w2, b1, b2
    apart: bool  # w1 is all gates, then all ups
    shape: tuple[int, int, int]  # H, I, E
    topk: int
    group: Group
    capacity: tuple[int, int] | None


def validated(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    weights: tuple[GateAndUp, Tensors, Tensors | None, Tensors | None],
    activation: str,
    topk: int | None,
    num_experts: int | None,
    group: Group | None,
    capacity: Capacity | None,
) -> Given:
    """What both ways to run a layer need; ValueError where an argument is wrong."""
    w1, w2, b1, b2 = weights
    (first, apart), second = gate_and_up(w1, "w1"), _tensors(w2, "w2")
    _check_tensors(x, ids, probs)
    local, hidden, intermediate = _check_weights(x, first, second, apart, activation)
    third, fourth = _biases(b1, b2, local, hidden, (2 if is_gated(activation) else 1) * intermediate, x)
    is_default, compiling = group is None, torch.compiler.is_compiling()
    if group is None:
        group = default_group(x.device) if compiling else Group(device=x.device)
    elif not isinstance(group, Group):
        raise ValueError(f"group: {group!r}; must be a uniep.Group or None")
    if x.device != group.device:
        raise ValueError(f"x: on {x.device}; must be on the group's device, {group.device}")
    experts = all_experts(local, group, num_experts, is_default and not compiling)
    slots = checked_topk(ids, experts, topk)
    first, second = _trained(first, "w1"), _trained(second, "w2")
    if third:
        third, fourth = _trained(third, "b1"), _trained(fourth, "b2")
    shape, parts = (hidden, intermediate, experts), (first, second, third, fourth)
    return Given(x, ids, probs, parts, apart, shape, slots, group, checked_capacity(capacity, slots, local))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def default_group(device: torch.device) -> Group:
    """Group(device=device), made while a graph is compiled."""
    return Group(device=device)


def flat(given: GateAndUp) -> list[torch.Tensor]:
    """The tensors of w1 or w2, however they are given."""
    return [given] if is_tensor(given) else [one for part in given for one in flat(part)]


def is_tensor(value: object) -> typing.TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def cast_to_bf16(given: typing.Any) -> typing.Any:
    if is_tensor(given):
        return given.to(torch.bfloat16)
    cast = [cast_to_bf16(one) for one in given]
    return tuple(cast) if isinstance(given, tuple) else cast


def gate_and_up(given: GateAndUp, name: str) -> tuple[list[torch.Tensor], bool]:
    """The tensors of w1, and whether gate and up lie apart: then all gates, and behind them all ups."""
    if is_tensor(given):
        return _tensors(given, name), False
    if not isinstance(given, Iterable):
        raise ValueError(f"{name}: {given!r}; must be a tensor, or a list or tuple of tensors")
    parts: list[typing.Any] = list(given)
    if parts and isinstance(given, list) and all(isinstance(one, tuple) and len(one) == 2 for one in parts):
        parts = [[gate for gate, _ in parts], [up for _, up in parts]]
    elif len(parts) != 2 or any(is_tensor(one) and one.dim() != 3 for one in parts):
        return _tensors(typing.cast(Tensors, given), name), False
    gate, up = _tensors(parts[0], f"{name}, gate"), _tensors(parts[1], f"{name}, up")
    if len(gate) != len(up) or gate[0].dim() != up[0].dim():
        raise ValueError(f"{name}: {len(gate)} tensors of gates and {len(up)} of ups; must be alike")
    return [*gate, *up], True


def _tensors(given: Tensors, name: str) -> list[torch.Tensor]:
    if is_tensor(given):
        if given.dim() != 3:
            raise ValueError(
                f"{name}: shape {list(given.shape)}; must have 3 dimensions, or be a list of tensors with 2"
            )
        return [given]
    tensors = list(given) if isinstance(given, Iterable) else []
    if not tensors or not all(is_tensor(one) and one.dim() == 2 for one in tensors):
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
        raise ValueError(f"topk: {topk!r}; must be None or that of topk_ids, {slots}")
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
        tensors = [bias] if is_tensor(bias) else list(bias)
        expected = [local, width] if is_tensor(bias) else [width]
        check_ordinary(name, *tensors)
        if not is_tensor(bias) and len(tensors) != local:
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


def _trained(weights: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """The same; experts that are frozen beside others have stand-ins, since the library makes gradients of all."""
    need = weights[0].requires_grad
    if len(weights) == 1 or all(weight.requires_grad == need for weight in weights):
        return weights
    if torch.compiler.is_compiling():
        raise ValueError(
            f"{name}: some experts require a gradient and others do not; in a compiled graph must be all or none"
        )
    if not torch.is_grad_enabled():
        return weights
    return [weight if weight.requires_grad else _stand_in(weight) for weight in weights]


def _stand_in(frozen: torch.Tensor) -> torch.Tensor:
    """A weight in the same memory whose gradient is thrown away."""
    weight: typing.Any = frozen.detach().requires_grad_()
    weight.get_main_grad = functools.partial(torch.zeros_like, frozen, dtype=torch.float32)
    if hasattr(weight, "grad_dtype"):  # from PyTorch 2.10 on
        weight.grad_dtype = None  # any
    if hasattr(frozen, "uniep_layer"):
        weight.uniep_layer = frozen.uniep_layer
    weight.register_post_accumulate_grad_hook(_forget_gradient)
    return typing.cast(torch.Tensor, weight)


def _forget_gradient(weight: torch.Tensor) -> None:
    weight.grad = None


def checked_capacity(capacity: Capacity | None, topk: int, local: int) -> tuple[int, int] | None:
    """The capacity as (rows, tokens) for K slots a token and El experts; ValueError where it is wrong."""
    if capacity is None:
        return None
    wrong = f"capacity: {capacity!r}; must be (rows or a factor, tokens), both above 0 and below 2^31, or None"
    values = tuple(capacity) if isinstance(capacity, (tuple, list)) else ()
    is_number = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in values]
    if is_number != [True, True] or not isinstance(values[1], int):
        raise ValueError(wrong)
    given, tokens = values[0], int(values[1])
    if not 0 < given < float("inf") or not 0 < tokens < _MOST:
        raise ValueError(wrong)
    rows = given if isinstance(given, int) else padded(math.ceil(given * tokens * topk)) + local * ROW_ALIGNMENT
    if rows >= _MOST:
        raise ValueError(wrong)
    return rows, tokens
