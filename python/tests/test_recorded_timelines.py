"""The simulator beside timelines that two H200 have recorded, and a machine fitted to them; no GPU is needed.

uniep bench --op layer --ranks 2 --devices 0,1 --shape 7168,2048,4,2 --tokens 2048 --repeat 20 --warm-up 1
    --only layer --trace forward.trace.json
uniep bench --op backward ... --tokens 1024 ... --trace backward.trace.json
"""

import json
import lzma
import pathlib
import subprocess

import pytest

DATA = pathlib.Path(__file__).resolve().parents[2] / "tests" / "data"
TOKENS = {"forward": 2048, "backward": 1024}
GEMMS = {"forward": ("fc1", "fc2"), "backward": ("dgrad_fc1", "dgrad_fc2", "wgrad_fc1", "wgrad_fc2")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    for direction in TOKENS:
        packed = DATA / f"two_h200_{direction}.trace.json.xz"
        (folder / f"{direction}.trace.json").write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


def run(*arguments):
    return subprocess.run(arguments, capture_output=True, text=True)


def simulated_beside(command, recorded, direction, *more):
    shape = ["--shape", "7168,2048,4,2", "--ranks", "2", "--tokens", str(TOKENS[direction]), "--direction", direction]
    trace = str(recorded / f"{direction}.trace.json")
    return run(command, "simulate", "--engine", "cuda", *shape, "--against", trace, "--json", "-", *more)


@pytest.mark.parametrize("direction", TOKENS)
def test_the_simulator_has_the_tiles_of_gpus_and_their_times(direction, command, recorded):
    done = simulated_beside(command, recorded, direction, "--machine", "h200")
    assert done.returncode == 0, done.stderr
    against = json.loads(done.stdout)["against"]
    timeline, simulated = against["timeline"], against["simulated"]
    assert timeline["stages"].keys() == simulated["stages"].keys()
    for stage in (*GEMMS[direction], "dispatch"):
        measured, predicted = timeline["stages"][stage], simulated["stages"][stage]
        assert measured["tiles"] == predicted["tiles"] > 0
        ratio = predicted["tile_us"] / measured["tile_us"]
        assert abs(ratio - 1) < (0.1 if stage != "dispatch" else 0.3), (stage, ratio)
    assert 0.88 < simulated["end_ms"] / timeline["end_ms"] < 1.05


def test_a_timeline_of_another_call_is_refused(command, recorded):
    done = simulated_beside(command, recorded, "forward", "--schedule", "order.raster=4")
    assert done.returncode == 2 and "is of something else" in done.stderr, done.stderr


def test_a_machine_fitted_to_them_is_nearer(command, recorded, tmp_path):
    """It is written, is read again, and predicts the calls that it was fitted to better than the shipped one."""
    traces = [str(recorded / f"{direction}.trace.json") for direction in TOKENS]
    machine = tmp_path / "machine.json"
    done = run(command, "calibrate", "--traces", *traces, "--out", str(machine))
    assert done.returncode == 0 and "2 timelines fitted" in done.stdout, done.stderr

    def error(of):
        found = []
        for direction in TOKENS:
            against = json.loads(simulated_beside(command, recorded, direction, "--machine", of).stdout)["against"]
            found.append(abs(against["simulated"]["end_ms"] / against["timeline"]["end_ms"] - 1))
        return sum(found) / len(found)

    assert error(str(machine)) < error("h200")
