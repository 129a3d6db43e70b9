"""Weights and their gradients as the library takes them."""

from __future__ import annotations

import ctypes
import typing
from collections.abc import Sequence

import torch


class Addresses(typing.NamedTuple):
    """Of the experts' tensors: of one tensor, or of an array with one an expert; the same of ups that lie apart from
    their gates; and what keeps the arrays."""

    tensor: int | None = None
    experts: int | None = None
    up: int | None = None
    up_experts: int | None = None
    arrays: typing.Any = None


NOWHERE = Addresses()


class Weights(typing.NamedTuple):
    """Of weights or of their gradients."""

    w1: Addresses = NOWHERE
    w2: Addresses = NOWHERE
    b1: Addresses = NOWHERE
    b2: Addresses = NOWHERE

    def structure(self, kind: type[ctypes.Structure]) -> typing.Any:
        """library.Weights, or library.WeightGradients, whose fields are in the same order."""
        w1, w2, b1, b2 = self
        first = w1.tensor, w2.tensor, w1.experts, w2.experts, w1.up, w1.up_experts
        return kind(ctypes.sizeof(kind), *first, b1.tensor, b2.tensor, b1.experts, b2.experts)


def addresses(parts: Sequence[Sequence[torch.Tensor] | None], apart: bool) -> Weights:
    """Of the tensors of w1, w2, b1 and b2; None or no tensors: none. `apart`: the first half of w1's are gates, the
    second the matching ups."""
    w1, w2, b1, b2 = parts
    return Weights(
        _halves(w1) if apart and w1 else _addresses(w1, 3), _addresses(w2, 3), _addresses(b1), _addresses(b2)
    )


def _halves(tensors: Sequence[torch.Tensor]) -> Addresses:
    half = len(tensors) // 2
    gate, up = _addresses(tensors[:half], 3), _addresses(tensors[half:], 3)
    return Addresses(gate.tensor, gate.experts, up.tensor, up.experts, (gate.arrays, up.arrays))


def _addresses(tensors: Sequence[torch.Tensor] | None, dimensions: int = 2) -> Addresses:
    """`dimensions`: of a tensor over all experts."""
    if not tensors:
        return NOWHERE
    if len(tensors) == 1 and tensors[0].dim() == dimensions:
        return Addresses(tensors[0].data_ptr())
    array = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
    return Addresses(None, ctypes.addressof(array), arrays=array)
