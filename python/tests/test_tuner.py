"""uniep.Tuner: arguments here, and trainings by tuner_checks.py."""

import pathlib
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

import tuner_checks
import uniep
from ranks import HERE, run_ranks
from uniep import library, routes, tuner_calls, tuner_exchange
from uniep import tuner as tuner_module


def test_trainings_on_two_processes():
    assert "13 checks passed on 2 ranks" in run_ranks(2, HERE / "tuner_checks.py")


def test_trainings_on_one(scratch):
    tuner_checks.check_losses_and_weights("")
    tuner_checks.check_kept_in_a_folder(scratch)
    tuner_checks.check_one_rank_lacks_memory_in_a_check("")


LATE = "capacity: rank 1 needs 4096 rows (padded to 128 an expert) but has 2048"


class LateOverflow:
    """As an engine on GPUs tells of a call that did not fit: once, by the next call of the group that looks."""

    def __init__(self, engine, patch, names=("place", "forward", "backward", "synchronize", "check")):
        self.is_pending, self.raised_by = False, []
        for name in names:
            patch.setattr(engine, name, self.wrapped(name, getattr(engine, name)))

    def wrapped(self, name, call):
        def wrapper(*arguments, **named):
            if self.is_pending:
                self.is_pending = False
                self.raised_by.append(name)
                raise uniep.CapacityError(LATE)
            return call(*arguments, **named)

        return wrapper


@pytest.fixture
def tuned_training():
    """A layer, its optimizer and a Tuner with lines; the first candidates are checked at the end of step 2."""
    lines = []
    with (
        uniep.Tuner(budget=1, folder="", before_optimizer=True, on_line=lines.append) as tuner,
        uniep.Group("self", workers=3) as group,
    ):
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
        yield tuner, layer, torch.optim.SGD(layer.parameters(), lr=1.0), lines


def call(layer):
    layer(torch.randn(48, 64).bfloat16()).float().square().mean().backward()


def test_a_late_overflow_stops_the_optimizer(tuned_training, monkeypatch):
    """A check does not take it for a fault of its candidate."""
    tuner, layer, optimizer, lines = tuned_training
    late = LateOverflow(layer.experts.group.engine, monkeypatch)
    for _ in range(2):
        call(layer)
        if tuner._groups[0].steps == 1:
            late.is_pending = True
            before = layer.experts.down_proj.detach().clone()
            with pytest.raises(uniep.CapacityError, match="rank 1 needs 4096 rows"):
                optimizer.step()
            assert torch.equal(layer.experts.down_proj, before)
        else:
            optimizer.step()
    assert late.raised_by == ["synchronize"] and tuner.decisions == [] and tuner.spent.lost_ms == 0
    call(layer)
    optimizer.step()
    assert tuner.spent.lost_ms > 0 and not any(one.verdict == "failed" for one in tuner.decisions), lines


def test_an_overflow_that_a_check_sees_is_raised_behind_it(tuned_training, monkeypatch):
    tuner, layer, optimizer, lines = tuned_training
    late = LateOverflow(layer.experts.group.engine, monkeypatch, ["place"])
    call(layer)
    optimizer.step()
    call(layer)
    late.is_pending = True
    with pytest.raises(uniep.CapacityError, match="rank 1 needs 4096 rows"):
        optimizer.step()
    (decision,) = tuner.decisions
    assert decision.verdict == "refused" and decision.reason.startswith("a call of the job before it"), decision
    assert late.raised_by == ["place"]
    optimizer.step()


