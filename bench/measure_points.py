"""Times Schedules that nobody chose, to hold the simulator against (simulator_errors.py): for each set one run of `uniep tune`, in which
the default and all others take turns on the same inputs.

    python3 bench/measure_points.py build/release/uniep --ranks 1|2 --json FILE [--sets SHAPE:TOKENS:ROUTING ...] [--direction forward]
        [--random 24] [--near 16] [--rounds 8] [--budget 8]

The Schedules are the same for all sets: --random drawn from all that are legal and have a kernel, whatever they cost (three quarters
with no SM left free), and --near that differ from the default in one to four fields, with values of such. ROUTING is uniform, zipf:S or as-eight (remote_routing.py, whose
file is made anew). Default sets: what one of eight ranks has of three models, T 2048 and 8192 on one GPU; on two also T 16384, zipf:1
and as-eight. What FILE has (records.py) is not measured again; rows are what simulator_errors.py reads. --list prints the Schedules of
the first set and measures nothing; it needs no GPU.

Searches have a cache of their own (with_cache.sh), which leaves yours as it is but for compiled kernels. What failed in a set, or ended
the program, is kept in FILE.tried and not met again. A set that fails is left out; the others follow, and the exit status is 1.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile

import numpy

import remote_routing
from records import Records, device_name

EXPERTS = {"4096,1536,{},8": 16, "2048,768,{},8": 16, "7168,2048,{},8": 32}  # of a rank
SAVES = "save.xg=keep,save.z=keep"
NONE_FREE = SAVES + ",comm.reserve_sms=0"
AS_EIGHT = "as-eight"
# Hundreds of programs that only look at Schedules: each would open the driver first, which takes up to a second.
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
SETTINGS = ("direction", "ranks", "random", "near", "seed", "rounds", "budget", "state")


def default_sets(ranks):
    shapes = [shape.format(ranks * experts) for shape, experts in EXPERTS.items()]
    kinds = [(2048, "uniform"), (8192, "uniform")]
    if ranks > 1:
        kinds += [(16384, "uniform"), (8192, "zipf:1"), (8192, AS_EIGHT)]
    return [(shape, *kind) for kind in kinds for shape in shapes]


def set_of(text):
    shape, tokens, routing = text.split(":", 2)
    return shape, int(tokens), routing


def schedule_command(options, shape, tokens, *more):
    engine = "cpu" if options.cpu else "cuda"
    return [options.uniep, "schedule", "--engine", engine, "--ranks", str(options.ranks), "--shape", shape, "--tokens", str(tokens),
            "--direction", options.direction, *more]


def sample(options, one, count, given):
    """Flat Schedules that are legal for the set `one`, with the fields `given`."""
    command = schedule_command(options, one[0], one[1], "--schedule", given, "--sample", str(count), "--seed", str(options.seed))
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=NO_GPU).stdout.splitlines()
    return [json.loads(line) for line in lines]


def is_legal(options, schedule, sets):
    words = [schedule_command(options, shape, tokens, "--schedule", json.dumps(schedule)) for shape, tokens, _ in sets]
    return all(subprocess.run(one, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=NO_GPU).returncode == 0 for one in words)


def schedules_of(options, sets):
    sets = sorted({(shape, tokens): (shape, tokens, routing) for shape, tokens, routing in sets}.values())
    draw = random.Random(options.seed)
    # Free SMs are what a job needs, not what a search is after; drawn, they would be half of the GPU in nearly all.
    all_fields, none_free = (sample(options, sets[0], 40 * (options.random + options.near), given) for given in (SAVES, NONE_FREE))
    filled = subprocess.run(schedule_command(options, *sets[0][:2]), check=True, stdout=subprocess.PIPE, env=NO_GPU)
    default = json.loads(filled.stdout)
    found = []
    for drawn, count in ((none_free, options.random - options.random // 4), (all_fields, options.random)):
        legal = (schedule for schedule in drawn if schedule not in found and is_legal(options, schedule, sets))
        found += itertools.islice(legal, count - len(found))
    other = ("save.", *(("backward.", "tile.dgrad", "tile.wgrad") if options.direction == "forward" else ("tile.fc",)))
    for schedule in all_fields[::-1]:
        if len(found) == options.random + options.near:
            break
        names = [name for name in schedule if schedule[name] != default.get(name) and not name.startswith(other)]
        changed = {name: schedule[name] for name in draw.sample(names, min(len(names), draw.randint(1, 4)))}
        if changed and changed not in found and is_legal(options, changed, sets):
            found.append(changed)
    return found


def forget_slower(kept):
    """What a cut run has left behind is timed again: else it would have no time."""
    for journal in pathlib.Path(kept).glob("*.tried*"):
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(line for line in lines if not line.startswith("slower\t")))


def run_to_its_end(command, folder):
    """Standard output, or None where the command fails. Signals to the whole group are the command's, which keeps what it has."""
    seen = []
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=folder)
    for number, handler in before.items():
        signal.signal(number, handler)
    if seen:
        sys.exit(128 + seen[0])
    return None if done.returncode else done.stdout


