"""uniep.stats(), and the ranges in torch's profiler."""

import sys
import threading
import time

import pytest
import torch

import uniep
from uniep.engine import Engine
from uniep.layer_stats import name_layer

EXPERTS, TOPK = 8, 2


@pytest.fixture
def recording():
    uniep.record_stats()
    yield
    uniep.record_stats(False)


def layer(schedule="auto", shared=True):
    return uniep.MoELayer(
        hidden=64,
        intermediate=32,
        num_experts=EXPERTS,
        topk=TOPK,
        group=uniep.Group("self", device="cpu", shared=shared),
        schedule=schedule,
    )


def step(module, tokens=40):
    x = torch.randn(tokens, 64).bfloat16().requires_grad_()
    module(x).float().sum().backward()


def test_nothing_is_kept_unless_asked_for():
    step(layer())
    assert uniep.stats() == []


def test_another_thread_looks_while_calls_come_and_go(recording):
    modules, looks, errors, over = [layer() for _ in range(4)], [], [], threading.Event()

    def look():
        while not over.is_set():
            try:
                looks.append(len(uniep.stats()))
            except Exception as error:
                errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            for module in modules:
                step(module, tokens=16)
    finally:
        over.set()
        looking.join()
        sys.setswitchinterval(before)
    assert not errors, errors[0]
    assert len(looks) > 100 and max(looks) == 2  # entries: of layers without a name, by direction


def test_nobody_waits_for_a_call_of_another_thread(recording):
    module = layer()
    step(module)
    group = module.experts.group
    held, found = group.memory(), []

    def look():
        group.check()
        found.extend((group.memory(), uniep.stats()))

    with group.engine._lock:  # as inside of a call
        looker = threading.Thread(target=look, daemon=True)
        looker.start()
        looker.join(timeout=30)
        assert found[0] == held and [one.calls for one in found[1]] == [1, 1]
    assert all(one.ms > 0 for one in uniep.stats())


def test_one_rank(recording):
    module = layer(schedule=("fusion=pairs", "fusion=layer"))
    name_layer(module.experts.down_proj, "the first")
    step(module)
    step(module, tokens=30)
    forward, backward = uniep.stats()
    assert forward.layer == backward.layer == "the first"
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.calls == backward.calls == 2
    assert forward.rows == backward.rows == 30 * TOPK  # of the newest call
    assert forward.rows_max_over_mean == 1.0
    assert (forward.schedule, forward.fusion, forward.fused) == ("fusion=pairs", "pairs", True)
    assert (backward.schedule, backward.fusion, backward.fused) == ("fusion=layer", "layer", True)
    assert forward.ms > 0 and backward.ms > 0
    for one in (forward, backward):
        assert 0 < one.exposed_dispatch_ms <= one.wait_ms < one.ms and 0 <= one.sum_ms < one.ms
    assert forward.sum_ms > 0  # those of backward may be hidden by weight gradients


def test_which_calls_are_timed(recording, monkeypatch):
    module, started = layer(), []
    monkeypatch.setattr(Engine, "start_timer", lambda engine, timer: started.append(timer))

    def timed(every, calls):
        uniep.record_stats(timed_every=every)
        found = []
        for number in range(calls):
            started.clear()
            module(torch.randn(4, 64).bfloat16())
            found += [number] * len(started)
        return found

    assert timed(every=3, calls=8) == [1, 4, 7]
    assert timed(every=1, calls=3) == [0, 1, 2]
    assert timed(every=0, calls=3) == []
    with pytest.raises(ValueError, match="timed_every: -1; must be 0"):
        uniep.record_stats(timed_every=-1)


def test_a_call_that_is_timed_gives_the_same_bits(recording):
    module = layer()
    x = torch.randn(40, 64).bfloat16()
    first, second = module(x), module(x)
    assert uniep.stats()[0].sum_ms is not None
    assert torch.equal(first, second)


def test_times_stay_until_there_are_newer_ones(recording):
    module = layer()
    for _ in range(2):
        step(module)
    times = uniep.stats()[0].wait_ms
    for _ in range(3):
        step(module)
        assert uniep.stats()[0].wait_ms == times


def test_layers_without_a_name_share_the_entry_of_their_shape(recording):
    for module in (layer(schedule="fusion=none"), layer(schedule="fusion=none")):
        step(module)
    forward, _ = uniep.stats()
    assert forward.layer == "H 64, I 32, E 8, K 2"
    assert forward.calls == 2 and forward.fused is False


def test_no_tokens(recording):
    step(layer(), tokens=0)
    forward, _ = uniep.stats()
    assert forward.rows == 0 and forward.rows_max_over_mean is None


def test_beginning_again_forgets(recording):
    step(layer())
    uniep.record_stats()
    assert uniep.stats() == []


def test_a_call_that_the_device_has_not_finished_is_not_looked_at(recording, monkeypatch):
    from uniep import layer_stats

    module = layer()
    step(module)
    finished = uniep.stats()[0]
    monkeypatch.setattr(layer_stats.Span, "is_over", lambda self: False)
    step(module, tokens=8)
    step(module, tokens=9)
    step(module, tokens=10)
    waiting = uniep.stats()[0]
    assert waiting.calls == 4 and waiting.rows == finished.rows
    monkeypatch.undo()
    assert uniep.stats()[0].rows == 10 * TOPK


def test_ranges_of_the_profiler():
    module = layer()
    name_layer(module.experts.down_proj, "mine")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(module)
    names = {event.key for event in profile.key_averages()}
    assert {"uniep.forward (mine)", "uniep.backward (mine)"} <= names
    assert uniep.stats() == []


def test_calls_that_check_another_one_are_not_the_layers(recording):
    module = layer()
    with uniep.Verifier(every=1, budget=1) as verifier:
        for number in range(2):  # forward and backward
            step(module)
            before = uniep.stats()
            assert [one.calls for one in before] == [number + 1] * 2
            assert verifier.step() == [] and verifier.checks == number + 1
            assert uniep.stats() == before


def test_a_closed_group_takes_nothing_from_the_others(recording):
    kept, closed = layer("fusion=pairs"), layer(shared=False)
    for module, name in ((kept, "kept"), (closed, "closed")):
        name_layer(module.experts.down_proj, name)
        step(module)
    closed.experts.group.close()
    found = {(one.layer, one.direction): one for one in uniep.stats()}
    assert len(found) == 4
    for direction in ("forward", "backward"):
        assert found["kept", direction].rows == 40 * TOPK
        assert found["closed", direction].calls == 1 and found["closed", direction].rows is None
