"""Timelines of calls, and their names in torch's profiler."""

import json
import subprocess

import pytest
import torch

import uniep
from layers import assert_same, make_layer, run_moe


def stages(path):
    events = json.loads(path.read_text())["traceEvents"]
    marks = [event["name"] for event in events if event["ph"] == "i"]
    return marks, {event["cat"] for event in events if event["ph"] == "X"} - {"wait"}


FORWARD = {"dispatch", "fc1", "fc2", "reduce"}


def test_calls_of_the_block_are_in_the_file(scratch, command):
    layer = make_layer([40])
    weights = layer.local(0, 1)
    expected = run_moe(layer, 0, weights)
    with uniep.trace(scratch / "both.json"):
        got = run_moe(layer, 0, weights)
    assert_same(got, expected)
    run_moe(layer, 0, weights)
    marks, found = stages(scratch / "both.json")
    assert marks == ["forward", "backward"]
    assert found > FORWARD
    assert any(stage.startswith("wgrad") for stage in found)
    with torch.no_grad(), uniep.trace(str(scratch / "rank{rank}.json")):
        for _ in range(3):
            uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], *weights)
    assert stages(scratch / "rank0.json") == (["forward"] * 3, FORWARD)
    svg = scratch / "both.svg"
    subprocess.run([command, "trace", scratch / "both.json", "--svg", svg], check=True)
    assert svg.stat().st_size > 1000


def test_compiled(scratch):
    layer = make_layer([40])
    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    with uniep.trace(scratch / "compiled.json"):
        compiled(layer.x[0], layer.ids[0], layer.probs[0], w1, w2).backward(layer.dy[0])
    assert stages(scratch / "compiled.json")[0] == ["forward", "backward"]


def test_errors(scratch):
    layer = make_layer([8])
    with uniep.Group(workers=2) as group:
        with uniep.trace(scratch / "outer.json", group):
            traced_already = pytest.raises(ValueError, match="group: it is traced already")
            with traced_already, uniep.trace(scratch / "inner.json", group):
                pass
            run_moe(layer, 0, layer.local(0, 1), group=group)
        assert stages(scratch / "outer.json")[0] == ["forward", "backward"]
        assert not (scratch / "inner.json").exists()
        no_folder = pytest.raises(OSError, match="nowhere/file.json")
        with no_folder, uniep.trace(scratch / "nowhere" / "file.json", group):
            pass
        with pytest.raises(KeyError), uniep.trace(scratch / "failed.json", group):
            run_moe(layer, 0, layer.local(0, 1), group=group)
            raise KeyError
        assert stages(scratch / "failed.json")[0] == ["forward", "backward"]
    with pytest.raises(ValueError, match="group: closed"), uniep.trace(scratch / "closed.json", group):
        pass


def test_names_in_the_profiler():
    layer = make_layer([40])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_moe(layer, 0, layer.local(0, 1))
        plan = uniep.place(layer.ids[0], layer.probs[0], 8, 64)
        uniep.combine(uniep.dispatch(layer.x[0], plan)[0], plan)
    counts = {
        event.key: event.count
        for event in profile.key_averages()
        if event.key.startswith("uniep.") and "(" not in event.key
    }
    assert counts == {
        "uniep.place": 2,
        "uniep.forward": 1,
        "uniep.backward": 1,
        "uniep.dispatch": 1,
        "uniep.combine": 1,
    }
