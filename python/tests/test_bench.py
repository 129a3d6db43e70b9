"""bench/python_overhead.py runs, and measures what it says; how long things take is no test."""

import json
import pathlib
import subprocess
import sys

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench" / "python_overhead.py"


def test_overhead():
    done = subprocess.run(
        [sys.executable, str(BENCH), "--calls", "20", "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["forward, C"] > 0 < found["forward and backward, C"]
    assert {"forward", "forward and backward", "forward, further tensor", "autograd alone"} < set(found)
