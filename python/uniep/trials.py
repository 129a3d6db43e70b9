"""What a call of the layer runs under while a Tuner is there. Calls look here; uniep.tuner fills it in."""

from __future__ import annotations

import types
import typing

from uniep import rerun

if typing.TYPE_CHECKING:
    from uniep.call import Call
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


def plan(call: Call, direction: str, route: Route) -> Trial:
    if active is None or rerun.running:
        return _AS_GIVEN
    return active._plan(call, direction, route) or _AS_GIVEN
