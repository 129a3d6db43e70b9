"""autotune(), its file, and what "auto" makes of it."""

import itertools
import json
import logging
import os
import pathlib
import stat
import subprocess

import pytest
import torch

import uniep
from layers import assert_same, make_layer, run_moe
from uniep import reserved_sms, tuning
from uniep.numerics import PLAIN

SIZES = "H 64, I 32, E 8, K 2"
PLAIN_NAMES = {"activation": "swiglu", "router_weight": "activation", "bias": False}


@pytest.fixture
def folder(scratch, monkeypatch):
    """An empty cache, and a group of this test alone."""
    monkeypatch.setenv("UNIEP_CACHE_DIR", str(scratch / "cache"))
    yield scratch / "cache"


@pytest.fixture
def slow(monkeypatch):
    """Times as written down here: what is slow and fast does not depend on the machine."""
    seconds = {"fusion=none": 0.5, "queue=dynamic": 0.9}

    def times(self, pairs):
        return [tuple(seconds.get(text, 1.0) for text in pair) for pair in pairs]

    monkeypatch.setattr(tuning._Measurement, "_times", times)


def test_the_fastest_is_kept(folder, slow):
    with uniep.Group("self", workers=3) as group:
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
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
    times = {"auto": 1.0}
    monkeypatch.setattr(
        tuning._Measurement, "_times", lambda self, pairs: [(times.get(pair[0], 0.99), 1.0) for pair in pairs]
    )
    with uniep.Group("self", workers=3) as group:
        layer = uniep.Experts(num_experts=8, hidden=64, intermediate=32, group=group)
        assert uniep.autotune(layer, tokens=32, seconds=0.1, topk=2) == ("auto", "auto")


def test_refused_schedules_are_left_out(folder, slow, monkeypatch):
    monkeypatch.setitem(tuning._FORWARD, "cpu", ["tile.n=7", "queue=dynamic"])
    monkeypatch.setitem(tuning._BACKWARD, "cpu", [])
    with uniep.Group("self", workers=3) as group:
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
        assert uniep.autotune(layer, tokens=32, seconds=0.1) == ("queue=dynamic", "auto")


def test_schedules_take_turns(folder, monkeypatch):
    """Clocks that slow down by a tenth of a percent a call favour none of them; what is 3 % faster is found."""
    rounds, calls = [], itertools.count()

    def times(self, pairs):
        rounds.append(pairs)
        taken = [(1 + 1e-3 * next(calls)) * (0.97 if text == "queue=dynamic" else 1.0) for text, _ in pairs]
        return [(one, 1.0) for one in taken]

    monkeypatch.setattr(tuning._Measurement, "_times", times)
    monkeypatch.setitem(tuning._BACKWARD, "cpu", [])
    with uniep.Group("self", workers=3) as group:
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
        assert uniep.autotune(layer, tokens=32, seconds=300) == ("queue=dynamic", "auto")
    whole = [pairs for pairs in rounds if len(pairs) == 1 + len(tuning._FORWARD["cpu"])]
    assert len(whole) > 4
    assert all(one == other[::-1] for one, other in itertools.pairwise(whole))


def test_measuring_runs_the_layer_and_leaves_it_alone(folder):
    with uniep.Group("self", workers=2) as group:
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group, save="redispatch")
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


def test_what_is_not_legal_beside_collectives_is_not_used(folder, caplog):
    """An entry is of calls that leave no SM; here fewer are left than it has dispatch. On GPUs pairs of CTAs need an
    even number."""
    batch = make_layer([40])
    pair = "comm.where=sms,comm.dispatch_sms=3", "fusion=none"
    with caplog.at_level(logging.WARNING, "uniep"), uniep.Group("self", workers=8) as group:
        group.tuned[SIZES] = pair
        assert tuning.choose(group, 64, 32, 8, 2) == pair and not caplog.messages
        group.reserved = 6
        assert tuning.choose(group, 64, 32, 8, 2) == ("auto", "auto")
        assert tuning.tuned_sizes(group, "swiglu", "activation", False) == (((64, 32, 8, 2), ("auto", "auto")),)
        for _ in range(2):
            run_moe(batch, 0, batch.local(0, 1), group=group)
        (line,) = caplog.messages
        assert line.startswith(
            f"{SIZES}: the tuned schedules are not used here: illegal schedule: comm.dispatch_sms=3: with"
        )
        group.reserved = 1
        assert tuning.choose(group, 64, 32, 8, 2) == pair
        group.reserved = None  # not known: the call itself says so
        assert tuning.choose(group, 64, 32, 8, 2) == pair


