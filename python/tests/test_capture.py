"""What is refused while torch.cuda.graph captures. Here no GPU captures: torch is told to say so."""

import pytest
import torch

import uniep
import uniep.layer
from layers import make_layer, run_moe, same_bits
from uniep import capture, engine, layer_stats


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def call(**options):
    layer = make_layer([16])
    return uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *layer.local(0, 1), **options)


@pytest.fixture
def group(monkeypatch):
    """One that says that it is on a GPU, where refusals ask for it."""
    with uniep.Group(workers=2) as own:
        check = capture.check_call

        def on_gpu(group, capacity):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group, "device", torch.device("cuda", 0))
                check(group, capacity)

        monkeypatch.setattr(capture, "check_call", on_gpu)
        yield own


def test_without_a_capacity(group, captured):
    with pytest.raises(ValueError, match="capacity: None, and a CUDA graph is captured.*legal is"):
        call(group=group)


def test_within_a_capacity(group, captured):
    """No check of the package stands in a captured call's way; the bits are those of another one."""
    layer = make_layer([16])
    weights = layer.local(0, 1)
    got = run_moe(layer, 0, weights, group=group, capacity=(4096, 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        expected = run_moe(layer, 0, weights, group=group)
    for (name, one), (_, other) in zip(got.items(), expected.items(), strict=True):
        assert same_bits(one, other), name


def test_transport_torch(group, captured, monkeypatch):
    monkeypatch.setattr(group, "transport", "torch")
    with pytest.raises(ValueError, match="transport 'torch' waits for the numbers of rows"):
        call(group=group, capacity=(4096, 16))


def test_a_layer_on_the_cpu(captured):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        group = uniep.Group(workers=2)
    with group, pytest.raises(ValueError, match="group: on cpu, and a CUDA graph is captured"):
        call(group=group, capacity=(4096, 16))


def test_place_and_new_groups(group, captured):
    layer = make_layer([16])
    with pytest.raises(ValueError, match="place: it waits for the number of rows, and a CUDA graph is captured"):
        uniep.place(layer.ids[0], layer.probs[0], 8, 64, group=group, capacity=(4096, 16))
    with pytest.raises(ValueError, match="group: a CUDA graph is captured; make the Group before"):
        uniep.Group(workers=5)


def test_nothing_of_a_graph_outlives_it(group, captured, monkeypatch):
    """Zero gradients that all layers share, and statistics, are not of captured calls."""
    monkeypatch.setattr(uniep.layer, "_zeros", {})
    layer = make_layer([16])
    weights = [torch.nn.Parameter(one) for one in layer.local(0, 1)]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    uniep.record_stats()
    y = uniep.moe(
        layer.x[0], layer.ids[0], layer.probs[0], *weights, group=group, capacity=(4096, 16), main_grad="param"
    )
    y.backward(layer.dy[0])
    assert uniep.layer._zeros == {} and not weights[0].grad.any()
    assert layer_stats.stats() == []
    uniep.record_stats(False)


def test_what_torch_caches_is_given_back_outside_of_captures_alone(monkeypatch):
    given, reserved = [], iter([3 << 20, 1 << 20] * 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("cache"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        engine._given_back(None, 0)
    assert given == []
    engine._given_back(None, 0)
    assert given == ["cache"]
