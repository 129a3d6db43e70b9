"""The calls of a job that runs under a Tuner: how they end, and what is kept of those whose time is taken."""

from __future__ import annotations

import types
import typing

import torch

from uniep import peers, trials
from uniep.errors import CapacityError, DeviceError
from uniep.layer_stats import _moment

if typing.TYPE_CHECKING:
    from uniep.routes import Route
    from uniep.tuner import _OfGroup

_NO_FAULTS = (CapacityError, MemoryError, torch.OutOfMemoryError)
_HUNG = ("waited too long", "time-out after")  # docs/failures.md


class Planned(trials.Trial):
    """A call of the job whose time nobody waits for. How it fails is told."""

    def __init__(self, owner: _OfGroup, planned: typing.Any) -> None:
        self.owner, self.planned = owner, planned
        self.schedule = planned.schedule

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: types.TracebackType | None,
    ) -> None:
        if error is None:
            return
        if self._is_no_fault(error):
            self.owner.not_measured(self.planned)
        else:
            self.owner.failed(self.planned, error)

    def _is_no_fault(self, error: BaseException) -> bool:
        """Whether the call would have failed under any schedule, as far as that is known."""
        group = self.owner.group
        if isinstance(error, _NO_FAULTS) or not isinstance(error, Exception) or group.engine.has_ended:
            return True  # of an earlier call, of memory, or of who ends the job or the group
        text = str(error)
        if isinstance(error, ValueError):
            return not text.startswith("illegal schedule")
        if not isinstance(error, TimeoutError | DeviceError):
            return False
        if "an earlier " in text:
            return True
        # What the job has run for long hardly ends a rank or a call elsewhere: it waits too long itself, or nothing.
        hung = isinstance(error, DeviceError) or any(one in text for one in _HUNG)
        return not self.planned.of_candidate and (not hung or peers.find_gone_by_now(group) is not None)


class Timed(Planned):
    """A call whose time is taken.

    It keeps its route, and so memory of the driver, until its rows are known: the host has them when place() returns,
    but for native transport with a capacity, where they are on the device.
    """

    def __init__(self, owner: _OfGroup, planned: typing.Any, route: Route, rows_are_on_host: bool) -> None:
        super().__init__(owner, planned)
        self._route: Route | None = route
        self._rows_are_on_host = rows_are_on_host
        self.rows = 0.0, 0.0  # of the busiest rank, and in the mean
        self.begin: typing.Any = None
        self.end: typing.Any = None
        self.step = owner.steps

    def __enter__(self) -> None:
        self.begin = _moment(self.owner.group.device)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: types.TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, _trace)
        if error is not None:
            self._route = None
            return
        self.end = _moment(self.owner.group.device)
        self.owner.hold(self)

    @property
    def has_route(self) -> bool:
        return self._route is not None

    def has_rows(self) -> bool:
        """Whether read_rows() waits for nothing."""
        return self._rows_are_on_host or isinstance(self.end, float) or bool(self.end.query())

    def read_rows(self) -> None:
        """Waits for the placement; lets the route go."""
        route, self._route = self._route, None
        if route is not None:
            rows = route.rows_of_ranks()
            self.rows = float(max(rows, default=0)), sum(rows) / max(len(rows), 1)

    def milliseconds(self) -> float:
        """Waits for the end of the call."""
        if isinstance(self.end, float):
            return float(max(1e3 * (self.end - self.begin), 1e-6))
        self.end.synchronize()
        return max(float(self.begin.elapsed_time(self.end)), 1e-6)


class Kept(trials.Trial):
    """A call that is captured into a graph."""

    def __init__(self, schedule: bytes) -> None:
        self.schedule = schedule
