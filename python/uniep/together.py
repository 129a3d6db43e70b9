"""Work of all ranks of a group that ends well on all of them or on none."""

from __future__ import annotations

import typing
from collections.abc import Callable

import torch

from uniep import library, peers
from uniep.errors import CapacityError

if typing.TYPE_CHECKING:
    from uniep.group import Group

_TIMEOUT, _INTERNAL = 4, 8
_STATUS: list[tuple[type[BaseException], int]] = [
    (ValueError, 1),
    (NotImplementedError, 2),
    (CapacityError, 3),
    (TimeoutError, _TIMEOUT),
    (MemoryError, 6),
    (torch.OutOfMemoryError, 6),
]
_Made = typing.TypeVar("_Made")


def status_of(error: BaseException) -> int:
    """The uniep_status that an exception stands for."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), _INTERNAL)


def make_together(group: Group, make: Callable[[], _Made]) -> _Made | None:
    """What `make`, which is not collective, makes; None on all ranks where one of them has no memory for it.
    Collective."""
    made: _Made | None = None
    try:
        made = make()
        ready = True
    except (torch.OutOfMemoryError, MemoryError):
        ready = False
    if group.size > 1:
        ready = all(peers.gather_objects(group, ready, "which ranks have room"))
    return made if ready else None


def run_together(group: Group, run: Callable[[], _Made], what: str) -> _Made:
    """What `run`, which makes calls of the group, gives. Collective; waits for the device. Where a rank fails all
    recover, and raise what one of them did.

    A rank whose kernel gave up hears of it behind the call alone, and recover() is collective.

    Args:
        what: what the ranks tell each other, such as "whether a schedule ran on the ranks".
    """
    failed = None
    try:
        made = run()
        group.synchronize()
    except Exception as error:
        failed = status_of(error), " ".join(str(error).split()) or type(error).__name__  # its frames hold memory
    ranks = [failed]
    if group.size > 1:
        ranks = peers.gather_objects(group, failed, what)
    failures = [(rank, *one) for rank, one in enumerate(ranks) if one is not None]
    if not failures:
        return made
    group.recover()
    # Ranks that waited for one that failed have timed out.
    rank, status, text = next((one for one in failures if one[1] != _TIMEOUT), failures[0])
    raise library.error_of(status, text if group.size == 1 else f"rank {rank}: {text}")
