"""Calls while torch.cuda.graph captures: what a graph can hold, and what is refused because it would wait."""

from __future__ import annotations

import typing

import torch

if typing.TYPE_CHECKING:
    from uniep.group import Group


def is_capturing() -> bool:
    """Whether what this thread asks of its current stream goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def refuse(what: str) -> None:
    """ValueError while a graph is captured. `what`: "NAME: why not; what is legal"."""
    if is_capturing():
        raise ValueError(what)


def check_call(group: Group, capacity: tuple[int, int] | None) -> None:
    """Raises ValueError where a graph is captured that can not hold a call of the layer."""
    if not is_capturing():
        return
    if group.device.type == "cpu":
        raise ValueError("group: on cpu, and a CUDA graph is captured, which would not run this call again")
    if group.transport == "torch":
        raise ValueError(
            "group: transport 'torch' waits for the numbers of rows, which a call in a CUDA graph can not; legal is "
            "'native'"
        )
    if capacity is None:
        raise ValueError(
            "capacity: None, and a CUDA graph is captured: its memory is fixed; legal is (rows or a factor, tokens)"
        )
