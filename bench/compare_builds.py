"""The forward layer of several builds of `uniep`, in turn in one run: did a change make it slower?

    python3 bench/compare_builds.py before/uniep after/uniep [--devices 0,1] [--rounds 5] [--shapes qwen3-30b,...]

Prints one Markdown table: medians of each build over the rounds, and the median over the rounds of each one's ratio to the first.
"""

import argparse
import json
import statistics
import subprocess


def measure(uniep, shape, options):
    """Milliseconds of a layer with a placement at hand."""
    command = [uniep, "bench", "--op", "layer", "--shape", shape, "--tokens", str(options.tokens), "--ranks",
               str(len(options.devices.split(","))), "--devices", options.devices, "--repeat", str(options.repeat), "--only",
               "layer", "--json", "-", *(["--warm-up", str(options.warm_up)] if options.warm_up else [])]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return report["results"][0]["ms"]["median"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("builds", nargs="+", help="programs `uniep`; the first is what the others are compared with")
    parser.add_argument("--devices", default="0,1", help="a rank on each (default 0,1)")
    parser.add_argument("--shapes", default="dsv3,qwen3-235b,qwen3-30b,mixtral")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--warm-up", type=float, default=0.3, metavar="SECONDS")
    options = parser.parse_args()
    print("| shape | " + " | ".join(options.builds) + " | " + " | ".join(f"{build} / first" for build in options.builds[1:]) + " |")
    print("|" + "---|" * (2 * len(options.builds)))
    for shape in options.shapes.split(","):
        for build in options.builds:
            measure(build, shape, options)  # compiles the kernels
        rounds = [[measure(build, shape, options) for build in options.builds] for _ in range(options.rounds)]
        medians = [statistics.median(times[i] for times in rounds) for i in range(len(options.builds))]
        ratios = [statistics.median(times[i] / times[0] for times in rounds) for i in range(1, len(options.builds))]
        print("| " + " | ".join([shape, *(f"{ms:.3f}" for ms in medians), *(f"{ratio:.3f}" for ratio in ratios)]) + " |")


if __name__ == "__main__":
    main()
