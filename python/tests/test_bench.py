"""Programs of bench/ run, and measure what they say; how long things take is no test."""

import json
import pathlib
import subprocess
import sys

from ranks import run_ranks

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"


def test_overhead():
    done = subprocess.run(
        [sys.executable, str(BENCH / "python_overhead.py"), "--calls", "20", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["forward, C"] > 0 < found["forward and backward, C"]
    assert {"forward", "forward and backward", "forward, further tensor", "autograd alone"} < set(found)


def test_verifier_cost():
    options = ["--cpu", "--shapes", "small", "--tokens", "64", "--rounds", "1", "--seconds", "0.1", "--json"]
    text = run_ranks(2, BENCH / "verifier_cost.py", *options)
    found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    # Over gloo rows are seen as they arrive, so that no rank is only suspected but for a dprob's.
    assert found["planted"] == 12 and found["missed"] == [] and found["named"] + found["suspected"] == 12, found
    assert found["named"] >= 10 and found["false_alarms"] == 0 < found["check_forward"], found
