"""Programs of bench/ run, and measure what they say; how long things take is no test."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time
import types

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


def test_optimizer_wait():
    sizes = ["--layers", "1", "--tokens", "8", "--shape", "64,32,4,2", "--steps", "1", "--blocks", "1"]
    found = json.loads(run_ranks(2, BENCH / "optimizer_wait.py", "--cpu", "--json", *sizes).strip().splitlines()[-1])
    assert found["transport"] == "torch" and min(found["with the wait"], found["without"], found["ratio"]) > 0


def test_shapes_are_the_programs(command, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import shapes

    line = re.search(r"--shape .*names: (.*)", subprocess.check_output([command, "info", "--help"], text=True))
    assert list(shapes.SHAPES) == line[1].split(", ")
    for name, (hidden, intermediate, experts, topk) in shapes.SHAPES.items():
        options = ["--engine", "cpu", "--tokens", "1", "--shape", name, "--json", "-"]
        found = json.loads(subprocess.check_output([command, "info", *options]))["shape"]
        assert found == {"hidden": hidden, "intermediate": intermediate, "experts": experts, "topk": topk}, name
    assert set(shapes.FOUR) <= shapes.SHAPES.keys() and not shapes.ONLY_HERE.keys() & shapes.SHAPES.keys()


def test_one_table_of_shapes():
    """Of eight ranks' share DeepSeek-V3 has 32 experts, which is no other model of that name."""
    repeated = {path.name for path in BENCH.glob("*.py") if re.search(r"\(7168, 2048, \d+, 8\)", path.read_text())}
    assert repeated == {"shapes.py"}


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


def test_search_gain_asks_of_auto_what_the_program_asks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import search_gain

    source = (BENCH.parent / "src/cli/solver_choice.cpp").read_text()
    asked = dict(re.findall(r"k(|Short)Error = ([0-9.]+)", source))
    assert {name: float(value) for name, value in asked.items()} == {"": search_gain.LONG, "Short": search_gain.SHORT}


def test_search_gain_is_of_the_schedules_that_it_names(tmp_path):
    best = [{"schedule": {"n": n}, "simulated_ms": n} for n in (1, 2, 3)]
    solved = {"schedule": {"n": 3}, "predicted_ms": 0.9, "default_ms": 1.0, "best": best}
    quick = {"schedule": {"n": 1}, "predicted_ms": 0.86, "default_ms": 1.0}  # of eight, as auto takes it
    tried = [{"schedule": {"n": n}, "verdict": "slower", "ratio": r} for n, r in ((0, 1.0), (1, 0.9), (3, 0.97))]
    tried.append({"schedule": {"n": 4}, "verdict": "slower", "ratio": 0.8})
    found = {"tried": tried, "ms": 1.6, "default_ms": 2.0, "changes": "n=4"}
    tuned = {"tuned": [{"direction": direction, **found} for direction in ("forward", "backward")]}
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
    assert row_of("--direction", "backward")["auto"] == 0.9
    solved["schedule"] = {"n": 2}
    (tmp_path / "solve --simulate 64").write_text(json.dumps(solved))
    assert row_of()["direction"] == "backward" and len((tmp_path / "called").read_text().splitlines()) == 6  # known
    quick["predicted_ms"] = 0.88  # too little for auto
    (tmp_path / "solve").write_text(json.dumps(quick))
    row = row_of("--machine", "h800")
    assert row["first"] is None and row["auto"] == 1


