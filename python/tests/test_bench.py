"""Programs of bench/ run, and measure what they say; how long things take is no test."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from conftest import BUILD
from ranks import run_ranks

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
LAB = BENCH.parent / "lab"


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


def test_formulas_of_experts():
    """The gradients that the serialized layers compute are those of their formulas, by autograd in float64."""
    script = """
import sys, torch
torch._dynamo.config.disable = True
sys.path.insert(0, sys.argv[1])
import expert_formulas as f
torch.manual_seed(0)
counts, hidden, inter = [40, 0, 24], 32, 48
experts = torch.arange(3).repeat_interleave(torch.tensor(counts))
rows = f.Rows(torch.tensor(counts).cumsum(0).int(), experts, torch.rand(64))

def exact(name, w, x):
    parts = (x[:, None] @ w.w1[experts].transpose(1, 2))[:, 0]
    if name == "swiglu":
        gate, up = parts.chunk(2, -1)
        return ((torch.nn.functional.silu(gate) * up * p[:, None])[:, None] @ w.w2[experts].transpose(1, 2))[:, 0]
    if name == "relu2":
        return ((torch.relu(parts).square() * p[:, None])[:, None] @ w.w2[experts].transpose(1, 2))[:, 0]
    gate, up = (parts + w.b1[experts]).chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return ((a[:, None] @ w.w2[experts].transpose(1, 2))[:, 0] + w.b2[experts]) * p[:, None]

