"""bench/several_gpus.sh and what brings its results home, with programs and GPUs that are none."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from conftest import BUILD

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
PROGRAMS = {
    "nvidia-smi": "for gpu in 0 1 2 3; do echo GPU $gpu; done",
    "uniep": 'echo "$@ UNIEP_CACHE_DIR=${UNIEP_CACHE_DIR:-}" >>{folder}/called\n'
    '[[ "$*" != *timeline_backward* ]] && echo done',
    "torchrun": 'echo "torchrun $@" >>{folder}/called',
    # -c: whether something imports, - : the modules of the other layers
    "python3": '[ "$1" = -c ] && exit 0\n[ "$1" = - ] && { cat >/dev/null; exit "${MISSING:-0}"; }\n'
    'echo "python3 $@" >>{folder}/called',
    "uniep_gpu_layer_tests": 'echo "layer $@" >>{folder}/called',
    "uniep_gpu_model_tests": 'echo "model $@" >>{folder}/called',
}


def write_program(file, text):
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def several_gpus(folder, *words, **variables):
    """On four GPUs, with programs that note their calls: what it says, (kind, name) of its steps, and the calls."""
    for name, text in PROGRAMS.items():
        write_program(folder / name, text.replace("{folder}", str(folder)))
    (folder / "called").write_text("")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "UNIEP_LIBNCCL": "none", **variables}
    command = ["bash", str(BENCH / "several_gpus.sh"), str(folder), str(folder / "out"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    lines = [line.split() for line in done.stdout.splitlines()]
    steps = [(line[0], line[3]) for line in lines if line and line[0] in ("ok", "FAIL", "left", "skipped")]
    return done, steps, (folder / "called").read_text().splitlines()


def test_a_run_goes_on_where_the_last_one_ended(tmp_path):
    done, steps, called = several_gpus(tmp_path, "timelines")
    assert done.returncode == 1, done
    assert [kind for kind, _ in steps] == ["ok", "FAIL", "ok", "FAIL"]
    assert "timeline_backward_qwen3-30b (status 1)" in done.stdout
    assert len(called) == 4
    assert "--ranks 4 --devices 0,1,2,3 --shape qwen3-235b" in called[0]
    done, steps, called = several_gpus(tmp_path, "timelines")
    assert done.returncode == 1
    assert [kind for kind, _ in steps] == ["FAIL", "FAIL"]
    assert len(called) == 2 and all("--op backward" in line for line in called)


def test_what_the_run_cuts_is_left_for_the_next(tmp_path):
    write_program(tmp_path / "timeout", '[[ "$*" == *backward_qwen3-235b* ]] && exit 124\nexec "${@:4}"')
    done, steps, _ = several_gpus(tmp_path, "timelines", UNIEP_BENCH_SECONDS="100")
    assert done.returncode == 1
    assert [kind for kind, _ in steps] == ["ok", "left", "ok", "FAIL"]
    assert "timeline_backward_qwen3-235b (up to 180 s)" in done.stdout


def test_a_step_needs_a_third_of_its_limit(tmp_path):
    done, steps, called = several_gpus(tmp_path, "timelines", UNIEP_BENCH_SECONDS="59")
    assert done.returncode == 3 and called == []
    assert [kind for kind, _ in steps] == ["left"] * 4


def test_the_steps_that_are_asked_for(tmp_path):
    done, _, called = several_gpus(tmp_path, "timelines", UNIEP_BENCH_STEPS="^timeline_layer")
    assert done.returncode == 0
    assert len(called) == 2
    assert all("--op layer" in line for line in called)


def test_a_wrong_part_is_named(tmp_path):
    done, _, called = several_gpus(tmp_path, "timelines", "timelime")
    assert done.returncode == 2 and called == []
    assert "PART: timelime; legal are pilot" in done.stderr


def test_kernels_are_compiled_on_each_machine_where_a_step_needs_them(tmp_path):
    _, steps, called = several_gpus(tmp_path, "bytes", UNIEP_BENCH_STEPS="^layers_drawn_300(00|25)")
    assert steps == [("ok", f"{one}layers_drawn_{first}") for first in (30000, 30025) for one in ("compile_", "")]
    assert all(line.startswith("layer ") for line in called)
    assert ["--compile" in line for line in called] == [True, False, True, False]
    (tmp_path / "out" / "layers_drawn_30025.done").unlink()
    _, steps, _ = several_gpus(tmp_path, "bytes", UNIEP_BENCH_STEPS="^layers_drawn_300(00|25)")
    assert steps == [("ok", "compile_layers_drawn_30025"), ("ok", "layers_drawn_30025")]


def test_a_run_without_the_other_layers_does_not_begin(tmp_path):
    done, _, called = several_gpus(tmp_path, "exchange", MISSING="1")
    assert done.returncode == 2 and called == []
    done, steps, _ = several_gpus(tmp_path, "exchange", MISSING="1", ALLOW_MISSING="1")
    assert done.returncode == 0 and len(steps) == 4


def test_the_pilot_goes_on_with_its_turns_and_curves(tmp_path):
    variables = {"UNIEP_CACHE_DIR": str(tmp_path), "PILOT_CURVE_STEPS": "2000"}
    _, steps, called = several_gpus(tmp_path, "pilot", **variables)
    names = [name for _, name in steps]
    assert names.index("pilot_curves_deepseek-v2-lite") < names.index("pilot_graphs")
    pilots = [line for line in called if line.startswith("torchrun")]
    assert len(pilots) == 6 and all("--resume" in line for line in pilots)
    assert sum("--curve-steps 2000" in line for line in pilots) == 2


def test_searches_leave_the_default_alone(tmp_path):
    machine = tmp_path / "out" / "machine.json"
    machine.parent.mkdir()
    machine.write_text("{}")
    _, steps, called = several_gpus(tmp_path, "search", UNIEP_CACHE_DIR="mine")
    calls = {name: line for line in called for name in ("tune ", "schedule ") if line.startswith(name)}
    names = [name for _, name in steps]
    assert names[:3] == ["calibrate", "gain_forward", "gain_backward"]
    # Those that leave GPUs idle come last.
    assert names[-4:] == ["online", "points_1", "points_2", "points_backward"]
    of_mixtral = [line for line in called if "mixtral" in line and "search_gain" not in line]
    schedule, default, auto, tune, tuned = of_mixtral
    assert calls["schedule "] == schedule
    out = tmp_path / "out"
    assert f"--schedule {out}/schedule_mixtral.json" in default and "--schedule" not in auto
    assert "--export export_mixtral.json --json tune_mixtral.json --machine machine.json" in tune
    assert f"--tuned {out}/export_mixtral.json" in tuned and f"--json {out}/tuned_mixtral.json" in tuned
    assert not tune.endswith("=mine") and all(line.endswith("=mine") for line in (default, auto, tuned))


def test_what_its_limit_cuts_is_left_where_it_has_got_further(tmp_path):
    out = tmp_path / "out"
    script = (
        f'[[ "$*" == *measure_points* ]] || exec "${{@:4}}"\n[ -e {tmp_path}/stuck ] || echo {{}} >>{out}/points.jsonl'
    )
    write_program(tmp_path / "timeout", script + "\nexit 124")
    done, steps, _ = several_gpus(tmp_path, "search", UNIEP_BENCH_STEPS="^points_[12]")
    assert done.returncode == 3 and steps == [("left", "points_1"), ("left", "points_2")]
    (tmp_path / "stuck").touch()
    done, steps, _ = several_gpus(tmp_path, "search", UNIEP_BENCH_STEPS="^points_[12]")
    assert done.returncode == 1 and steps == [("FAIL", "points_1"), ("FAIL", "points_2")]
    (tmp_path / "timeout").unlink()
    done, steps, _ = several_gpus(tmp_path, "search", UNIEP_BENCH_STEPS="^points_[12]")
    assert done.returncode == 0 and [kind for kind, _ in steps] == ["ok", "ok"]


def test_a_cache_of_its_own_keeps_what_was_tried_and_takes_all_ones_kernels(tmp_path):
    folder, cache, kernels = tmp_path / "tuned", tmp_path / "cache", tmp_path / "kernels"
    for made in (folder, kernels):
        made.mkdir()
    (folder / "a.tried").write_text("before")
    (kernels / "all.tuned.json").write_text("another's")
    (kernels / "j.cubin").write_text(" kernel")
    script = 'cd "$UNIEP_CACHE_DIR"; cat a.tried j.cubin; touch b.tried b.tuned.json k.cubin; kill -TERM $PPID; exit 5'
    command = ["bash", str(BENCH / "with_cache.sh"), str(cache), str(folder), "bash", "-c", script]

    def run(**variables):
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})

    done = run(UNIEP_CACHE_DIR=str(kernels))
    assert done.returncode == 5 and done.stdout == "before kernel"
    assert sorted(file.name for file in folder.iterdir()) == ["a.tried", "b.tried", "b.tuned.json"]
    assert sorted(file.name for file in kernels.iterdir()) == ["all.tuned.json", "j.cubin", "k.cubin"]
    assert not (cache / "all.tuned.json").exists()
    assert run(UNIEP_CACHE_DIR="").returncode == 5  # kernels are kept nowhere
    assert run(UNIEP_CACHE_DIR=str(tmp_path / "new")).returncode == 5
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["j.cubin", "k.cubin"]


def pack(*words):
    return subprocess.run(["bash", str(BENCH / "pack.sh"), *map(str, words)], capture_output=True, text=True)


def test_results_travel_in_few_small_files(tmp_path):
    folder = tmp_path / "out"
    (folder / "tuned").mkdir(parents=True)
    texts = {
        "a.done": "",
        "a.jsonl": "{}\n",
        "tuned/b.tried": "b",
        "timeline.trace": "events",
        "tuned/k.cubin": "kernel",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    assert pack(folder, tmp_path / "packed").returncode == 0
    assert sorted(file.name for file in (tmp_path / "packed").iterdir()) == ["results.tar.xz", "timeline.trace.xz"]
    assert pack("--unpack", tmp_path / "packed", tmp_path / "again").returncode == 0
    files = [file for file in (tmp_path / "again").rglob("*") if file.is_file()]
    found = {file.relative_to(tmp_path / "again").as_posix(): file.read_text() for file in files}
    assert found == {name: text for name, text in texts.items() if not name.endswith(".cubin")}
    (folder / "noise").write_bytes(os.urandom(17 << 20))
    done = pack(folder, tmp_path / "packed")
    assert done.returncode == 1 and "larger than 16 MiB: results.tar.xz" in done.stderr


def layer_record(**more):
    ms = {"layer": 2.0, "gemms": 1.9, "torch GEMMs": 1.8, "nccl": 4.0, "deepep": 2.5}
    settings = {"op": "forward", "gpus": 8, "device": "H", "launch": "threads", "routing": None, "wgrad": "bf16"}
    settings |= {"schedule": None, "schedule_backward": None, "tokens": 8192, "warm_up": 0.3, "date": "2026-12-01"}
    return {**settings, "shape": "dsv3", "tflops": 500.0, "ms": ms, **more}


def test_what_is_made_of_results_without_a_gpu(tmp_path):
    slower = {"layer": 4.0, "torch GEMMs": 3.6, "nccl": 2.0}
    records = [layer_record(), layer_record(warm_up=0, ms=slower, date="2026-12-02"), layer_record(launch="processes")]
    (tmp_path / "layers_forward.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    layer = ["--ranks", "2", "--shape", "64,32,4,2", "--tokens", "64", "--trace", str(tmp_path / "timeline.trace")]
    subprocess.run([str(BUILD / "uniep"), "run", "--engine", "cpu", *layer], check=True, stdout=subprocess.DEVNULL)
    other = {"changes": "order.raster=4", "ms": 1.1, "ratio": 1.1, "calls": 20}
    tried = [{"changes": "the default", "ms": 1.0, "calls": 30}, other]
    search = {"shape": "2048,768,128,8", "tokens": 8192, "ranks": 4, "direction": "forward"}
    rows = [{**search, "tried": tried}, {**search, "tried": []}, {**search, "direction": "backward", "tried": tried}]
    (tmp_path / "gain_forward.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["bash", str(BENCH / "after_several_gpus.sh"), str(BUILD), str(tmp_path)]
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done
    assert "<svg" in (tmp_path / "timeline.svg").read_text()
    tables = (tmp_path / "tables.md").read_text()
    assert "Forward, 8 x H, threads, T 8192, uniform routing, 2026-12-01 to 2026-12-02:" in tables
    assert "| DeepSeek-V3 | **500** / 500 | 400 / - | 250 / **1000** | 556 / 556 |" in tables
    assert "Forward, 8 x H, processes, T 8192, uniform routing, 2026-12-01:" in tables
    lines = (tmp_path / "simulator_forward.txt").read_text().splitlines()
    assert lines[1].split()[:4] == ["4", "8192", "2048,768,128,8", "2"]
    limits = [f"up to {most} times the default" for most in (2, 1.3)]
    names = [line[:38].strip() for line in lines[2:]]
    assert names == [limits[0], "all", limits[1], "GEMMs times 1.1", "GEMMs or links"]


@pytest.mark.parametrize(
    "script", ["several_gpus.sh", "pack.sh", "with_cache.sh", "after_several_gpus.sh", "soak_gpus.sh"]
)
def test_without_arguments_scripts_show_all_of_how_they_are_called(script):
    done = subprocess.run(["bash", str(BENCH / script)], capture_output=True, text=True)
    assert done.returncode == 2
    comment = []
    for line in (BENCH / script).read_text().splitlines()[1:]:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").removeprefix(" "))
    assert done.stderr.splitlines() == comment