# Runs a script of bench/ several times as on four GPUs, whose torch takes two milliseconds for everything. Prints of
# each run whether it failed, what it printed, the calls of `uniep`, and the records in FILE.
ON_FOUR_GPUS = """
import contextlib, importlib, io, json, os, pathlib, subprocess, sys
import torch
folder, bench, script, *runs = sys.argv[1:]
folder = pathlib.Path(folder)
torch.cuda.device_count, torch.cuda.get_device_name = lambda: 4, lambda: os.environ.get("GPU", "one")
torch.cuda.nccl.version = lambda: (2, 28)
torch.cuda.empty_cache = lambda: None
sys.path.insert(0, bench)
import compare, compare_layers
compare.TorchGemms = lambda *_: None
compare.run_torch = lambda *_: [2.0]
def theirs(options, ranks, shape, keys):
    return {key: {"ms": {"torch GEMMs": 1.5, "nccl": 4.0}, "bytes": {"nccl": 7}} for key in keys}
compare_layers.their_results = theirs
for variables in map(json.loads, runs):
    (folder / "called").write_text("")
    os.environ.update({"CUT": "", **variables})
    sys.argv = [script, str(folder / "uniep"), *variables["OPTIONS"].split(), "--json", str(folder / "FILE")]
    failed, output = False, io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            importlib.import_module(script).main()
    except subprocess.CalledProcessError:
        failed = True
    records = [json.loads(line) for line in (folder / "FILE").read_text().splitlines()]
    print(json.dumps([failed, output.getvalue(), (folder / "called").read_text().splitlines(), records]))
"""
# What --only names. The shape CUT ends it.
MEASURED = """
import json, os, sys
words = sys.argv[2:]
value_of = lambda name: words[words.index(name) + 1]
if value_of("--shape") == os.environ["CUT"]: sys.exit(9)
print(*words, file=open(sys.argv[1], "a"))
ms = {"median": 1.0, "all": [1.0]}
results = [{"name": name, "ms": ms, "tflops": 600.0} for name in value_of("--only").split(",")]
more = {"memory": {"forward": {"saved_bytes": 5}}, "shape": {}, "rows_per_expert": [[1]]}
print(json.dumps({"results": results, **more}))
"""


@pytest.fixture
def on_four_gpus(tmp_path):
    programs = {"nvidia-smi": 'echo "${GPU:-one}"'}
    programs["uniep"] = f"exec {sys.executable} -c '{MEASURED}' {tmp_path}/called \"$@\""
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(script, options, *runs):
        words = [json.dumps({"OPTIONS": options, **variables}) for variables in runs]
        command = [sys.executable, "-c", ON_FOUR_GPUS, str(tmp_path), str(BENCH), script, *words]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize(
    ("script", "options", "second"),
    [
        ("compare_layers", "--op forward,backward --rounds 1", "4096,14336,8,2"),
        ("compare", "", "mixtral"),
        ("launch_modes", "--rounds 1 --devices 0,1,2,3", "mixtral"),
        ("backward_ways", "--rounds 1 --ranks 4", "4096,14336,8,2"),
    ],
)
def test_what_a_cut_run_has_measured_is_not_measured_again(on_four_gpus, script, options, second):
    options += " --tokens 64 --shapes qwen3-30b,mixtral"
    cut, again, known, other = on_four_gpus(script, options, {"CUT": second}, {}, {}, {"GPU": "another"})
    failed, _, calls, records = cut
    assert failed and calls
    assert {record["shape"] for record in records} == {"qwen3-30b"} and all("date" in record for record in records)
    failed, text, more_calls, all_records = again
    assert not failed and all_records[: len(records)] == records and len(all_records) == 2 * len(records)
    assert len(more_calls) == len(calls) and all(second in call for call in more_calls)
    assert "qwen3-30b" in text and "mixtral" in text
    assert known == [False, text, [], all_records]
    assert len(other[2]) == 2 * len(calls) and len(other[3]) == 4 * len(records)