def measure(options, one, schedules, folder):
    """What `uniep tune` tried; None where it failed."""
    shape, tokens, routing = one
    kept = os.path.abspath(f"{options.json}.tried") if options.json else os.path.join(folder, "tried")
    cache = os.path.join(folder, "cache")
    for made in (kept, cache):
        os.makedirs(made, mode=0o700, exist_ok=True)
    forget_slower(kept)
    with open(os.path.join(folder, "schedules.txt"), "w") as file:
        file.writelines(json.dumps(schedule) + "\n" for schedule in schedules)
    if routing == AS_EIGHT:
        routing = "as-eight.npy"  # in all runs, as what was tried is kept by it
        _, _, experts, topk = map(int, shape.split(","))
        numpy.save(os.path.join(folder, routing), remote_routing.remote_ids(experts, options.ranks, tokens, topk))
    command = ["bash", os.path.join(os.path.dirname(os.path.abspath(__file__)), "with_cache.sh"), cache, kept, options.uniep, "tune",
               "--engine", "cpu" if options.cpu else "cuda", "--ranks", str(options.ranks), "--shape", shape, "--tokens", str(tokens),
               "--routing", routing, "--direction", options.direction, "--schedules", "schedules.txt", "--rounds", str(options.rounds),
               "--budget", str(options.budget), "--state", options.state, "--json", "-"]
    if not options.cpu:
        command += ["--devices", ",".join(map(str, range(options.ranks)))]
    found = run_to_its_end(command, folder)
    return found and json.loads(found)["tuned"][0]["tried"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--ranks", type=int, required=True, help="a GPU each")
    parser.add_argument("--sets", nargs="+", type=set_of, metavar="SHAPE:TOKENS:ROUTING")
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--random", type=int, default=24)
    parser.add_argument("--near", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget", type=int, default=8, metavar="SECONDS")
    parser.add_argument("--state", choices=("sustained", "paused"), default="sustained")
    parser.add_argument("--cpu", action="store_true", help="on the cpu engine, to try the program")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if os.sep in options.uniep:
        options.uniep = os.path.abspath(options.uniep)
    sets = options.sets or default_sets(options.ranks)
    schedules = schedules_of(options, sets)
    if options.list:
        print("\n".join(map(json.dumps, schedules)))
        return
    settings = {name: getattr(options, name) for name in SETTINGS}
    records = Records(options.json, {**settings, "device": None if options.cpu else device_name()})
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for one in sets:
            key = dict(zip(("shape", "tokens", "routing"), one))
            row = records.find(**key)
            if row is None:
                tried = measure(options, one, schedules, folder)
                row = tried and records.add(**key, tried=tried)
            if row is None:
                failed.append(":".join(map(str, one)))
                continue
            ratios = sorted(tried["ratio"] for tried in row["tried"] if "ratio" in tried)
            bad = sum(tried["verdict"] in ("failed", "wrong") for tried in row["tried"])
            print(f"{one[0]:17s} T {one[1]:5d} {one[2]:8s}  {len(ratios)} timed, {bad} failed or wrong; times over the default's: "
                  f"{ratios[0]:.3f} to {ratios[-1]:.3f}, median {ratios[len(ratios) // 2]:.3f}", flush=True)
    if failed:
        sys.exit("measure_points.py: no times of " + ", ".join(failed))


if __name__ == "__main__":
    main()
