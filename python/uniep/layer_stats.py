"""stats(): what the layers of this process do while a job runs, without a wait for the device."""

from __future__ import annotations

import collections
import contextlib
import json
import time
import typing

import torch

from uniep import capture, library

if typing.TYPE_CHECKING:
    from uniep.call import Call
    from uniep.routes import Route

_DIRECTIONS = ("forward", "backward")
_KINDS = ("dispatch", "return", "sum")
_KEPT = 2  # calls of a layer and direction whose end may still be awaited


class LayerStats(typing.NamedTuple):
    """The newest call of a layer and direction that is known to be over. None: not known.

    Attributes:
        layer: its name, or its shape where it has none; layers without a name share an entry with others of the shape.
        direction: "forward" or "backward".
        calls: since record_stats().
        rows: routed rows that this rank's experts received.
        rows_max_over_mean: the most rows of a rank over the mean of all ranks.
        schedule: as it was given.
        fusion: "layer", "pairs" or "none", as the schedule resolves.
        fused: whether rows of other ranks travel in the launches that compute: the native transport, and some fusion.
        ms: of the library's call. On a GPU from its begin to its end on the stream.
        wait_ms: waiting for peers: with the transport torch in the all-to-alls around the library's call, which have
            what they transfer in it; 0 with one rank; with several native ranks no engine tells it yet.
        exposed_dispatch_ms: of wait_ms, what comes before the library's call.
        sum_ms: sums of combine, with the transport torch; no engine tells it yet.
    """

    layer: str
    direction: str
    calls: int
    rows: int | None = None
    rows_max_over_mean: float | None = None
    schedule: str | None = None
    fusion: str | None = None
    fused: bool | None = None
    ms: float | None = None
    wait_ms: float | None = None
    exposed_dispatch_ms: float | None = None
    sum_ms: float | None = None


class Span(typing.NamedTuple):
    """Something that a device does: moments of its clock, as _moment() takes them."""

    kind: str  # of a Route's: "dispatch", "return" or "sum"
    begin: typing.Any
    end: typing.Any

    def is_over(self) -> bool:
        return isinstance(self.end, float) or bool(self.end.query())

    def ms(self) -> float:
        if isinstance(self.end, float):
            return 1e3 * (self.end - typing.cast(float, self.begin))
        return float(self.begin.elapsed_time(self.end))


class _Finished(typing.NamedTuple):
    """One call, behind which the device may still be."""

    call: Call
    route: Route
    library: Span
    around: list[Span]  # what the route does itself, before and behind the library

    def is_over(self) -> bool:
        return all(span.is_over() for span in (self.library, *self.around))

    def waits(self) -> dict[str, float | None]:
        group = self.call.group
        if group.transport == "torch":
            of = {kind: sum(span.ms() for span in self.around if span.kind == kind) for kind in _KINDS}
            waiting = of["dispatch"] + of["return"]
            return {"wait_ms": waiting, "exposed_dispatch_ms": of["dispatch"], "sum_ms": of["sum"]}
        nothing = 0.0 if group.size == 1 else None
        return {"wait_ms": nothing, "exposed_dispatch_ms": nothing}


class _Entry:
    def __init__(self) -> None:
        self.calls = 0
        self.waiting: collections.deque[_Finished] = collections.deque(maxlen=_KEPT)
        self.known: dict[str, typing.Any] = {}

    def settle(self, direction: str) -> None:
        """Takes over the newest call that is over."""
        over = [one for one in self.waiting if one.is_over()]
        if not over:
            return
        newest = over[-1]
        for one in over:
            self.waiting.remove(one)
        group = newest.call.group
        text = newest.call.schedules[_DIRECTIONS.index(direction)]
        number = library.FORWARD if direction == "forward" else library.BACKWARD
        fusion = json.loads(group.engine.resolve(newest.route.config(), number, text))["fusion"]
        rows = newest.route.rows_of_ranks()
        self.known = {
            "rows": rows[group.rank],
            "rows_max_over_mean": max(rows) * len(rows) / sum(rows) if sum(rows) else None,
            "schedule": text.decode(),
            "fusion": fusion,
            "fused": group.transport == "native" and fusion != "none",
            "ms": newest.library.ms(),
            **newest.waits(),
        }


_entries: dict[tuple[str, str], _Entry] = {}
_recording = False


def record_stats(on: bool = True) -> None:
    """Begins to keep what stats() gives, or ends it. Forgets what was kept.

    It costs two CUDA events a call and the placements of two calls for each layer and direction.
    """
    global _recording
    _recording = on
    _entries.clear()


def stats() -> list[LayerStats]:
    """Of each layer and direction that ran since record_stats(). Waits for nothing: a call that the device has not
    finished is not looked at."""
    found = []
    for (layer, direction), entry in _entries.items():
        entry.settle(direction)
        found.append(LayerStats(layer, direction, entry.calls, **entry.known))
    return found


def name_layer(weight: torch.Tensor, name: str) -> None:
    """Gives the layer a name whose first tensor of w2 this is."""
    weight.uniep_layer = name  # type: ignore[attr-defined]


def _moment(device: torch.device) -> typing.Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


_nothing = contextlib.nullcontext()


def spans() -> list[Span] | None:
    """Where a route notes what it does in a call that begins; None: nowhere."""
    return [] if _recording and not capture.is_capturing() else None


def noted(found: list[Span] | None, kind: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Around one thing that a route does."""
    return _nothing if found is None else _note(found, kind, device)


@contextlib.contextmanager
def _note(found: list[Span], kind: str, device: torch.device) -> typing.Iterator[None]:
    begin = _moment(device)
    yield
    found.append(Span(kind, begin, _moment(device)))


def watch(call: Call, direction: str, route: Route) -> contextlib.AbstractContextManager[None]:
    """Around one call of the library: a range of torch's profiler where that runs, and an entry of stats()."""
    if not _recording and not torch.autograd.profiler._is_profiler_enabled:
        return _nothing
    if capture.is_capturing():  # events of a graph have no time, and replays pass by here
        return _nothing
    return _watch(call, direction, route)


@contextlib.contextmanager
def _watch(call: Call, direction: str, route: Route) -> typing.Iterator[None]:
    hidden, intermediate, experts = call.shape
    shape = f"H {hidden}, I {intermediate}, E {experts}, K {call.topk}"
    layer = getattr(call.w2[0], "uniep_layer", shape)
    with torch.autograd.profiler.record_function(f"uniep.{direction} ({layer})"):
        if not _recording:
            yield
            return
        begin = _moment(call.group.device)
        yield
        entry = _entries.setdefault((layer, direction), _Entry())
        entry.calls += 1
        span = Span("library", begin, _moment(call.group.device))
        entry.waiting.append(_Finished(call, route, span, route.spans or []))