for name, formula in f.FORMULAS.items():
    columns = formula.halves * inter
    sizes = [(3, columns, hidden), (3, hidden, inter)] + ([(3, columns), (3, hidden)] if formula.bias else [])
    w = f.Weights(*(torch.randn(size).bfloat16() for size in sizes))
    x, dy = torch.randn(64, hidden).bfloat16(), torch.randn(64, hidden).bfloat16()
    y, saved = formula.forward(w, rows, x)
    got = formula.backward(w, rows, saved, dy)
    leaves = [one.double().requires_grad_() for one in (x, rows.probs, *w[: len(sizes)])]
    p = leaves[1]
    expected = exact(name, f.Weights(*leaves[2:]), leaves[0])
    expected.backward(dy.double())
    for one, other in zip((y, *got), (expected.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 0.02, (name, one.shape, float(error))
print("right")
"""
    done = subprocess.run([sys.executable, "-c", script, str(BENCH)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr[-2000:]


def several_gpus(folder, *words, **variables):
    """bench/several_gpus.sh on four GPUs that are none, with a `uniep` that notes what it is called with."""
    for name, text in {
        "nvidia-smi": "for gpu in 0 1 2 3; do echo GPU $gpu; done",
        "uniep": f'echo "$@ UNIEP_CACHE_DIR=${{UNIEP_CACHE_DIR:-}}" >>{folder}/called\n'
        '[[ -n "$SLOW" && "$*" == *"$SLOW"* ]] && exec sleep 50\n'
        '[[ "$*" != *backward* ]] && echo done',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "UNIEP_LIBNCCL": "none", **variables}
    command = ["bash", str(BENCH / "several_gpus.sh"), str(folder), str(folder / "out"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_several_gpus_go_on_where_they_were(tmp_path):
    first = several_gpus(tmp_path, "timelines")
    lines = first.stdout.splitlines()
    assert first.returncode == 1, first
    assert [line.split()[0] for line in lines if line and not line.startswith(" ")] == ["ok", "FAIL", "ok", "FAIL"]
    assert "timeline_backward_qwen3-30b (status 1)" in first.stdout
    called = (tmp_path / "called").read_text().splitlines()
    assert len(called) == 4
    assert "--ranks 4 --devices 0,1,2,3 --shape qwen3-235b" in called[0]
    again = several_gpus(tmp_path, "timelines")
    assert again.returncode == 1
    assert "ok" not in again.stdout
    called = (tmp_path / "called").read_text().splitlines()
    assert len(called) == 6
    assert all("--op backward" in line for line in called[4:])


def test_several_gpus_leave_what_the_run_has_no_time_for(tmp_path):
    slow = several_gpus(tmp_path, "timelines", UNIEP_BENCH_SECONDS="6", SLOW="backward_qwen3-235b")
    assert slow.returncode == 3
    kinds = [line.split()[0] for line in slow.stdout.splitlines() if line and not line.startswith(" ")]
    assert kinds == ["ok", "left", "left", "left"]
    assert "timeline_backward_qwen3-235b (up to 180 s)" in slow.stdout
    assert len((tmp_path / "called").read_text().splitlines()) == 2  # the last two did not begin


def test_several_gpus_run_the_steps_that_are_asked_for(tmp_path):
    some = several_gpus(tmp_path, "timelines", UNIEP_BENCH_STEPS="^timeline_layer")
    assert some.returncode == 0
    called = (tmp_path / "called").read_text().splitlines()
    assert len(called) == 2
    assert all("--op layer" in line for line in called)


def test_the_default_beside_a_search_is_not_what_it_found(tmp_path):
    several_gpus(tmp_path, "search", UNIEP_BENCH_STEPS="^(tune|default)_mixtral", UNIEP_CACHE_DIR="mine")
    tune, default = (tmp_path / "called").read_text().splitlines()
    assert tune.startswith("tune ") and tune.endswith(f"UNIEP_CACHE_DIR={tmp_path}/out/tuned")
    assert default.startswith("bench ") and default.endswith("UNIEP_CACHE_DIR=mine")


def test_search_gain_is_of_the_schedules_that_it_names(tmp_path):
    best = [{"schedule": {"n": n}, "simulated_ms": n} for n in (1, 2, 3)]
    solved = {"schedule": {"n": 3}, "predicted_ms": 0.9, "default_ms": 1.0, "best": best}
    quick = {"schedule": {"n": 1}, "predicted_ms": 0.9, "default_ms": 1.0}  # of eight, as auto takes it
    tried = [{"schedule": {"n": n}, "verdict": "slower", "ratio": r} for n, r in ((0, 1.0), (1, 0.9), (3, 0.97))]
    tried.append({"schedule": {"n": 4}, "verdict": "slower", "ratio": 0.8})
    tuned = {"tuned": [{"tried": tried, "ms": 1.6, "default_ms": 2.0, "changes": "n=4"}]}
    (tmp_path / "solve --simulate 64").write_text(json.dumps(solved))
    (tmp_path / "solve").write_text(json.dumps(quick))
    (tmp_path / "tune").write_text(json.dumps(tuned))
    program = tmp_path / "uniep"
    program.write_text(
        f'#!/bin/bash\necho "$@" >>{tmp_path}/called\nfile=$1\n'
        f'[[ "$*" != *"--simulate 64"* ]] || file="$1 --simulate 64"\ncat "{tmp_path}/$file"\n'
    )
    program.chmod(0o755)

    def row_of(*words):
        command = [sys.executable, str(BENCH / "search_gain.py"), str(program), "--cpu", "--ranks", "2", *words]
        command += ["--shapes", "64,32,8,2", "--json", str(tmp_path / "rows")]
        subprocess.run(command, check=True, capture_output=True)
        return json.loads((tmp_path / "rows").read_text().splitlines()[-1])

    row = row_of()
    expected = {"first": 0.97, "auto": 0.9, "best of 8": 0.9, "best": 0.8, "taken": 0.8}
    assert {name: row[name] for name in expected} == expected
    assert row_of("--direction", "backward")["auto"] == 1
    solved["schedule"] = {"n": 2}
    (tmp_path / "solve --simulate 64").write_text(json.dumps(solved))
    assert row_of()["direction"] == "backward" and len((tmp_path / "called").read_text().splitlines()) == 6  # known
    assert row_of("--machine", "h800")["first"] is None


def test_the_simulator_is_near_what_two_gpus_measured():
    measured = LAB / "2026-11-27-schedules-on-two-h200.jsonl"
    command = [sys.executable, str(BENCH / "simulator_errors.py"), str(BUILD / "uniep"), str(measured)]
    command += ["--machine", str(LAB / "2026-11-27-two-h200-calibrated.json")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    count, ratio, ratio_90, _, time_90, spearman = map(float, lines[-1].split()[1:])
    assert count > 400
    assert ratio < 2.5 and ratio_90 < 5.5 and time_90 < 8
    assert spearman > 0.7


def test_several_gpus_name_a_wrong_part(tmp_path):
    wrong = several_gpus(tmp_path, "timelines", "timelime")
    assert wrong.returncode == 2
    assert "PART: timelime; legal are pilot" in wrong.stderr
    assert not (tmp_path / "called").exists()


SOAK = {
    "nvidia-smi": "echo 0; echo 1",
    "python3": "tr '\\n' ' ' <{folder}/memory",  # asks the driver for memory
    "uniep_gpu_layer_tests": 'echo layer "$@" >>{folder}/called; echo "layer tests: 12 passed, 0 failed"',
    "uniep_gpu_failure_tests": 'echo failure "$@" >>{folder}/called; [ ! -e {folder}/broken ] || exit 1',
    "uniep_gpu_abort_tests": "exit 77",
    "uniep": "[ ! -e {folder}/alone ] || exit 1; exec sleep 60",
    "uniep_gpu_groups_tests": "[ ! -e {folder}/leak ] || printf '5\\n900\\n' >{folder}/memory",
    "uniep_gpu_backward_tests": "echo traffic tests: 1 passed",
}


@pytest.fixture
def soak(tmp_path):
    """bench/soak_gpus.sh for a second on two GPUs that are none: its exit status, lines, and what was called."""
    for name, text in SOAK.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text.replace('{folder}', str(tmp_path))}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "memory").write_text("5\n5\n")

    def run():
        (tmp_path / "called").write_text("")
        command = ["bash", str(BENCH / "soak_gpus.sh"), str(tmp_path), str(tmp_path / "out"), "1"]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        return done.returncode, done.stdout.splitlines(), (tmp_path / "called").read_text().splitlines()

    return run


def test_a_soak_goes_on_with_other_seeds_where_it_ended(soak, tmp_path):
    status, lines, called = soak()
    assert status == 0
    assert lines[0].startswith("round 1: 8 steps, 0 failed,")
    assert any("--first 100012 " in one and "--disturb 1" in one for one in called)
    rounds = len(lines) - 1
    assert lines[-1].startswith(
        f"{rounds} rounds, {8 * rounds} steps: 0 failed, {rounds} skipped; {37 * rounds} checks"
    )
    _, again, called = soak()
    assert again[0].startswith(f"round {rounds + 1}: 8 steps, 0 failed,")
    assert any(f"--first {100000 + 12 * (rounds + 1)} " in one for one in called)
    assert any(f"--seed {rounds + 1}" in one for one in called)


def test_a_soak_keeps_what_failed_in_any_run(soak, tmp_path):
    (tmp_path / "broken").touch()
    status, lines, _ = soak()
    assert status == 1
    assert lines[0].startswith("round 1: 8 steps, 1 failed failures,")
    assert (tmp_path / "out/1.failures.log").exists() and not (tmp_path / "out/1.layers.log").exists()
    (tmp_path / "broken").unlink()
    status, lines, _ = soak()
    assert status == 1 and ", 0 failed," in lines[0]


def test_a_soak_sees_memory_that_is_not_given_back(soak, tmp_path):
    (tmp_path / "leak").touch()
    status, lines, _ = soak()
    assert status == 1
    assert lines[0].startswith("round 1: 8 steps, 1 failed memory,")
    assert "at first: 5 5 , now: 5 900" in (tmp_path / "out/1.memory.log").read_text()


def test_a_soak_sees_that_no_other_process_had_the_gpu(soak, tmp_path):
    (tmp_path / "alone").touch()
    status, lines, _ = soak()
    assert status == 1
    assert lines[0].startswith("round 1: 8 steps, 1 failed shared_gpu,")
    assert "the other process had ended" in (tmp_path / "out/1.shared_gpu.log").read_text()
