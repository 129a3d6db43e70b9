"""stats(): what the layers of this process do while a job runs, without a wait for the device."""

from __future__ import annotations

import collections
import contextlib
import json
import time
import typing

import torch

from uniep import capture, library, rerun

if typing.TYPE_CHECKING:
    from uniep.call import Call
    from uniep.engine import Engine
    from uniep.group import Group
    from uniep.handles import Owned
    from uniep.routes import Route

_KINDS = ("dispatch", "return", "sum")
_KEPT = 2  # calls of a layer and direction whose end may still be awaited


class LayerStats(typing.NamedTuple):
    """The newest call of a layer and direction that is known to be over. None: not known.

    The last three are, with the native transport, of the newest call that was timed (record_stats()), and parts of such
    a call's `ms`. With the transport torch they are of the newest call, and beside its `ms`.

    Attributes:
        layer: its name, or its shape where it has none; layers without a name share an entry with others of the shape.
        direction: "forward" or "backward".
        calls: since record_stats().
        rows: routed rows that this rank's experts received.
        rows_max_over_mean: the most rows of a rank over the mean of all ranks.
        schedule: as it was given, or what a Tuner had it run under.
        fusion: "layer", "pairs" or "none", as the schedule resolves.
        fused: whether rows of other ranks travel in the launches that compute: the native transport, and some fusion.
        ms: of the library's call. On a GPU from its begin to its end on the stream.
        wait_ms: waiting for rows of peers and this rank, dispatched or to be summed. With the transport torch in the
            all-to-alls around the library's call, which have what they transfer in it.
        exposed_dispatch_ms: of wait_ms, the dispatch that nothing hides: what the first GEMM waits for rows, as a mean
            over the workers. With the transport torch what comes before the library's call.
        sum_ms: the sums that nothing hides: from the end of the rank's last GEMM tile to the end of the last sum. With
            the transport torch all sums.
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

    group: Group
    schedule: bytes
    route: Route
    library: Span
    around: list[Span]  # what the route does itself, before and behind the library

    def is_over(self) -> bool:
        return all(span.is_over() for span in (self.library, *self.around))

    def waits(self) -> dict[str, float]:
        """With the transport torch."""
        of = {kind: sum(span.ms() for span in self.around if span.kind == kind) for kind in _KINDS}
        waiting = of["dispatch"] + of["return"]
        return {"wait_ms": waiting, "exposed_dispatch_ms": of["dispatch"], "sum_ms": of["sum"]}


class _Entry:
    def __init__(self) -> None:
        self.calls = 0
        self.waiting: collections.deque[_Finished] = collections.deque(maxlen=_KEPT)
        self.known: dict[str, typing.Any] = {}
        self.timer: Owned | None = None
        self.timed: dict[str, typing.Any] = {}

    def time(self, engine: Engine) -> None:
        """The library's next call is timed."""
        if self.timer is None or self.timer.engine is not engine:  # layers without a name may be of several groups
            self.timer = engine.make_timer()
        engine.start_timer(self.timer)

    def settle(self, direction: str) -> None:
        """Takes over the newest call that is over, and the newest times."""
        if self.timer is not None and not self.timer.engine.closed:
            self.timed = self.timer.engine.read_timer(self.timer) or self.timed
        over = [one for one in tuple(self.waiting) if one.is_over()]  # another thread may be in a call
        if not over or over[-1].group.engine.closed or over[-1].group.engine.is_busy:
            return
        newest = over[-1]
        for one in over:
            with contextlib.suppress(ValueError):  # a newer one has taken its place
                self.waiting.remove(one)
        group, text = newest.group, newest.schedule
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
        }
        if group.transport == "torch":
            self.timed = newest.waits()


_entries: dict[tuple[str, str], _Entry] = {}
_recording = False
_timed_every = 16


def record_stats(on: bool = True, timed_every: int = 16) -> None:
    """Begins to keep what stats() gives, or ends it. Forgets what was kept.

    It costs two CUDA events a call and the placements of two calls for each layer and direction. A call that is timed
    takes some 0.03 ms longer, and the first one 13 MB of the GPU's memory.

    Args:
        on: False ends it.
        timed_every: with the native transport one of so many calls of a layer and direction, and first its second one,
            is timed: its kernels write down when their tiles ran, and what that comes to reaches the host after it.
            0: none.

    Raises:
        ValueError: timed_every is negative.
    """
    global _recording, _timed_every
    if timed_every < 0:
        raise ValueError(f"timed_every: {timed_every}; must be 0 (no call) or more")
    _recording, _timed_every = on, timed_every
    _entries.clear()


def stats() -> list[LayerStats]:
    """Of each layer and direction that ran since record_stats(). Waits for nothing: a call that the device has not
    finished is not looked at, nor anything of a group while another thread is inside of its calls."""
    found = []
    for (layer, direction), entry in list(_entries.items()):
        entry.settle(direction)
        found.append(LayerStats(layer, direction, entry.calls, **entry.known, **entry.timed))
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
    return [] if _recording and not capture.is_capturing() and not rerun.running else None


def noted(found: list[Span] | None, kind: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Around one thing that a route does."""
    return _nothing if found is None else _note(found, kind, device)


@contextlib.contextmanager
def _note(found: list[Span], kind: str, device: torch.device) -> typing.Iterator[None]:
    begin = _moment(device)
    yield
    found.append(Span(kind, begin, _moment(device)))


def watch(call: Call, direction: str, route: Route, schedule: bytes) -> contextlib.AbstractContextManager[None]:
    """Around one call of the library under this schedule: a range of torch's profiler where that runs, and an entry of
    stats(). Calls that check another one are not the layer's."""
    if rerun.running:
        return _nothing
    if not _recording and not torch.autograd.profiler._is_profiler_enabled:
        return _nothing
    if capture.is_capturing():  # events of a graph have no time, and replays pass by here
        return _nothing
    return _watch(call, direction, route, schedule)


@contextlib.contextmanager
def _watch(call: Call, direction: str, route: Route, schedule: bytes) -> typing.Iterator[None]:
    layer = call.name
    with torch.autograd.profiler.record_function(f"uniep.{direction} ({layer})"):
        if not _recording:
            yield
            return
        entry = _entries.setdefault((layer, direction), _Entry())
        if _timed_every > 0 and entry.calls % _timed_every == 1 % _timed_every and call.group.transport == "native":
            entry.time(call.group.engine)
        begin = _moment(call.group.device)
        yield
        entry.calls += 1
        span = Span("library", begin, _moment(call.group.device))
        entry.waiting.append(_Finished(call.group, schedule, route, span, route.spans or []))
