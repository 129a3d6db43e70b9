"""What backward has from forward beside saved tensors, found by a number that is saved with them.

Non-reentrant checkpointing gives the backward of one forward the tensors that a second forward saved, and the routing
of that one can be another: a router on a GPU may have other last bits. Rows lie as their own routing placed them.
"""

from __future__ import annotations

import ctypes
import itertools
import typing
import weakref

import torch


class Ticket(ctypes.c_int64):
    """A number, and what goes with the tensors that are saved beside it."""

    held: typing.Any


_issued: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def issue(held: typing.Any) -> tuple[Ticket, torch.Tensor]:
    """A ticket, and the tensor to be saved, whose memory is the ticket: it lives as long as a view of that does."""
    ticket = Ticket(next(_numbers))
    ticket.held = held
    _issued[ticket.value] = ticket
    return ticket, torch.frombuffer(ticket, dtype=torch.int64)


def held_beside(saved: torch.Tensor, own: Ticket) -> typing.Any:
    """What goes with the tensors that came back: this forward's, or what those hold that another one saved."""
    number = saved.item()
    ticket = own if number == own.value else _issued.get(int(number))
    if ticket is None:
        raise RuntimeError(
            "uniep: backward has tensors of another forward, whose routing is gone; a hook that replaces saved tensors "
            "must keep their memory, as torch.utils.checkpoint does"
        )
    return ticket.held
