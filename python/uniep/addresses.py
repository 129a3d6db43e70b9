"""Weights and their gradients as the library takes them."""

from __future__ import annotations

import ctypes
import typing
from collections.abc import Sequence

import torch

# Of the experts' tensors: of one tensor, or of an array with one an expert; the same of ups that lie apart from their
# gates; and what keeps the arrays.
Addresses = tuple[int | None, int | None, int | None, int | None, typing.Any]
NOWHERE: Addresses = (None, None, None, None, None)


_ALIGNMENT = 16  # that GPUs ask of rows and of matrices


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor where GPUs take it: itself, or a copy."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def check_apart(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Raises ValueError where two gradients would be added to the same memory at once."""
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise ValueError(f"main_grad: the same memory for two experts of {name}; must be different for each expert")


class Weights(typing.NamedTuple):
    """Of weights or of their gradients."""

    w1: Addresses = NOWHERE
    w2: Addresses = NOWHERE
    b1: Addresses = NOWHERE
    b2: Addresses = NOWHERE

    def fill(self, given: typing.Any) -> None:
        """A library.Weights."""
        w1, w2, b1, b2 = self
        given.w1, given.w1_experts, given.w1_up, given.w1_up_experts, _ = w1
        given.w2, given.w2_experts, _, _, _ = w2
        given.b1, given.b1_experts, _, _, _ = b1
        given.b2, given.b2_experts, _, _, _ = b2

    def fill_gradients(self, given: typing.Any) -> None:
        """A library.WeightGradients."""
        w1, w2, b1, b2 = self
        given.dw1, given.dw1_experts, given.dw1_up, given.dw1_up_experts, _ = w1
        given.dw2, given.dw2_experts, _, _, _ = w2
        given.db1, given.db1_experts, _, _, _ = b1
        given.db2, given.db2_experts, _, _, _ = b2


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
    return gate[0], gate[1], up[0], up[1], (gate[4], up[4])


def _addresses(tensors: Sequence[torch.Tensor] | None, dimensions: int = 2) -> Addresses:
    """`dimensions`: of a tensor over all experts."""
    if not tensors:
        return NOWHERE
    if len(tensors) == 1 and tensors[0].dim() == dimensions:
        return tensors[0].data_ptr(), None, None, None, None
    array = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
    return None, ctypes.addressof(array), None, None, array
