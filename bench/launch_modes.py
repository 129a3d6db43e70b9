"""Forward layers with all ranks in one process and with a process a GPU, in turn, and what a placement before each layer adds.

Prints one Markdown table of medians over --rounds. `forward` is a call by its GPU's clock, of each call the slowest GPU's, the GPUs
warm. The last columns are of 20 layers back to back by the host's clock until all are done: what a layer with a placement of its own,
by need and within a capacity, takes above one with a placement at hand. What FILE has (records.py) is not measured again.

    python3 bench/launch_modes.py build/release/uniep [--devices 0,1] [--rounds 5] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess

from records import Records, device_name

LAUNCHES = ("threads", "processes")
FORWARD = "layer"
MODEL = "20 layers"
BY_NEED = "20 layers and placements"
IN_CAPACITY = "20 layers and placements in a capacity"
RESULTS = (FORWARD, MODEL, BY_NEED, IN_CAPACITY)


def measure(options, launch, shape, tokens):
    """Milliseconds by name."""
    ranks = len(options.devices.split(","))
    command = [options.uniep, "bench", "--op", "layer", "--launch", launch, "--shape", shape, "--tokens", str(tokens), "--ranks",
               str(ranks), "--devices", options.devices, "--repeat", str(options.repeat), "--only", ",".join(RESULTS), "--json",
               "-", *(["--warm-up", str(options.warm_up)] if options.warm_up else [])]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {result["name"]: result["ms"]["median"] for result in report["results"]}


def line_of(record):
    """Of the table."""
    rounds = record["rounds"]  # by launch mode, each round's milliseconds by name
    forward = {launch: statistics.median(times[FORWARD] for times in rounds[launch]) for launch in LAUNCHES}
    # Of each round by itself: the clocks of two rounds may differ.
    above = {(launch, name): statistics.median(times[name] - times[MODEL] for times in rounds[launch])
             for launch in LAUNCHES for name in (BY_NEED, IN_CAPACITY)}
    ratio = forward["processes"] / forward["threads"]
    cells = [record["shape"], record["tokens"], *(f"{forward[launch]:.3f}" for launch in LAUNCHES), f"{ratio:.3f}",
             *(f"{above[launch, name]:.3f}" for name in (BY_NEED, IN_CAPACITY) for launch in LAUNCHES)]
    return "| " + " | ".join(map(str, cells)) + " |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--devices", default="0,1", help="a rank on each (default 0,1)")
    parser.add_argument("--shapes", default="qwen3-235b,qwen3-30b,dsv3")
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--warm-up", type=float, default=0.3, metavar="SECONDS")
    parser.add_argument("--json")
    options = parser.parse_args()
    records = Records(options.json, dict(device=device_name(), gpus=len(options.devices.split(",")), warm_up=options.warm_up,
                                         repeat=options.repeat, turns=options.rounds))
    header = ["shape", "T", "forward, threads, ms", "processes", "processes / threads", "placement by need adds, threads, ms",
              "processes", "in a capacity, threads, ms", "processes"]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for shape in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            record = records.find(shape=shape, tokens=tokens)
            if record is None:
                rounds = {launch: [] for launch in LAUNCHES}
                for _ in range(options.rounds):
                    for launch in LAUNCHES:
                        rounds[launch].append(measure(options, launch, shape, tokens))
                record = records.add(shape=shape, tokens=tokens, rounds=rounds)
            print(line_of(record), flush=True)


if __name__ == "__main__":
    main()