def test_a_whole_schedule_lends_what_the_default_lends(folder, monkeypatch):
    """As `uniep tune` writes it: with all fields, those of SMs that only copy being 0."""
    with uniep.Group("self", workers=4) as group:
        whole = json.loads(
            group.engine.resolve(tuning._config(group, (64, 32, 8, 2), PLAIN), 0, b"comm.where=warps,queue=dynamic")
        )
        entry = {
            "direction": "forward",
            "tokens": 64,
            "shape": {"hidden": 64, "intermediate": 32, "experts": 8, "topk": 2},
        }
        entry |= {"numerics": {**PLAIN_NAMES, "combine_groups": 0}, "schedule": whole}
        monkeypatch.setattr(group.engine, "tuned_schedules", lambda file: json.dumps({"schedules": [entry]}))
        forward, _ = tuning._of_tune(group, None)[SIZES]
        assert "comm.dispatch_sms=0" in forward and reserved_sms.leave(forward, 2, True).endswith("comm.lend_sms=on")


def test_a_file_that_can_not_be_written_leaves_nothing(folder, slow, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING, "uniep"), uniep.Group("self", workers=3) as group:
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
        assert uniep.autotune(layer, tokens=32, seconds=0.1) == ("fusion=none", "fusion=none")
    assert any("is not written" in line for line in caplog.messages) and not list(folder.glob("*.json"))


def test_others_may_read_what_is_kept(folder, slow):
    with uniep.Group("self", workers=3) as group:
        uniep.autotune(
            uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group), tokens=32, seconds=0.1
        )
    assert stat.S_IMODE((folder / "schedules.json").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 99, "schedules": {}}', '{"format": 1}', '{"format": 1, "schedules": [3]}']
)
def test_a_broken_file_is_as_none(folder, content):
    folder.mkdir(parents=True)
    (folder / "schedules.json").write_text(content)
    with uniep.Group("self", workers=4) as group:
        assert group.tuned == {}


DAMAGED = {
    "no backward": (SIZES, {"forward": "auto"}),
    "no texts": (SIZES, {"forward": "auto", "backward": None}),
    "no object": (SIZES, ["auto", "auto"]),
    "not legal": (SIZES, {"forward": "order.raster=99", "backward": "auto"}),
    "not legal in backward": (SIZES, {"forward": "auto", "backward": "order.raster=99"}),
    "no schedule": (SIZES, {"forward": "auto", "backward": "no such field=1"}),
    "no text of UTF-8": (SIZES, {"forward": "\ud800", "backward": "auto"}),
    "no name": ("the fast one", {"forward": "auto", "backward": "auto"}),
    "no activation": (f"{SIZES} --activation wrong", {"forward": "auto", "backward": "auto"}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_entry_is_a_miss_and_a_line(folder, caplog, damage):
    name, entry = DAMAGED[damage]
    batch = make_layer([40])
    with uniep.Group("self", workers=4) as group:
        good = {"H 64, I 32, E 8, K 3": {"forward": "fusion=none", "backward": "auto"}}
        content = {"format": 1, "schedules": {tuning.machine(group): {name: entry, **good}}}
    folder.mkdir(parents=True)
    (folder / "schedules.json").write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, "uniep"), uniep.Group("self", workers=4) as group:
        assert group.tuned == {"H 64, I 32, E 8, K 3": ("fusion=none", "auto")}
        run_moe(batch, 0, batch.local(0, 1), group=group)
    (line,) = caplog.messages
    assert line.startswith(f"{folder}/schedules.json: the entry {name!r} is left out: ")


def test_entries_that_are_none_are_written_again(folder, slow, caplog):
    with uniep.Group("self", workers=3) as group:
        folder.mkdir(parents=True)
        content = {"format": 1, "schedules": {tuning.machine(group): [], "another machine": "kept"}}
        (folder / "schedules.json").write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, "uniep"), uniep.Group("self", workers=3) as group:
        assert group.tuned == {} and len(caplog.messages) == 1
        uniep.autotune(
            uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group), tokens=32, seconds=0.1
        )
        kept = json.loads((folder / "schedules.json").read_text())["schedules"]
        assert list(kept[tuning.machine(group)]) == [SIZES] and kept["another machine"] == "kept"


