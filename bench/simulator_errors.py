"""How far the simulator is from measured Schedules, with no GPU: of what `uniep tune --json` and bench/search_gain.py --json wrote.

    python3 bench/simulator_errors.py build/release/uniep FILE [FILE ...] [--machine h200] [--ranks 2] [--tokens 8192] [--most 1.3]

A line a file and shape: Schedules, the mean of |predicted / measured - 1| of their times over the default's and the error that nine
in ten stay below, the same of the times themselves, Spearman's correlation, and the measured ratio of the Schedule that is predicted to
be the fastest, of the fastest of the eight so predicted, and of the fastest of all. "At most" is Spearman's correlation of measured
ratios with what measuring them again may give: no prediction is surely above it. It takes the 95 % intervals for noise, and for a
Schedule that has none, since it was called too seldom, the median one of those with the fewest calls. Schedules slower than --most times
the default are left out of the errors, and searches of another direction, of other ranks or tokens. The last lines are of two baselines:
the GEMMs' tiles times 1.1, and 1.06 times the greater of GEMMs and links. FILE: lines of {"shape": "H,I,E,K", "tried":
[{"schedule" or "changes", "ms", "ratio", "calls"}, ...]}, or a report of `uniep tune`, before whose name SHAPE= stands:
2048,768,128,8=tuned.json.
"""

import argparse
import concurrent.futures
import json
import math
import os
import random
import statistics
import subprocess

BEST = 8
DRAWS = 100
PREDICTIONS = ("all", "GEMMs times 1.1", "GEMMs or links")


def rows_of(name, options):
    """(shape, tried), one a search of this direction, ranks and tokens that timed the default."""
    shape, _, path = name.rpartition("=")
    with open(path) as file:
        text = file.read()
    if shape:
        rows = [{**search, "shape": shape} for search in json.loads(text)["tuned"]]
    else:
        rows = [json.loads(line) for line in text.splitlines()]
    wanted = {key: getattr(options, key) for key in ("direction", "ranks", "tokens")}
    rows = [row for row in rows if all(row.get(key, value) == value for key, value in wanted.items())]
    return [(row["shape"], row["tried"]) for row in rows if any(is_default(one) and one.get("ms") for one in row["tried"])]


def is_default(tried):
    return tried["changes"] == "the default"


def fields_of(schedule, before=""):
    """A Schedule's JSON as --schedule takes it."""
    fields = []
    for name, value in schedule.items():
        if isinstance(value, dict):
            fields += fields_of(value, f"{before}{name}.")
        else:
            fields.append(f"{before}{name}={'on' if value is True else 'off' if value is False else value}")
    return fields


def simulated(options, shape, tried):
    """Milliseconds as in PREDICTIONS."""
    fields = ",".join(fields_of(tried["schedule"])) if "schedule" in tried else tried["changes"]
    command = [options.uniep, "simulate", "--engine", "cuda", "--ranks", str(options.ranks), "--tokens", str(options.tokens), "--shape", shape,
               "--machine", options.machine, "--direction", options.direction, "--json", "-"]
    if fields not in ("", "the default"):
        command += ["--schedule", fields]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    limits = report["limits_ms"]
    return report["ms"], 1.1 * limits["gemm"], 1.06 * max(limits["gemm"], limits["links"])


def ranks_of(values):
    places = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0] * len(values)
    for place, i in enumerate(places):
        ranks[i] = place
    return ranks


def spearman(one, other):
    if len(one) < 2:
        return math.nan
    middle = (len(one) - 1) / 2
    pairs = list(zip(ranks_of(one), ranks_of(other)))
    return sum((a - middle) * (b - middle) for a, b in pairs) / sum((a - middle) ** 2 for a, _ in pairs)


def noise_of(tried):
    """Standard deviations of the logarithms of measured ratios; the first one's is 0."""
    intervals = [one.get("ratio_95") for one in tried]
    noise = [math.log(interval[1] / interval[0]) / 3.92 if interval else None for interval in intervals]
    fewest = min((one["calls"] for one, own in zip(tried[1:], noise[1:]) if own is not None), default=0)
    seldom = [own for one, own in zip(tried, noise) if own is not None and one["calls"] == fewest]
    of_seldom = statistics.median(seldom) if seldom else 0.0
    return [0.0] + [of_seldom if own is None else own for own in noise[1:]]


def most_spearman(measured, noise):
    draw = random.Random(1)
    again = ([value * math.exp(draw.gauss(0, own)) for value, own in zip(measured, noise)] for _ in range(DRAWS))
    return statistics.mean(spearman(measured, values) for values in again)


def mean_and_most(errors):
    if not errors:
        return f"{'-':>5s} {'-':>6s}"
    return f"{100 * statistics.mean(errors):5.2f} {100 * sorted(errors)[int(0.9 * len(errors))]:6.2f}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--most", type=float, default=1.3)
    options = parser.parse_args()
    ratios, times, pairs = ([], [], []), ([], [], []), ([], [], [])
    all_measured, all_noise = [], []
    print(f"{'shape':17s}    n  ratios: mean, 9 of 10  times: mean, 9 of 10  Spearman  at most   first  best of {BEST}   best")
    for name in options.files:
        for shape, tried in rows_of(name, options):
            default = next(one for one in tried if is_default(one))
            timed = [default] + [one for one in tried if one.get("ratio") is not None and one is not default]
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                predicted = list(zip(*pool.map(lambda one: simulated(options, shape, one), timed)))
            near = [i for i, one in enumerate(timed) if i == 0 or one["ratio"] < options.most]
            measured = [1.0] + [one["ratio"] for one in timed[1:]]
            near_measured, noise = [measured[i] for i in near], noise_of([timed[i] for i in near])
            own = []  # of each prediction: errors of ratios, errors of times, ratios
            for values in predicted:
                own.append(([abs(values[i] / values[0] / measured[i] - 1) for i in near[1:]],
                            [abs(values[i] / timed[i]["ms"] - 1) for i in near], [values[i] / values[0] for i in near]))
            by_prediction = sorted(range(len(timed)), key=lambda i: predicted[0][i])
            print(f"{shape:17s} {len(near):4d}  {mean_and_most(own[0][0]):>22s}  {mean_and_most(own[0][1]):>20s}  "
                  f"{spearman(own[0][2], near_measured):8.2f}  {most_spearman(near_measured, noise):7.2f}  "
                  f"{measured[by_prediction[0]]:6.3f}  {min([1.0, *(measured[i] for i in by_prediction[:BEST])]):9.3f}  "
                  f"{min(measured):5.3f}", flush=True)
            for kind, (of_ratios, of_times, of_kind) in enumerate(own):
                ratios[kind].extend(of_ratios)
                times[kind].extend(of_times)
                pairs[kind].extend(of_kind)
            all_measured += near_measured
            all_noise += noise
    if not all_measured:
        raise SystemExit(f"FILE: no {options.direction} searches on {options.ranks} ranks with {options.tokens} tokens in them")
    for kind, name in enumerate(PREDICTIONS):
        most = f"  {most_spearman(all_measured, all_noise):7.2f}" if kind == 0 else ""
        print(f"{name:17s} {len(all_measured):4d}  {mean_and_most(ratios[kind]):>22s}  {mean_and_most(times[kind]):>20s}  "
              f"{spearman(pairs[kind], all_measured):8.2f}{most}")


if __name__ == "__main__":
    main()