def test_layers_have_bytes_and_the_routing_of_both_sides(on_four_gpus):
    options = "--routing zipf:1 --tokens 64 --shapes mixtral --rounds 1"
    ((_, _, calls, records),) = on_four_gpus("compare_layers", options, {})
    assert records[0]["bytes"] == {"nccl": 7, "layer": {"forward": {"saved_bytes": 5}}}
    assert records[0]["routing"] == "zipf:1"
    assert all("routing.npy" in call for call in calls)
    script = """
import argparse, sys
sys.path.insert(0, sys.argv[1])
import compare_layers
options = argparse.Namespace(routing="zipf:1", as_eight=False)
ids = compare_layers.ids_of(options, 4, "qwen3-30b", 2000)
assert (ids == compare_layers.ids_of(options, 4, "qwen3-30b", 2000)).all()
assert all(len(set(row)) == 8 for row in ids.tolist())
counts = [int((ids == expert).sum()) for expert in range(128)]
assert counts[0] > 0.7 * 8000 > sum(counts[64:72]) and min(counts) > 0 and ids.shape == (8000, 8)
"""
    done = subprocess.run([sys.executable, "-c", script, str(BENCH)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_layer_as_a_training_job_calls_it(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCH))
    import compare_fused
    import torch
    import training_layer

    import uniep

    called, moe = [], uniep.moe

    def recorded(*args, schedule, main_grad, **options):
        called.append((schedule, main_grad))
        return moe(*args, main_grad=main_grad, **options)  # a CPU has too few workers for these Schedules

    monkeypatch.setattr(uniep, "moe", recorded)

    def draw(*size):
        return torch.randn(*size, dtype=torch.bfloat16)

    tokens, topk, experts, hidden, inter = 16, 2, 4, 32, 16
    own = types.SimpleNamespace(
        x=draw(tokens, hidden),
        dy=draw(tokens, hidden),
        probs=torch.full((tokens, topk), 0.5),
        ids=torch.rand(tokens, experts).topk(topk).indices,
        tokens=tokens,
        weights=types.SimpleNamespace(w1=draw(experts, 2 * inter, hidden), w2=draw(experts, hidden, inter)),
    )
    layer = object.__new__(compare_fused.UniEP)  # which would open a GPU
    layer.uniep, layer.group = uniep, None
    texts = {given: (f"forward {given}", f"backward {given}") for given, _ in training_layer.JOBS.values()}
    ways = training_layer.our_ways(own, layer, texts)
    forward = ["alone", "reserve 8", "reserve 16", "lend 16"]
    assert [name for name, op in ways if op == "forward"] == forward
    assert [name for name, op in ways if op == "step"] == [*forward, "main_grad", "job 8", "job 16", "job 16 lent"]
    for way in ways.values():
        way()
    alone, eight, sixteen, lent = (f"comm.reserve_sms={one}" for one in ("0", "8", "16", "16,comm.lend_sms=on"))
    free = [alone, alone, eight, eight, sixteen, sixteen, lent, lent, alone, eight, sixteen, lent]
    assert [schedule for schedule, _ in called] == [texts[one] for one in free]
    sums = [main_grad for _, main_grad in called if main_grad is not None]
    assert [main_grad is None for _, main_grad in called] == 8 * [True] + 4 * [False]
    assert all(tensor.dtype == torch.float32 and tensor.abs().max() > 0 for tensor in sums[0])

    rounds = {"step": {"alone": [2.0, 2.0, 4.0], "job 8": [2.2, 2.4, 4.4], "job 16": [3.0, 4.0, 6.0]}}
    rounds["step"] |= {"NCCL": [6.0, 6.0, 6.0], "torch GEMMs": [1.0, 2.0, 3.0]}
    training_layer.print_table("step", [{"shape": "small", "tokens": 8, "rounds": rounds}])
    title, _, row = capsys.readouterr().out.strip().splitlines()
    assert title.split(" | ")[3:5] == ["job 8 / alone", "job 16 / alone"]
    assert row == "| small | 8 | 2.000 | 1.100 | 1.500 | 6.000 | 2.000 | 2.000 | 1.500 |"


def test_a_models_calls(tmp_path):
    options = ["--cpu", "--shapes", "small", "--tokens", "32", "--rounds", "1", "--json", str(tmp_path / "calls")]
    text = run_ranks(2, BENCH / "model_calls.py", *options)
    record = json.loads((tmp_path / "calls").read_text())
    assert set(record["rounds"]) == {
        f"{way}, {one}" for way in ("model", "apart") for one in ("by need", "in a capacity")
    }
    assert all(ms[0] > 0 for ms in record["rounds"].values()) and "small 32: model, by need" in text


def test_layers_have_the_same_bytes_on_one_rank():
    command = [sys.executable, str(BENCH / "same_bytes.py"), str(BUILD / "uniep"), "--engine", "cpu", "--ranks", "2"]
    command += ["--tokens", "8", "--shapes", "256,128,8,2"]
    same = subprocess.run([*command, "--one-rank", "256,128,8,2"], capture_output=True, text=True)
    assert same.returncode == 0, same
    assert same.stdout == "256,128,8,2, one rank: the same y, z, dx, dprobs, dw1, dw2\n"


def test_the_simulator_is_near_what_two_gpus_measured():
    measured = LAB / "2026-11-27-schedules-on-two-h200.jsonl"
    command = [sys.executable, str(BENCH / "simulator_errors.py"), str(BUILD / "uniep"), str(measured)]
    command += ["--machine", str(LAB / "2026-11-28-two-h200-calibrated-as-layers-took-turns.json")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    simulator, *baselines = ([float(value) for value in line[38:].split()] for line in lines[-3:])
    count, ratio, ratio_90, within, within_90, time, time_90, spearman, most_spearman = simulator
    assert count > 400
    assert ratio < 2.1 and ratio_90 < 4.8 and within < 2.4 and within_90 < 6.2 and time < 4 and time_90 < 7.5
    assert 0.8 < most_spearman < 0.9  # of two measurements; of one with a prediction without errors its square root
    assert 0.8 < spearman < most_spearman**0.5
    for _, *errors, of_baseline in baselines:
        assert errors[0] > ratio and errors[1] > ratio_90 and of_baseline < spearman
        assert errors[2] > within and errors[3] > within_90 and errors[4] > time


def test_the_simulators_errors_of_sets_that_say_what_they_are(tmp_path):
    default = {"changes": "the default", "calls": 8, "ms": 1.0, "ratio": 1.0, "ratio_95": [1.0, 1.0]}
    slow = {**default, "changes": "tile.stages=2", "schedule": {"tile.stages": 2}, "ms": 1.4, "ratio": 1.4}
    fast = {**default, "changes": "order.raster=6", "schedule": {"order": {"raster": 6}}, "ms": 1.01, "ratio": 1.01}
    sets = [
        {
            "shape": "256,128,8,2",
            "tokens": tokens,
            "ranks": ranks,
            "routing": routing,
            "direction": direction,
            "tried": [default, slow, fast],
        }
        for tokens, ranks, routing, direction in (
            (64, 1, "uniform", "forward"),
            (128, 2, "as-eight", "forward"),
            (64, 2, "zipf:1", "backward"),
        )
    ]
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(json.dumps(sets[0]) + "\n" + json.dumps(sets[1]) + "\n")
    second.write_text(json.dumps(sets[2]) + "\n")
    points = tmp_path / "points"

    def lines_of(*more):
        command = [sys.executable, str(BENCH / "simulator_errors.py"), str(BUILD / "uniep"), str(first), str(second)]
        done = subprocess.run([*command, *more], check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    lines = lines_of("--points", str(points), "--fields", "--most", "2")
    assert [line[:38].strip() for line in lines[1:4]] == [
        "1 64 256,128,8,2",
        "2 128 256,128,8,2 as-eight",
        "2 64 256,128,8,2 backward zipf:1",
    ]
    assert [line.split()[0] for line in lines[4:6]] == ["tile.stages=2", "order.raster=6"]
    totals = {line[:38].strip(): int(line[38:43]) for line in lines[-5:]}
    assert totals == {
        "up to 1.3 times the default": 6,
        "all": 9,
        "up to 2 times the default": 9,
        "GEMMs times 1.1": 9,
        "GEMMs or links": 9,
    }
    told = [json.loads(line) for line in points.read_text().splitlines()]
    assert [(one["ranks"], one["tokens"], one["routing"]) for one in told[::3]] == [
        (1, 64, "uniform"),
        (2, 128, "as-eight"),
        (2, 64, "zipf:1"),
    ]
    assert told[1]["predicted_ratio"] == told[1]["predicted_ms"] / told[0]["predicted_ms"]
    assert told[0]["predicted_ms"] != told[3]["predicted_ms"] != told[6]["predicted_ms"]
    assert lines_of("--routing", "as-eight", "--ranks", "2")[1].startswith("2 128 256,128,8,2 as-eight")
    even = [{**one, "routing": "uniform"} for one in sets[1:]]
    second.write_text("".join(json.dumps(one) + "\n" for one in even))
    lines_of("--points", str(points))
    uniform = [json.loads(line) for line in points.read_text().splitlines()][6:]
    assert (
        uniform[0]["predicted_ms"] != told[3]["predicted_ms"] and uniform[3]["predicted_ms"] != told[6]["predicted_ms"]
    )
    second.write_text(json.dumps(sets[2]) + "\n")
    assert lines_of("--direction", "backward")[2].startswith("up to 2 times the default")


# Instead of `uniep`: says how it was called, and a time that is longer for paused clocks.
SIMULATES = """#!/bin/bash
echo "$@" >>{folder}/called
[[ "$*" == *"--state paused"* ]] && ms=2 || ms=1
echo "{\\"ms\\": $ms, \\"load\\": 1, \\"limits_ms\\": {\\"gemm\\": 1, \\"links\\": 1}}"
"""


@pytest.fixture
def simulates(tmp_path):
    program = tmp_path / "uniep"
    program.write_text(SIMULATES.replace("{folder}", str(tmp_path)))
    program.chmod(0o755)
    return program


def set_of(schedules=2, **told):
    default = {"changes": "the default", "calls": 8, "ms": 1.0, "ratio": 1.0, "ratio_95": [1.0, 1.0]}
    others = [{**default, "changes": f"order.raster={raster}"} for raster in range(2, schedules + 1)]
    return {"shape": "64,32,8,2", "tokens": 64, "ranks": 2, "tried": [default, *others], **told}


def test_a_routing_is_written_once_and_before_it_is_read(simulates, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import remote_routing
    import simulator_errors

    made, right = [], remote_routing.remote_ids

    def slowly(*sizes):
        made.append(sizes)
        time.sleep(0.1)
        return right(*sizes)

    monkeypatch.setattr(remote_routing, "remote_ids", slowly)
    rows = tmp_path / "rows"
    sets = [set_of(16, routing="as-eight"), set_of(16, routing="as-eight", tokens=32)]
    rows.write_text("".join(json.dumps(one) + "\n" for one in sets))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(sys, "argv", ["simulator_errors.py", str(simulates), str(rows)])
    simulator_errors.main()
    assert made == [(8, 2, 64, 2), (8, 2, 32, 2)]
    called = (tmp_path / "called").read_text().splitlines()
    assert len(called) == 64 and all(".npy" in line for line in called)


def test_the_simulators_errors_without_numpy(simulates, tmp_path):
    rows = tmp_path / "rows"
    rows.write_text(json.dumps(set_of()) + "\n")
    script = str(BENCH / "simulator_errors.py")
    code = "import runpy, sys; sys.modules['numpy'] = None; del sys.argv[0]; "
    code += "runpy.run_path(sys.argv[0], None, '__main__')"
    command = [sys.executable, "-c", code, script, str(simulates), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[1].startswith("2 64 64,32,8,2"), done


def test_the_simulators_errors_are_of_the_state_and_device_of_each_set(simulates, tmp_path):
    rows = tmp_path / "rows"
    sets = [set_of(device="one H200"), set_of(device="one H100"), set_of(state="paused", device="one H200"), set_of()]
    rows.write_text("".join(json.dumps(one) + "\n" for one in sets))

    def lines_of(*more):
        command = [sys.executable, str(BENCH / "simulator_errors.py"), str(simulates), str(rows), *more]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return [line for line in done.stdout.splitlines() if line.startswith("2 64")]

    names = [(line[:38].strip(), line.split("  ")[-1]) for line in lines_of()]
    plain, paused = "2 64 64,32,8,2", "2 64 64,32,8,2 paused"
    assert names == [(plain, "one H200"), (plain, "one H100"), (paused, "one H200"), (plain, "-")]
    states = re.findall(r"--state (\w+)", (tmp_path / "called").read_text())
    assert len(states) == 14 and states.count("paused") == 2  # warm GPUs: alone, and in turn
    # What a set does not say is what the option says.
    devices = [line.split("  ")[-1] for line in lines_of("--device", "one H200", "--state", "sustained")]
    assert devices == ["one H200", "one H200"]


def test_what_is_held_out_is_what_no_description_was_fitted_to(simulates, tmp_path):
    rows = tmp_path / "rows"
    rows.write_text(json.dumps(set_of(40)) + "\n" + json.dumps(set_of(5, shape="7168,32,8,2")) + "\n")
    command = [sys.executable, str(BENCH / "simulator_errors.py"), str(simulates), str(rows), "--held-out"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    some, whole = (int(line[38:43]) for line in lines[1:3])
    assert 5 < some < 25 and whole == 5
    source = (BENCH.parent / "tests/support/measured_points.cpp").read_text()
    assert "kHeldOutHidden = 7168" in source and "hash_of(changes) % 3 == 0" in source


def test_schedules_that_take_turns_share_a_power_limit(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import simulator_errors

    def report(*more):
        command = [str(BUILD / "uniep"), "simulate", "--ranks", "1", "--tokens", "4096", "--shape", "2048,768,16,8"]
        command += ["--engine", "cuda", "--json", "-", *more]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    clock = simulator_errors.clock_of("h200")
    alone = report()
    limit = simulator_errors.limit_of(clock, [5, 3], [alone, alone])
    # Calls that are alike have the clock of one alone: the program and the script work it out alike.
    assert report("--limit-clock", f"{limit:.6g}")["clock_ghz"] == pytest.approx(alone["clock_ghz"], rel=0.004)
    light = report("--schedule", "comm.reserve_sms=100")
    assert light["load"] < 0.5 < alone["load"]
    beside = simulator_errors.limit_of(clock, [1, 1], [alone, light])
    often = simulator_errors.limit_of(clock, [1, 9], [alone, light])
    assert limit < beside < often
    assert report("--limit-clock", f"{often:.6g}")["ms"] < 0.99 * alone["ms"]


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