def test_what_is_tuned_is_for_layers_of_the_same_numerics(folder, slow, monkeypatch):
    """backward.wgrad=mixed, for one, is not legal on GPUs where biases are weighted behind FC2."""
    options = {"bias": True, "router_weight": "output", "activation": "swiglu:alpha=1.5,limit=7"}
    with uniep.Group("self", workers=3) as group:
        resolved = []
        config = group.engine.config
        monkeypatch.setattr(
            group.engine, "config", lambda *sizes, **more: resolved.append(more["numerics"]) or config(*sizes, **more)
        )
        uniep.autotune(
            uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group, **options),
            tokens=32,
            seconds=0.1,
        )
        assert {(one.bias, one.router_weight, one.up_limit) for one in resolved} == {(1, 1, 7.0)}
    with uniep.Group("self", workers=3) as group:
        ((name, pair),) = group.tuned.items()
        assert name.startswith(f"{SIZES} --activation swiglu:alpha=1.5,") and pair == ("fusion=none", "fusion=none")
        own = "swiglu:alpha=1.5,limit=7", "output", True
        assert tuning.choose(group, 64, 32, 8, 2, *own) == pair
        assert tuning.choose(group, 64, 32, 8, 2) == ("auto", "auto")
        assert tuning.tuned_sizes(group, *own) == (((64, 32, 8, 2), pair),)
        assert tuning.tuned_sizes(group, *own[:2], False) == ()


def test_the_folder_can_be_written_by_its_owner_alone(scratch, slow, monkeypatch):
    """So that the cache of kernels in it is read."""
    monkeypatch.setenv("UNIEP_CACHE_DIR", str(scratch / "new" / "cache"))
    before = os.umask(0o002)
    try:
        with uniep.Group("self", workers=3) as group:
            uniep.autotune(
                uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group), tokens=32, seconds=0.1
            )
    finally:
        os.umask(before)
    assert (scratch / "new" / "cache" / "schedules.json").exists()
    for place in (scratch / "new", scratch / "new" / "cache"):
        assert stat.S_IMODE(place.stat().st_mode) == 0o755


@pytest.fixture
def tune(folder):
    """Runs `uniep tune`; gives its entries."""
    program = pathlib.Path(os.environ.get("UNIEP_BUILD", ""), "uniep")
    if not program.exists():
        pytest.skip("UNIEP_BUILD has no uniep")

    def run(*options):
        layer = ("--engine", "cpu", "--ranks", "1", "--workers", "3", "--shape", "64,32,8,2", "--tokens", "64")
        search = ("--candidates", "1", "--budget", "1", "--export", str(folder / "export.json"))
        folder.mkdir(exist_ok=True)
        subprocess.run([program, "tune", *layer, *search, *options], check=True, capture_output=True)
        return json.loads((folder / "export.json").read_text())

    return run


def fields(text):
    return dict(one.split("=") for one in text.split(","))


def test_what_uniep_tune_found_is_taken(folder, tune, monkeypatch):
    found = {entry["direction"]: entry["schedule"] for entry in tune()["schedules"]}
    assert set(found) == {"forward", "backward"}
    with uniep.Group("self", workers=3) as group:
        forward, backward = tuning.choose(group, 64, 32, 8, 2)
        assert tuning.choose(group, 64, 32, 8, 3) == tuning.choose(group, 64, 32, 8, 2, bias=True) == ("auto", "auto")
        for text, entry in ((forward, found["forward"]), (backward, found["backward"])):
            assert "save.xg" not in fields(text) and "comm.reserve_sms" not in fields(text)
            assert {name: str(entry[name]) for name in fields(text)} == fields(text)
        layer = make_layer([64])
        schedules = "auto", "fusion=none"
        assert_same(*(run_moe(layer, 0, layer.local(0, 1), group=group, schedule=one) for one in schedules))
    with uniep.Group("self", workers=2) as group:
        assert tuning.choose(group, 64, 32, 8, 2) == ("auto", "auto")


