"""Errors of a step's last calls, before its optimizer changes a weight.

With native transport on GPUs the host does not wait for calls: that a peer did not come, or that rows did not fit into
a capacity, is raised by a later call, and the last ones of a step have none before the optimizer.
"""

from __future__ import annotations

import typing
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from uniep import capture

if typing.TYPE_CHECKING:
    from uniep.group import Group

_called: weakref.WeakSet[Group] = weakref.WeakSet()
_hooked = False


def note_call(group: Group, capacity: tuple[int, int] | None) -> None:
    """Of each call. Where it may fail behind its return, the first optimizer of torch's that begins a step waits for
    the group's calls, and raises what one of them has to raise."""
    global _hooked
    if group.transport != "native" or (group.size == 1 and capacity is None):
        return
    _called.add(group)
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_check)


def _check(*_: object) -> None:
    # No graph can hold waiting. Inside of backward, where some have an optimizer for each layer, it would wait at each.
    if torch.compiler.is_compiling() or not _called or _is_in_backward() or capture.is_capturing():
        return
    for group in list(_called):
        _called.discard(group)
        if not group.engine.has_ended:
            group.synchronize()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
