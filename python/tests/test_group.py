"""What a Group tells of itself: errors so far, and the memory that it holds; how it ends."""

import datetime
import gc
import os
import signal
import threading
import time
import types

import pytest
import torch

import uniep
from layers import make_layer, run_moe, same_bits
from uniep.group import _arrival_limit, _tell_transport


def test_check_and_synchronize_after_calls_that_went_well_or_were_refused():
    with uniep.Group(workers=2) as group:
        group.check()
        layer = make_layer([16])
        run_moe(layer, 0, layer.local(0, 1), group=group)
        group.check()
        with pytest.raises(uniep.CapacityError):
            run_moe(layer, 0, layer.local(0, 1), group=group, capacity=(128, 16))
        group.check()  # the call itself has told, and nothing is left of it
        group.synchronize()
    with pytest.raises(ValueError, match="group: closed"):
        group.check()


@pytest.mark.parametrize(("status", "kind"), [(3, uniep.CapacityError), (4, TimeoutError)])
def test_check_raises_what_the_library_knows_of(status, kind, monkeypatch):
    """Calls that fail behind the host's back are of GPUs; here the library is told to say so."""
    with uniep.Group(workers=2) as group:
        monkeypatch.setattr(group.engine._library, "uniep_group_check", lambda handle: status)
        with pytest.raises(kind):
            group.check()


def test_the_slow_transport_is_a_warning_on_gpus_once(caplog):
    caplog.set_level("INFO", logger="uniep")
    gpu = types.SimpleNamespace(transport="torch", device=torch.device("cuda", 0), why="the ranks are on several hosts")
    for group in (gpu, gpu):
        _tell_transport(group)
    for changed in ({"why": "asked for"}, {"device": torch.device("cpu")}, {"transport": "native", "why": "one host"}):
        _tell_transport(types.SimpleNamespace(**vars(gpu) | changed))
    assert [record.levelname for record in caplog.records] == ["WARNING", *["INFO"] * 4]
    assert "transport torch: the ranks are on several hosts; nothing" in caplog.records[0].getMessage()


def test_memory():
    with uniep.Group(workers=2) as group:
        assert group.memory() == (0, 0)
        sizes = []
        for tokens in (16, 64, 16):
            layer = make_layer([tokens])
            run_moe(layer, 0, layer.local(0, 1), group=group)
            sizes.append(group.memory().symmetric)
        slots = 64 * 2 * (64 * 2 + 4)  # T K rows of H in bf16, and a dprob each
        assert 0 < sizes[0] < slots <= sizes[1] < 2 * slots
        assert sizes[2] == sizes[1]
        kept = torch.empty(1 << 20)
        assert group.memory() == (sizes[1], 0)
        del kept


def same(a, b):
    return all(same_bits(tensor, vars(b)[name]) for name, tensor in vars(a).items())


def test_trim_gives_memory_back_and_changes_no_bit():
    layer = make_layer([16])
    with uniep.Group(workers=2) as group:
        before = run_moe(layer, 0, layer.local(0, 1), group=group)
        assert group.memory().symmetric > 0
        group.trim()
        assert group.memory() == (0, 0)
        assert same(before, run_moe(layer, 0, layer.local(0, 1), group=group))


def test_abort_ends_calls_of_other_threads_and_a_new_group_gives_the_same_bits():
    layer = make_layer([64])
    expected = run_moe(layer, 0, layer.local(0, 1))
    for _ in range(20):
        group, caught, calls = uniep.Group(workers=2), [], []

        def call(group=group, caught=caught, calls=calls):
            try:
                while True:
                    run_moe(layer, 0, layer.local(0, 1), group=group)
                    calls.append(1)
            except TimeoutError as error:
                caught.append(str(error))

        caller = threading.Thread(target=call)
        caller.start()
        while not calls:
            time.sleep(0.001)
        group.abort()
        caller.join(timeout=60)
        assert not caller.is_alive()
        assert caught == ["group: aborted; the ranks need a new Group"]
        for refused in (group.check, group.recover, group.trim):
            with pytest.raises(TimeoutError, match="group: aborted"):
                refused()
        again = uniep.Group(workers=2)
        assert again is not group
        assert same(expected, run_moe(layer, 0, layer.local(0, 1), group=again))
        group.close()
        group.abort()
        again.close()


def test_a_forked_process_is_told_and_makes_its_own():
    layer = make_layer([16])
    group = uniep.Group(workers=2)

    def forward(group):  # without autograd, whose threads do not survive a fork either
        return uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], layer.w1, layer.w2, group=group)

    expected = forward(group)
    placement = uniep.place(layer.ids[0], layer.probs[0], layer.experts, 64, group=group)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            with pytest.raises(ValueError, match="group: of the process that forked this one"):
                forward(group)
            del placement
            group.close()
            own = uniep.Group(workers=2)
            assert own is not group and same_bits(forward(own), expected)
            own.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert same_bits(forward(group), expected)
    group.close()


