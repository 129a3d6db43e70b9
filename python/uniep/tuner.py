"""Tuner: tries other schedules while a job trains. No schedule changes a bit, so losses and weights stay as they are.

docs/tuning.md says how it decides, what it costs and what is tested.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import typing
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from uniep import library, peers, trials, tuning
from uniep.candidate_check import CandidateCheck
from uniep.errors import CapacityError
from uniep.together import status_of
from uniep.tuner_calls import Kept, Planned, Timed
from uniep.tuner_exchange import Exchange

if typing.TYPE_CHECKING:
    from uniep.call import Call
    from uniep.group import Group
    from uniep.routes import Route

_log = logging.getLogger("uniep")
_DIRECTIONS = ("forward", "backward")
_STEPS_TO_SHARE = 25  # that lie between two exchanges of a job's groups
_MOST_ROUTES = 16  # of timed calls that the device has not come to; each has megabytes


class Decision(typing.NamedTuple):
    """What became of one candidate. All ranks of the group take the same; `reason` is as each of them knows it.

    Attributes:
        step: at whose end.
        layer: shape of the layer.
        direction: "forward" or "backward".
        verdict: "taken", "slower", "failed", "wrong" or "refused".
        schedule: of the candidate, whole.
        ratio: its time over the incumbent's, the median of `pairs` pairs; 0: none was measured.
        pairs: how many calls of each were measured.
        reason: why, in words.
    """

    step: int
    layer: str
    direction: str
    verdict: str
    schedule: str
    ratio: float
    pairs: int
    reason: str


class Spent(typing.NamedTuple):
    """Milliseconds in layers, of them lost to trying, and calls that ran under a candidate."""

    layers_ms: float
    lost_ms: float
    tried_calls: int


class Tuner:
    """Tries other schedules in the calls of moe(), also in those of modules and plug-ins. Collective: on all ranks.

    Calls of the first step are noted; from then on candidate and incumbent take turns, and what is surely faster is
    taken. It changes no bit of a job. Fields that a schedule names stay as they are. A group that is closed or aborted
    is forgotten; with a new one it begins again.

        tuner = uniep.Tuner(until=2000)
        for batch in batches:
            ...                      # forward, backward, optimizer
            tuner.step()
            tuner.begin_round()      # where the device may be waited for

    Args:
        until: the step after which nothing changes; 0: no such step.
        budget: time lost to trying, as a share of the time in layers.
        folder: where rank 0 keeps what was found and what failed, for later jobs; None: where autotune() does; "": no.
        batch: candidates of a round, 1 to 64.
        job_group: of groups of one job with layers of the same kind, which one this is, 0 to job_groups - 1: they begin
            with different candidates. results() and add_results() tell them of each other.
        job_groups: how many of them there are. With 1 a Group's `replicas` say it, as Megatron's plug-in sets them, and
            begin_round() tells them.
        before_optimizer: step() and begin_round() are called by the first optimizer of torch's that begins a step
            after calls of moe(), on all ranks; for frameworks whose training loop is not yours.
        on_line: called with each line of the log; None: the logger "uniep".

    Raises:
        ValueError: an argument is wrong, or there is another Tuner that is not closed.
    """

    def __init__(
        self,
        *,
        until: int = 0,
        budget: float = 0.005,
        folder: str | os.PathLike[str] | None = None,
        batch: int = 4,
        job_group: int = 0,
        job_groups: int = 1,
        before_optimizer: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        if until < 0:
            raise ValueError(f"until: {until}; must be a step, or 0 for none")
        if not 0 < budget <= 1:
            raise ValueError(f"budget: {budget}; must be above 0 and at most 1, such as 0.005")
        if not 1 <= batch <= 64:
            raise ValueError(f"batch: {batch}; must be 1 to 64")
        if not 0 <= job_group < job_groups:
            raise ValueError(f"job_group: {job_group}; must be 0 to job_groups - 1, {job_groups - 1}")
        if trials.active is not None:
            raise ValueError("tuner: there is another one; close() it first")
        place = tuning.folder() if folder is None else folder
        self._settings: dict[str, typing.Any] = {"until": until, "budget": budget, "batch": batch}
        self._settings |= {"job_group": job_group, "job_groups": job_groups}
        self._settings["folder"] = None if place is None or place == "" else os.fsencode(place)
        self._on_line = on_line or _log.info
        self._groups: list[_OfGroup] = []
        self._called = False
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer) if before_optimizer else None
        trials.active = self

    def close(self) -> None:
        """Ends it: calls run under what they are given. Another one may be made."""
        if trials.active is self:
            trials.active = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for own in self._groups:
            own.close()

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """Ends a step. Collective. Neither loads nor compiles anything, and waits for no call of the step.

        Raises:
            ValueError: ranks made other calls than rank 0; they are named. The tuner is frozen.
            TimeoutError: a rank did not come. The tuner is frozen.
        """
        self._called = False
        for own in self._open():
            own.step()

    def begin_round(self) -> None:
        """Checks the next candidates, where there are any to be checked. Collective; waits for the device.

        It loads their kernels, which have been compiled in the background, and compares their bytes with the
        incumbent's on an eighth of the tokens. Every 25 steps it exchanges results with the job's other groups.

        Raises:
            CapacityError: a call of the job did not fit, as Group.synchronize() says it; and what else that raises.
            TimeoutError: a rank did not come, of this group or of the job's others.
        """
        for own in self._open():
            own.share()
            own.begin_round()

    def freeze(self) -> None:
        """From here on nothing changes. Collective."""
        for own in self._open():
            own.freeze()

    @property
    def frozen(self) -> bool:
        """Whether nothing changes any more; of a tuner that has not seen a step False."""
        groups = self._open()
        return bool(groups) and all(own.state().frozen for own in groups)

    @property
    def decisions(self) -> list[Decision]:
        return [decision for own in self._groups for decision in own.decisions()]

    @property
    def spent(self) -> Spent:
        states = [own.state() for own in self._groups]
        return Spent(
            sum(state.layers_milliseconds for state in states),
            sum(state.lost_milliseconds for state in states),
            sum(state.tried_calls for state in states),
        )

    def incumbents(self) -> dict[tuple[str, str], str]:
        """What runs now, as schedules by (layer, direction)."""
        return {key: text for own in self._groups for key, text in own.incumbents().items()}

    def results(self, group: Group) -> bytes:
        """What this group of ranks has measured, for the job's other groups. Empty before its second step."""
        for own in self._groups:
            if own.group is group:
                return own.results()
        return b""

    def add_results(self, group: Group, results: bytes) -> None:
        """What another group has measured, the same on all ranks of `group`.

        Raises:
            ValueError: these are no results, or of other layers, another machine or another version.
        """
        for own in self._groups:
            if own.group is group and results:
                own.add_results(results)

    def _open(self) -> list[_OfGroup]:
        """Forgets groups that were closed or aborted, and gives the others."""
        ended = [own for own in self._groups if own.group.engine.has_ended]
        for own in ended:
            self._groups.remove(own)
            own.close()
        return list(self._groups)

    def _forget(self, group: Group) -> None:
        for own in [own for own in self._groups if own.group is group]:
            self._groups.remove(own)
            own.close()

    def _before_optimizer(self, *_: object) -> None:
        if self._called:
            self.step()
            self.begin_round()

    def _plan(self, call: Call, direction: str, route: Route) -> trials.Trial | None:
        self._called = True
        for own in self._groups:
            if own.group is call.group:
                return own.plan(call, direction, route)
        if call.group.engine.has_ended:
            return None
        own = _OfGroup(call.group, self._settings, self._on_line)
        self._groups.append(own)
        return own.plan(call, direction, route)


