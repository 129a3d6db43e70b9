"""What a call of the layer runs under while a Tuner is there. Calls look here; uniep.tuner fills it in."""

from __future__ import annotations

import contextlib
import types
import typing

from uniep import rerun

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from uniep.call import Call
    from uniep.group import Group
    from uniep.routes import Route
    from uniep.tuner import Tuner


class Trial:
    """Around one call of the library. `schedule` is what it runs under; None: what it was given."""

    schedule: bytes | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: types.TracebackType | None,
    ) -> None:
        return None


_AS_GIVEN = Trial()
active: Tuner | None = None


def forget(group: Group) -> None:
    """Its layers are tuned anew, from what the folder has: its ranks may have made other calls than each other, or are
    given other schedules than the Tuner knows. On all ranks."""
    if active is not None and not rerun.running:
        active._forget(group)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Calls run under what they are given."""
    global active
    kept, active = active, None
    try:
        yield
    finally:
        active = kept


def plan(call: Call, direction: str, route: Route) -> Trial:
    if active is None or rerun.running:
        return _AS_GIVEN
    return active._plan(call, direction, route) or _AS_GIVEN