def test_close_destroys_what_waited_for_a_call():
    layer = make_layer([16])
    group = uniep.Group(workers=2)
    placement = uniep.place(layer.ids[0], layer.probs[0], layer.experts, 64, group=group)
    with group.engine._lock:
        del placement
        assert group.engine._dead
    group.close()
    assert not group.engine._dead


class NotedLibrary:
    """A library that notes which functions are called."""

    def __init__(self, library):
        self.library, self.called = library, []

    def __getattr__(self, name):
        function = getattr(self.library, name)
        if name not in ("uniep_group_synchronize", "uniep_group_leave", "uniep_group_destroy"):
            return function

        def noted(*arguments):
            self.called.append(name.removeprefix("uniep_group_"))
            return function(*arguments)

        return noted


def test_close_is_behind_calls_unless_an_exception_leaves_or_a_call_runs():
    def closed(close):
        group = uniep.Group(workers=2)
        noted = group.engine._library = NotedLibrary(group.engine._library)
        close(group)
        group.close()  # is nothing more
        assert group.engine.closed
        return noted.called

    def leave_by_exception(group):
        with pytest.raises(KeyError), group:
            raise KeyError

    def close_beside_a_call(group):
        with group.engine._lock:
            group.close()
        group.engine._bury()

    in_order = ["synchronize", "leave", "destroy"]
    assert closed(lambda group: group.close()) == in_order
    assert closed(lambda group: group.__exit__(None, None, None)) == in_order
    assert closed(leave_by_exception) == in_order[1:]
    assert closed(close_beside_a_call) == in_order[1:]


def test_groups_are_those_that_live():
    before = uniep.groups()
    with uniep.Group(workers=2) as first, uniep.Group(workers=2, shared=False) as own:
        assert first is uniep.Group(workers=2) and own is not uniep.Group(workers=2, shared=False)
        third = uniep.Group("self", workers=3)
        found = [group for group in uniep.groups() if group not in before]
        assert found[:2] == [first, own] and found[-1] is third
        third.abort()
        assert third not in uniep.groups() and own in uniep.groups()
        own.close()
        assert uniep.Group(workers=2) is first and not first.engine.closed  # what is not shared ends alone
    assert uniep.groups() == before


@pytest.mark.parametrize("ends", [uniep.Group.abort, lambda group: None], ids=["aborted", "dropped"])
def test_a_group_that_nobody_closed_goes_with_its_last_reference(ends):
    threads, layer = [], make_layer([8])
    for _ in range(5):
        group = uniep.Group("self", device="cpu", shared=False, workers=4)
        run_moe(layer, 0, layer.local(0, 1), group=group)
        ends(group)
        del group
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads == threads[:1] * 5


def test_abort_of_all_groups():
    groups = [uniep.Group(workers=workers) for workers in (2, 3)]
    uniep.abort()
    for group in groups:
        with pytest.raises(TimeoutError, match="group: aborted"):
            group.check()
        group.close()


def test_layers_wait_as_long_as_collectives_may(monkeypatch):
    """For a rank that comes late; where nobody says another limit."""
    monkeypatch.delenv("UNIEP_ARRIVAL_TIMEOUT_S", raising=False)

    def limit(**timeout):
        options = types.SimpleNamespace(_timeout=datetime.timedelta(**timeout))
        pg = types.SimpleNamespace(_get_backend=lambda _: types.SimpleNamespace(options=options))
        return _arrival_limit(pg, torch.device("cuda", 0))

    assert (limit(minutes=3), limit(minutes=10), limit(hours=1), limit(days=99)) == (0, 0, 3600, 1e6)
    assert _arrival_limit(None, torch.device("cpu")) == 0

    def no_backend(_):
        raise RuntimeError("no backend")

    assert _arrival_limit(types.SimpleNamespace(_get_backend=no_backend), torch.device("cpu")) == 0
    monkeypatch.setenv("UNIEP_ARRIVAL_TIMEOUT_S", "5")
    assert limit(hours=1) == 0


@pytest.mark.parametrize(("given", "told"), [({}, 0), ({"arrival_timeout_s": 7}, 7)])
def test_the_library_is_told_the_limit(given, told, monkeypatch):
    options = []
    engine = uniep.group.Engine
    monkeypatch.setattr(uniep.group, "Engine", lambda device, of: options.append(of) or engine(device, of))
    with uniep.Group("self", device="cpu", shared=False, **given):
        pass
    assert options[0]["arrival_timeout_seconds"] == told