def test_a_file_goes_before_what_is_kept(folder, tune, slow, monkeypatch, caplog):
    kept = tune()
    with uniep.Group("self", workers=3) as group:
        uniep.autotune(
            uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group), tokens=32, seconds=0.1
        )
    with uniep.Group("self", workers=3) as group:
        assert tuning.choose(group, 64, 32, 8, 2)[0] == "fusion=none"  # autotune()'s
    (entry,) = (entry for entry in kept["schedules"] if entry["direction"] == "forward")
    entry["schedule"]["order.raster"] = 3
    larger = json.loads(json.dumps(entry)) | {"tokens": 8192}
    larger["schedule"]["order.raster"] = 5
    named = folder / "named.json"
    named.write_text(json.dumps({"format": kept["format"], "schedules": [larger, entry]}))
    monkeypatch.setenv("UNIEP_TUNED", str(named))
    with uniep.Group("self", workers=3) as group:
        forward, backward = tuning.choose(group, 64, 32, 8, 2)
        assert fields(forward)["order.raster"] == "5"  # with most tokens
        assert backward == "auto"
    with uniep.Group("self", workers=2):
        assert "has no entry for this machine and 1 ranks" in caplog.text
    named.write_text("{")
    for file in (named, folder / "missing.json"):
        monkeypatch.setenv("UNIEP_TUNED", str(file))
        with pytest.raises(ValueError, match=f"UNIEP_TUNED: '{file}'"):
            uniep.Group("self", workers=3)


def test_an_empty_name_keeps_nothing(monkeypatch, slow):
    monkeypatch.setenv("UNIEP_CACHE_DIR", "")
    with uniep.Group("self", workers=3) as group:
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
        assert uniep.autotune(layer, tokens=8, seconds=0.1) == ("fusion=none", "fusion=none")
    with uniep.Group("self", workers=3) as group:
        assert group.tuned == {}


def test_errors():
    layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2)
    for options, text in (
        ({"tokens": 0}, "tokens: 0; must be 1 or more"),
        ({"seconds": 0}, "seconds: 0; must be above 0"),
        ({"seconds": float("inf")}, "seconds: inf; must be above 0, and finite"),
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


def test_kernels_are_compiled_before_anything_is_timed(folder, slow, monkeypatch):
    """Of all schedules that are measured, as the calls give them; one that is not legal here is no error."""
    monkeypatch.setitem(tuning._FORWARD, "cpu", ["fusion=none", "comm.where=sms,comm.dispatch_sms=3"])
    monkeypatch.setitem(tuning._BACKWARD, "cpu", ["queue=dynamic"])
    with uniep.Group("self", workers=8) as group:
        group.reserved = 6
        asked = []
        compile_kernels = group.engine.compile
        monkeypatch.setattr(group.engine, "compile", lambda *given: asked.append(given[1:3]) or compile_kernels(*given))
        times = tuning._Measurement._times
        monkeypatch.setattr(tuning._Measurement, "_times", lambda *given: asked.append("timed") or times(*given))
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
        assert uniep.autotune(layer, tokens=32, seconds=0.1) == ("fusion=none", "queue=dynamic")
    end = b"comm.reserve_sms=6"
    assert asked[:3] == [(0, [end, b"fusion=none," + end]), (1, [end, b"queue=dynamic," + end]), "timed"]


def test_a_kernel_that_does_not_compile_is_met_where_it_is_measured(folder, slow, monkeypatch):
    with uniep.Group("self", workers=3) as group:

        def broken(*_):
            raise uniep.DeviceError("NVRTC says no")

        monkeypatch.setattr(group.engine, "compile", broken)
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
        assert uniep.autotune(layer, tokens=32, seconds=0.1) == ("fusion=none", "fusion=none")
