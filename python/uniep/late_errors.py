"""Errors of a step's last calls, before its optimizer changes a weight.

With native transport on GPUs a call within a capacity does not wait. That its rows did not fit is raised by a later
call, and the last one of a step has none before the optimizer.
"""

from __future__ import annotations

import weakref

from torch.optim.optimizer import register_optimizer_step_pre_hook

from uniep.group import Group

_called: weakref.WeakSet[Group] = weakref.WeakSet()
_hooked = False


def check_before_optimizer(group: Group) -> None:
    """The first optimizer of torch's that begins a step from now on waits for the group's calls, and raises what one of
    them has to raise."""
    global _hooked
    _called.add(group)
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_check)


def _check(*_: object) -> None:
    for group in list(_called):
        _called.discard(group)
        if not group.engine.has_ended:
            group.synchronize()