def test_a_call_that_sees_an_overflow_is_no_fault_of_its_schedule(tuned_training, monkeypatch):
    tuner, layer, optimizer, lines = tuned_training
    failed = []
    monkeypatch.setattr(tuner_module._OfGroup, "failed", lambda self, planned, error: failed.append(error))
    late = LateOverflow(layer.experts.group.engine, monkeypatch, ["forward"])
    for _ in range(2):
        call(layer)
        optimizer.step()
    late.is_pending = True
    with pytest.raises(uniep.CapacityError):
        call(layer)
    assert late.raised_by == ["forward"] and failed == []
    monkeypatch.setattr(layer.experts.group.engine, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(layer)
    assert len(failed) == 1


def test_how_calls_fail_is_told_whether_they_are_timed_or_not(tuned_training, monkeypatch):
    tuner, layer, optimizer, lines = tuned_training
    told = []
    for name in ("uniep_tuner_failed", "uniep_tuner_not_measured"):
        function = getattr(library.load(), name)
        monkeypatch.setattr(library.load(), name, lambda *a, f=function, n=name: told.append((a, n)) or f(*a))
    for _ in range(2):
        call(layer)
        optimizer.step()
    for timed in (True, False):
        if not timed:
            tuner.freeze()  # from here on no time is asked for
        for error, name in (
            (ZeroDivisionError("planted"), "uniep_tuner_failed"),
            (TimeoutError("rank 1 waited too long in forward, for arrive: expected 3, seen 2"), "uniep_tuner_failed"),
            (uniep.DeviceError("an illegal address"), "uniep_tuner_failed"),
            (uniep.CapacityError("planted"), "uniep_tuner_not_measured"),  # of an earlier call
            (TimeoutError("group: an earlier call failed half-way; call"), "uniep_tuner_not_measured"),
            (KeyboardInterrupt(), "uniep_tuner_not_measured"),  # of nobody
            (torch.OutOfMemoryError("planted"), "uniep_tuner_not_measured"),
            (ValueError("topk_ids: 9 at token 3"), "uniep_tuner_not_measured"),
        ):
            told.clear()

            def fail(*_, error=error, **__):
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(layer.experts.group.engine, "forward", fail)
                patch.setattr(tuner_module.peers, "find_gone_by_now", lambda _: None)
                with pytest.raises(type(error)):
                    call(layer)
            ((arguments, called),) = told
            assert called == name and arguments[1]._obj.timed == timed, (error, told)
    call(layer)
    assert len(told) == 1


HUNG, GAVE_UP = "rank 1 waited too long in forward, for arrive", "rank 1 gave up the call, or left the group"


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(
    ("error", "gone", "ended", "of_incumbent", "of_candidate"),
    [
        (TimeoutError(HUNG), None, False, "failed", "failed"),
        (TimeoutError(HUNG), "gone: rank 1 (process 7)", False, "not_measured", "failed"),
        (TimeoutError(GAVE_UP), None, False, "not_measured", "failed"),
        (TimeoutError("group: aborted; the ranks need a new Group"), None, True, "not_measured", "not_measured"),
        (uniep.DeviceError("an illegal address"), None, False, "failed", "failed"),
        (uniep.DeviceError("rank 1 ended"), "gone: rank 1 (process 7)", False, "not_measured", "failed"),
    ],
)
def test_what_happens_elsewhere_is_no_fault_of_what_runs(
    timed, error, gone, ended, of_incumbent, of_candidate, tuned_training, monkeypatch
):
    """As in a job whose node fails: what was found stays found. In a candidate's calls it may be the candidate."""
    tuner, layer, optimizer, lines = tuned_training
    for _ in range(2):
        call(layer)
        optimizer.step()
    if not timed:
        tuner.freeze()
    told = []
    for one in ("failed", "not_measured"):
        monkeypatch.setattr(tuner_module._OfGroup, one, lambda *_, one=one: told.append(one))
    monkeypatch.setattr(tuner_module.peers, "find_gone_by_now", lambda _: gone)
    plan, planned_as = tuner_module._OfGroup.plan, []

    def planned(self, *given):
        trial = plan(self, *given)
        assert bool(trial.planned.timed) == timed
        trial.planned.of_candidate = planned_as[-1]
        return trial

    monkeypatch.setattr(tuner_module._OfGroup, "plan", planned)
    engine = layer.experts.group.engine

    def fail(*_, **__):
        monkeypatch.setattr(engine, "_is_aborted", ended)
        raise error

    monkeypatch.setattr(engine, "forward", fail)
    for is_candidates, expected in ((0, of_incumbent), (1, of_candidate)):
        planned_as.append(is_candidates)
        told.clear()
        with pytest.raises(type(error)):
            call(layer)
        monkeypatch.setattr(engine, "_is_aborted", False)
        assert told == [expected]


def test_a_tried_call_that_sees_an_overflow_keeps_its_candidate(tuned_training, monkeypatch):
    """Without a word of it the library would think that it hangs."""
    tuner, layer, optimizer, lines = tuned_training
    late = LateOverflow(layer.experts.group.engine, monkeypatch, ["forward"])
    for _ in range(12):
        own = tuner._groups[0] if tuner._groups else None

        def overflow(*given, plan=own and own.plan, tried=tuner.spent.tried_calls):
            trial = plan(*given)
            late.is_pending |= trial is not None and given[1] == "forward" and tuner.spent.tried_calls > tried
            return trial

        before = len(late.raised_by)
        with monkeypatch.context() as patch:
            if own and not late.raised_by:
                patch.setattr(own, "plan", overflow)
            try:
                call(layer)
            except uniep.CapacityError:
                assert len(late.raised_by) == before + 1
        optimizer.step()
    assert late.raised_by == ["forward"]
    assert not any(one.verdict == "failed" for one in tuner.decisions), tuner.decisions


@pytest.fixture
def many_calls(tuned_training):
    """Until calls are timed, in steps of many calls."""
    tuner, layer, optimizer, lines = tuned_training
    for _ in range(3):
        for _ in range(12):
            call(layer)
        optimizer.step()
    return tuner, layer, optimizer, tuner._groups[0]


def routes_of(own):
    return [one for one in own.timed if one.has_route]


def test_of_a_timed_call_the_rows_stay_and_no_route(many_calls, monkeypatch):
    tuner, layer, optimizer, own = many_calls
    made, place = [], routes.Route.__init__
    monkeypatch.setattr(
        routes.Route, "__init__", lambda self, *given: made.append(weakref.ref(self)) or place(self, *given)
    )
    for _ in range(12):
        call(layer)
    assert len(own.timed) > 16 and routes_of(own) == []
    assert all(one.rows == (96.0, 96.0) for one in own.timed)  # 48 tokens of two slots
    assert len(made) == 12 and not any(one() for one in made)


def test_with_a_capacity_few_routes_wait_for_the_device(many_calls, monkeypatch):
    """As on GPUs, where the rows are there once the device has come to the call."""
    tuner, layer, optimizer, own = many_calls
    over = []
    assert tuner_module._MOST_ROUTES == 16
    monkeypatch.setattr(tuner_module, "_MOST_ROUTES", 4)
    monkeypatch.setattr(tuner_calls.Timed, "has_rows", lambda self: self in over)
    for _ in range(12):
        call(layer)
    waiting = own.timed[-4:]
    assert routes_of(own) == waiting
    assert all(one.rows == (96.0, 96.0) for one in own.timed if one not in waiting)
    over += waiting[:3]
    own.hold(own.timed.pop())
    assert routes_of(own) == waiting[3:]
    told, measured = [], own.library.uniep_tuner_measured
    monkeypatch.setattr(own.library, "uniep_tuner_measured", lambda *given: told.append(given[3:]) or measured(*given))
    for _ in range(3):
        tuner.step()
    assert own.timed == [] and set(told) == {(96.0, 96.0)}


def test_rows_that_did_not_fit_are_no_fault_of_a_call(many_calls, monkeypatch):
    tuner, layer, optimizer, own = many_calls
    not_measured = []
    monkeypatch.setattr(own, "not_measured", not_measured.append)

    def overflow(self):
        raise uniep.CapacityError("planted")

    monkeypatch.setattr(routes.Route, "rows_of_ranks", overflow)
    held = list(own.timed)
    with pytest.raises(uniep.CapacityError, match="planted"):
        call(layer)
    assert own.timed == held and len(not_measured) == 1


@pytest.mark.parametrize("how", ["freeze", "close", "until"])
def test_nothing_is_kept_where_no_step_follows(how, many_calls):
    tuner, layer, optimizer, own = many_calls
    call(layer)
    assert own.timed
    late = own.timed[-1]
    if how == "until":
        own.library.uniep_tuner_freeze(own.handle)  # as the last step to tune in does
        tuner.step()
    else:
        getattr(tuner, how)()
    assert own.timed == []
    own.hold(late)  # of a call that was under way
    assert own.timed == []


@pytest.mark.parametrize(
    ("backend", "place"), [("cuda:nccl", "meta"), ("nccl", "meta"), ("cpu:gloo,cuda:nccl", "cpu"), ("gloo", "cpu")]
)
def test_measurements_travel_where_the_backend_takes_them(backend, place, monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: BackendConfig(Backend(backend)))
    monkeypatch.setattr(dist, "all_gather", lambda _, one, *, group, async_op: sent.append((one.device.type, async_op)))
    group = types.SimpleNamespace(process_group=None, device=torch.device("meta"), size=2, failure=None)
    tuner_exchange.Exchange(group).give(0, b"own")
    assert sent == [(place, place == "cpu")]


def test_arguments():
    for wrong in ({"until": -1}, {"budget": 0}, {"budget": 2}, {"batch": 0}, {"batch": 65}, {"job_group": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: {next(iter(wrong.values()))}; must be"):
            uniep.Tuner(**wrong)
    with uniep.Tuner(), pytest.raises(ValueError, match="there is another one"):
        uniep.Tuner()
    with uniep.Tuner() as tuner:
        tuner.step()
        assert tuner.decisions == [] and not tuner.frozen and tuner.spent == (0, 0, 0)


def test_structures_are_those_of_the_header():
    sizes = {"TunerLayer": 40, "TunerCheck": 32, "TunerOptions": 120, "TunerCall": 40, "TunerState": 56}
    header = pathlib.Path(HERE.parents[1] / "src" / "api" / "c_struct.h").read_text()
    names = {"TunerLayer": "layer", "TunerCheck": "check", "TunerOptions": "options", "TunerCall": "call"}
    names |= {"TunerState": "state", "TunerDecision": "decision"}
    for name, word in names.items():
        size = sizes.get(name, 64)
        assert f"kFirstSize<uniep_tuner_{word}> = {size};" in header
        assert library.ctypes.sizeof(getattr(library, name)) == size
