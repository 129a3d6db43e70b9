"""autotune(), its file, and what "auto" makes of it."""

import json

import pytest
import torch

import uniep
from layers import assert_same, make_layer, run_moe
from uniep import tuning


@pytest.fixture
def folder(scratch, monkeypatch):
    """An empty cache, and a group of this test alone."""
    monkeypatch.setenv("UNIEP_CACHE_DIR", str(scratch / "cache"))
    yield scratch / "cache"


@pytest.fixture
def slow(monkeypatch):
    """Times as written down here: what is slow and fast does not depend on the machine."""
    seconds = {"fusion=none": 0.5, "queue=dynamic": 0.9}

    def time(self, pair):
        return tuple(seconds.get(text, 1.0) for text in pair)

    monkeypatch.setattr(tuning._Measurement, "_time", time)


def test_the_fastest_is_kept(folder, slow):
    with uniep.Group("self", workers=3) as group:
        layer = uniep.MoELayer(64, 32, num_experts=8, topk=2, group=group)
        assert tuning.choose(group, 64, 32, 8, 2) == ("auto", "auto")
        assert uniep.autotune(layer, tokens=32, seconds=0.1) == ("fusion=none", "fusion=none")
        assert tuning.choose(group, 64, 32, 8, 2) == ("fusion=none", "fusion=none")
        assert tuning.choose(group, 64, 32, 8, 3) == ("auto", "auto")
        kept = json.loads((folder / "schedules.json").read_text())
        assert kept["schedules"][tuning.machine(group)]["H 64, I 32, E 8, K 2"]["forward"] == "fusion=none"
    with uniep.Group("self", workers=3) as group:
        assert tuning.choose(group, 64, 32, 8, 2) == ("fusion=none", "fusion=none")
    with uniep.Group("self", workers=2) as group:
        assert tuning.choose(group, 64, 32, 8, 2) == ("auto", "auto")


def test_what_is_not_faster_is_not_taken(folder, monkeypatch):
    monkeypatch.setattr(tuning._Measurement, "_time", lambda self, pair: (0.99 if pair[0] != "auto" else 1.0, 1.0))
    with uniep.Group("self", workers=3) as group:
        layer = uniep.Experts(8, 64, 32, group=group)
        assert uniep.autotune(layer, tokens=32, seconds=0.1, topk=2) == ("auto", "auto")


def test_refused_schedules_are_left_out(folder, slow, monkeypatch):
    monkeypatch.setitem(tuning._FORWARD, "cpu", ["tile.n=7", "queue=dynamic"])
    monkeypatch.setitem(tuning._BACKWARD, "cpu", [])
    with uniep.Group("self", workers=3) as group:
        layer = uniep.MoELayer(64, 32, num_experts=8, topk=2, group=group)
        assert uniep.autotune(layer, tokens=32, seconds=0.1) == ("queue=dynamic", "auto")


def test_measuring_runs_the_layer_and_leaves_it_alone(folder):
    with uniep.Group("self", workers=2) as group:
        layer = uniep.MoELayer(64, 32, num_experts=8, topk=2, group=group, save="redispatch")
        before = [parameter.detach().clone() for parameter in layer.parameters()]
        pair = uniep.autotune(layer, tokens=32, seconds=0.01)
        assert all(isinstance(text, str) for text in pair)
        for parameter, value in zip(layer.parameters(), before, strict=True):
            assert torch.equal(parameter, value) and parameter.grad is None


def test_auto_takes_it_and_the_bits_are_equal(folder, monkeypatch):
    batch = make_layer([40])
    weights = batch.local(0, 1)
    with uniep.Group("self", workers=2) as group:
        expected = run_moe(batch, 0, weights, group=group)
        asked = []
        resolve = group.engine.forward
        monkeypatch.setattr(
            group.engine, "forward", lambda config, text, *rest: asked.append(text) or resolve(config, text, *rest)
        )
        group.tuned[tuning.key(64, 32, 8, 2)] = ("fusion=none", "queue=dynamic")
        assert_same(run_moe(batch, 0, weights, group=group), expected)
        assert asked == [b"fusion=none"]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99, "schedules": {}}', '{"format": 1}'])
def test_a_broken_file_is_as_none(folder, content):
    folder.mkdir(parents=True)
    (folder / "schedules.json").write_text(content)
    with uniep.Group("self", workers=4) as group:
        assert group.tuned == {}


def test_an_empty_name_keeps_nothing(monkeypatch, slow):
    monkeypatch.setenv("UNIEP_CACHE_DIR", "")
    with uniep.Group("self", workers=3) as group:
        layer = uniep.MoELayer(64, 32, num_experts=8, topk=2, group=group)
        assert uniep.autotune(layer, tokens=8, seconds=0.1) == ("fusion=none", "fusion=none")
    with uniep.Group("self", workers=3) as group:
        assert group.tuned == {}


def test_errors():
    layer = uniep.MoELayer(64, 32, num_experts=8, topk=2)
    for options, text in (
        ({"tokens": 0}, "tokens: 0; must be 1 or more"),
        ({"seconds": 0}, "seconds: 0; must be above 0"),
        ({"topk": 9}, "topk: 9; must be 1 to num_experts, 8"),
    ):
        with pytest.raises(ValueError, match=text):
            uniep.autotune(layer, **options)
    with pytest.raises(ValueError, match="topk: None; must be 1 to num_experts, 8"):
        uniep.autotune(layer.experts)


def test_capacity_as_a_factor():
    batch = make_layer([64])
    weights = batch.local(0, 1)
    expected = run_moe(batch, 0, weights)
    assert_same(run_moe(batch, 0, weights, capacity=(1.0, 64)), expected)
    layer = make_layer([640], experts=8, topk=2)
    layer.ids[0][:] = torch.tensor([0, 1], dtype=torch.int32)  # 1280 rows, of two experts alone
    assert run_moe(layer, 0, layer.local(0, 1), capacity=(0.5, 640)).y.shape == (640, 64)
    with pytest.raises(uniep.CapacityError):
        run_moe(layer, 0, layer.local(0, 1), capacity=(0.01, 640))
    with pytest.raises(ValueError, match=r"capacity: \(0.0, 8\); must be \(rows or a factor, tokens\)"):
        run_moe(batch, 0, weights, capacity=(0.0, 8))