class _OfGroup:
    """The layers of one group, and the library's tuner of them from the end of their first step on."""

    def __init__(self, group: Group, settings: dict[str, typing.Any], say: Callable[[str], None]) -> None:
        self.group, self.settings, self.say = group, settings, say
        self.library = library.load()
        self.layers: list[CandidateCheck] = []
        self.index: dict[typing.Any, int] = {}
        self.handle: ctypes.c_void_p | None = None
        self.exchange = Exchange(group)
        self.error: BaseException | None = None
        self.timed: list[Timed] = []
        self.late: CapacityError | None = None  # of a call of the job, seen in a check
        self.steps = self.shared = 0  # shared: the step of the last exchange with `others`
        self.others: dist.ProcessGroup | None = None  # who tells of the job's other groups
        self.strangers: set[int] = set()  # of these, whose results can not be used
        self.lock = threading.RLock()  # backward has a thread of its own
        self.keep: list[typing.Any] = []  # what the library calls, and reads
        self._refused = b""

    def close(self) -> None:
        with self.lock:
            handle, self.handle = self.handle, None
            if handle is not None:
                self.library.uniep_tuner_destroy(handle)
            self.timed.clear()
            self.layers.clear()

    def _call(self, function: Callable[..., int], *arguments: typing.Any) -> None:
        status = function(self.handle, *arguments)
        error, self.error = self.error, None
        if error is not None and (status != 0 or not isinstance(error, Exception)):
            raise error
        library.check(status)

    def plan(self, call: Call, direction: str, route: Route) -> trials.Trial | None:
        with self.lock:
            key = CandidateCheck.key_of(call)
            if self.handle is None:
                if self.steps == 0:
                    self._note(key, call, route)
                return None
            layer = self.index.get(key)
            if layer is None:
                return None
            number = _DIRECTIONS.index(direction)
            if self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                text = ctypes.c_char_p()
                self._call(self.library.uniep_tuner_schedule_to_keep, layer, number, ctypes.byref(text))
                return Kept(text.value or b"auto")
            planned = library.TunerCall.make()
            self._call(self.library.uniep_tuner_schedule, layer, number, ctypes.byref(planned))
            if not planned.timed:
                return Planned(self, planned)
            return Timed(self, planned, route, call.capacity is None or self.group.transport == "torch")

    def _note(self, key: typing.Any, call: Call, route: Route) -> None:
        layer = self.index.get(key)
        if layer is None:
            layer = self.index[key] = len(self.layers)
            self.layers.append(CandidateCheck(call, route))
        self.layers[layer].note(route)

    def failed(self, planned: typing.Any, error: BaseException) -> None:
        with self.lock:
            if self.handle is not None:
                reason = " ".join(str(error).split()) or type(error).__name__
                self.library.uniep_tuner_failed(self.handle, ctypes.byref(planned), reason.encode())

    def not_measured(self, planned: typing.Any) -> None:
        with self.lock:
            if self.handle is not None:
                self.library.uniep_tuner_not_measured(self.handle, ctypes.byref(planned))

    def hold(self, one: Timed) -> None:
        """Until its time is told."""
        with self.lock:
            if self.handle is None or self.state().frozen:
                return
            self.timed.append(one)
            held = [each for each in self.timed if each.has_route]
            for i, each in enumerate(held):
                if len(held) - i <= _MOST_ROUTES and not each.has_rows():
                    break
                self._read_rows(each)

    def _read_rows(self, one: Timed) -> None:
        try:
            one.read_rows()
        except Exception:  # the job's, of some call whose rows did not fit
            self.timed.remove(one)
            self.not_measured(one.planned)
            raise

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Around what may freeze it: then nothing is kept for a step that need not come."""
        with self.lock:
            try:
                yield
            finally:
                if self.state().frozen:
                    self.timed.clear()

    def step(self) -> None:
        with self._changing():
            self.steps += 1
            if self.handle is None and self.steps == 1:
                self._find_others()
                self._make()
            elif self.handle is not None:
                self._settle()
                self._call(self.library.uniep_tuner_step)

    def _settle(self) -> None:
        """Times of the steps before the one that ends."""
        for one in [one for one in self.timed if one.step < self.steps - 1]:
            self._read_rows(one)
            self.timed.remove(one)
            self._call(self.library.uniep_tuner_measured, ctypes.byref(one.planned), one.milliseconds(), *one.rows)

    def _find_others(self) -> None:
        others = self.group.replicas
        count = 0 if others is None else dist.get_world_size(others)
        if count < 2 or self.settings["job_groups"] > 1:
            return
        self.others = others
        self.settings = self.settings | {"job_group": dist.get_rank(others), "job_groups": count}

    def _make(self) -> None:
        own = [(layer.key, layer.tokens) for layer in self.layers]
        ranks = [own]
        if self.group.size > 1:
            ranks = peers.gather_objects(self.group, own, "which layers the ranks tune")
        others = [str(rank) for rank, one in enumerate(ranks) if [key for key, _ in one] != [key for key, _ in own]]
        if others:
            raise ValueError(f"tuner: ranks {', '.join(others)} called other layers than rank {self.group.rank}")
        structures = (library.TunerLayer * len(own))()
        for i, layer in enumerate(self.layers):
            layer.tokens = max(one[i][1] for one in ranks)
            forward, backward = (text or b"auto" for text in layer.call.schedules)
            structures[i] = library.TunerLayer.make(
                config=ctypes.cast(layer.config, ctypes.c_void_p),
                tokens=layer.tokens,
                forward=forward,
                backward=backward,
            )
        until = self.settings["until"]
        options = library.TunerOptions.make(
            layers=ctypes.addressof(structures),
            layer_count=len(own),
            rank=self.group.rank,
            ranks=self.group.size,
            check=library.TunerCheckFunction(self._check),
            give=library.TunerGiveFunction(self._give),
            take=library.TunerTakeFunction(self._take),
            log=library.TunerLogFunction(self._say),
            machine_name=f"python, {tuning.machine(self.group)}".encode(),
            **self.settings | {"until": max(until - 1, 1) if until > 0 else 0},  # the first step is over
        )
        self.keep += [structures, options]
        try:
            self.handle = self.group.engine.make_tuner(options)
        except Exception:
            error, self.error = self.error, None
            if error is not None:
                raise error from None
            raise

    def begin_round(self) -> None:
        with self._changing():
            if self.handle is None or not self.state().wants_round or not self._job_is_well():
                return
            self._call(self.library.uniep_tuner_begin_round)
            late, self.late = self.late, None
            if late is not None:
                raise late

    def _job_is_well(self) -> bool:
        """Waits for the job's calls; raises what one of them has to, before a check would take it for the candidate's.
        False: it is another rank that has to, and takes no part in a round."""
        failure: Exception | None = None
        try:
            self.group.synchronize()
        except Exception as error:
            failure = error
        well = [failure is None]
        if self.group.size > 1:
            well = peers.gather_objects(self.group, well[0], "whether the ranks' calls are over")
        if failure is not None:
            raise failure
        return all(well)

    def share(self) -> None:
        """Now and then tells the job's other groups what this one has measured, and hears of theirs. Collective over
        `others`. Whether it is time depends on the number of steps alone, and when it ends on what all have said."""
        with self.lock:
            if self.others is None or self.steps < self.shared + _STEPS_TO_SHARE:
                return
            self.shared = self.steps
            others, own = self.others, (self.handle is None or bool(self.state().frozen), self.results())
            ranks: list[typing.Any] = [None] * dist.get_world_size(others)
            try:
                dist.all_gather_object(ranks, own, group=others)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = " ".join(str(error).split())
                raise TimeoutError(f"tuner: the job's other groups did not say what they measured: {reason}") from error
            if all(frozen for frozen, _ in ranks):
                self.others = None
                return
            for number, (_, results) in enumerate(ranks):
                if number != dist.get_rank(others) and results:
                    self._add_of(number, results)

    def _add_of(self, number: int, results: bytes) -> None:
        try:
            self.add_results(results)
        except ValueError as error:
            if number not in self.strangers and self.group.rank == 0:
                self.say(f"uniep tuner: group {number} of the job is not heard: {error}")
            self.strangers.add(number)

    def freeze(self) -> None:
        with self._changing():
            if self.handle is not None:
                self._call(self.library.uniep_tuner_freeze)

    def state(self) -> typing.Any:
        state = library.TunerState.make()
        if self.handle is not None:
            self._call(self.library.uniep_tuner_describe, ctypes.byref(state))
        return state

    def decisions(self) -> list[Decision]:
        found = []
        for i in range(self.state().decisions):
            one = library.TunerDecision.make()
            self._call(self.library.uniep_tuner_get_decision, i, ctypes.byref(one))
            where = one.step + 1, self.layers[one.layer].name, _DIRECTIONS[one.direction]
            verdict, schedule, reason = (text.decode() for text in (one.verdict, one.schedule, one.reason))
            found.append(Decision(*where, verdict, schedule, one.ratio, one.pairs, reason))
        return found

    def incumbents(self) -> dict[tuple[str, str], str]:
        found = {}
        for i, layer in enumerate(self.layers if self.handle is not None else []):
            for number, direction in enumerate(_DIRECTIONS):
                text = ctypes.c_char_p()
                self._call(self.library.uniep_tuner_incumbent, i, number, ctypes.byref(text))
                found[layer.name, direction] = (text.value or b"").decode()
        return found

    def results(self) -> bytes:
        if self.handle is None:
            return b""
        needed = ctypes.c_size_t()
        self._call(self.library.uniep_tuner_results, None, 0, ctypes.byref(needed))
        buffer = ctypes.create_string_buffer(needed.value)
        self._call(self.library.uniep_tuner_results, buffer, needed, ctypes.byref(needed))
        return buffer.raw

    def add_results(self, results: bytes) -> None:
        if self.handle is not None:
            self._call(self.library.uniep_tuner_add_results, results, len(results))

    # What the library calls. No exception may leave these; _call() raises it.

    def _ends(self) -> BaseException | None:
        """What a check of this round was interrupted by: no collective pairs with the others' any more."""
        return None if self.error is None or isinstance(self.error, Exception) else self.error

    def _guarded(self, function: Callable[[], None]) -> int:
        if (ends := self._ends()) is not None:
            return status_of(ends)
        try:
            function()
        except BaseException as error:
            self.error = error
            return status_of(error)
        return 0

    def _give(self, _context: object, number: int, address: int | None, size: int) -> int:
        own = ctypes.string_at(address, size) if address and size else b""
        return self._guarded(lambda: self.exchange.give(number, own))

    def _take(self, _context: object, number: int, sink: int, put: Callable[..., None]) -> int:
        def take() -> None:
            for own in self.exchange.take(number):
                put(sink, own, len(own))

        return self._guarded(take)

    def _check(
        self, _context: object, layer: int, direction: int, candidate: bytes, incumbent: bytes, result: typing.Any
    ) -> int:
        if self._ends() is not None:
            self._refused = result.contents.refused = b"this rank ends"
            return 0
        try:
            equal, refused, milliseconds = self.layers[layer].check(_DIRECTIONS[direction], candidate, incumbent)
        except CapacityError as error:
            # Checks have no capacity: this is of a call of the job. It says nothing of the candidate.
            self.late = error
            equal, refused, milliseconds = False, "a call of the job before it did not fit its capacity", 0.0
        except Exception as error:
            self._refused = " ".join(str(error).split()).encode()
            result.contents.refused = self._refused
            return status_of(error)
        except BaseException as error:  # such as Ctrl-C, of which no schedule is to blame; _call() raises it
            self.error = error
            equal, refused, milliseconds = False, "this rank ends", 0.0
        self._refused = refused.encode()
        result.contents.equal = equal
        result.contents.milliseconds = milliseconds
        result.contents.refused = self._refused or None
        return 0

    def _say(self, _context: object, line: bytes) -> None:
        self._guarded(lambda: self.say(line.decode(errors="replace")))
