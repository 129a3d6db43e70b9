"""Notices that a peer has died while the main thread waits in a collective of NCCL's, which would never end."""

from __future__ import annotations

import threading
import time
import typing
from collections.abc import Callable, Iterable

from uniep import peers

if typing.TYPE_CHECKING:
    from uniep.group import Group

_LOOK_S, PATIENCE_S = 0.05, 5.0


class Seen(typing.NamedTuple):
    """A peer's process that is gone."""

    at: float  # time.time(), before the group was asked
    words: str
    error: BaseException | None  # what the group's calls say; None: nothing within PATIENCE_S


def watch(
    groups: Callable[[], Iterable[Group]], noticed: Callable[[Seen], None], stop: threading.Event
) -> threading.Thread:
    """Calls noticed() once, in a thread, when a peer's process of a group of the native transport is gone.

    Other transports wait in collectives of torch's, whose errors the main thread gets. Set `stop` before a barrier
    behind which ranks may end.
    """

    def look() -> None:
        while not stop.wait(_LOOK_S):
            for group in list(groups()):
                gone = peers.find_gone(group) if group.transport == "native" and group.size > 1 else None
                if gone is None:
                    continue
                at = time.time()
                error = _error_of(group, stop)
                if not stop.is_set():
                    noticed(Seen(at, gone, error))
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


def _error_of(group: Group, stop: threading.Event) -> BaseException | None:
    """What the group's own calls say; None: they were over, none began since, or they are behind what never ends."""
    found: list[BaseException] = []
    until = time.monotonic() + PATIENCE_S

    def ask() -> None:
        # The main thread may be on its way to a call.
        while not found and not stop.is_set() and time.monotonic() < until:
            try:
                group.synchronize()
            except Exception as error:
                found.append(error)
            time.sleep(_LOOK_S)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return found[0] if found else None
