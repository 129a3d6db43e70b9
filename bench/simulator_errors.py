"""How far the simulator is from measured Schedules, with no GPU: of what `uniep tune --json` and bench/search_gain.py --json wrote.

    python3 bench/simulator_errors.py build/release/uniep FILE [FILE ...] [--machine h200] [--ranks 2] [--tokens 8192] [--most 1.3]

A line a file and shape: Schedules, the mean of |predicted / measured - 1| of their times over the default's and the error that nine
in ten stay below, the same of the times themselves, Spearman's correlation, and the measured ratio of the Schedule that is predicted to
be the fastest, of the fastest of the eight so predicted, and of the fastest of all. Schedules slower than --most times the default are
left out of the errors, and searches of another direction, of other ranks or tokens. FILE: lines of {"shape": "H,I,E,K", "tried":
[{"schedule" or "changes", "ms", "ratio", "calls"}, ...]}, or a report of `uniep tune`, before whose name SHAPE= stands:
2048,768,128,8=tuned.json.
"""

import argparse
import concurrent.futures
import json
import math
import os
import statistics
import subprocess

BEST = 8


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
    fields = ",".join(fields_of(tried["schedule"])) if "schedule" in tried else tried["changes"]
    command = [options.uniep, "simulate", "--engine", "cuda", "--ranks", str(options.ranks), "--tokens", str(options.tokens), "--shape", shape,
               "--machine", options.machine, "--direction", options.direction, "--one-rank", "--json", "-"]
    if fields not in ("", "the default"):
        command += ["--schedule", fields]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["ms"]


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
    ratios, times, pairs = [], [], ([], [])
    print(f"{'shape':17s}    n  ratios: mean, 9 of 10  times: mean, 9 of 10  Spearman   first  best of {BEST}   best")
    for name in options.files:
        for shape, tried in rows_of(name, options):
            default = next(one for one in tried if is_default(one))
            timed = [default] + [one for one in tried if one.get("ratio") is not None and one is not default]
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                predicted = list(pool.map(lambda one: simulated(options, shape, one), timed))
            near = [i for i, one in enumerate(timed) if i == 0 or one["ratio"] < options.most]
            measured = [1.0] + [one["ratio"] for one in timed[1:]]
            own = [abs(predicted[i] / predicted[0] / measured[i] - 1) for i in near[1:]]
            own_times = [abs(predicted[i] / timed[i]["ms"] - 1) for i in near]
            by_prediction = sorted(range(len(timed)), key=lambda i: predicted[i])
            print(f"{shape:17s} {len(near):4d}  {mean_and_most(own):>22s}  {mean_and_most(own_times):>20s}  "
                  f"{spearman([predicted[i] for i in near], [measured[i] for i in near]):8.2f}  {measured[by_prediction[0]]:6.3f}  "
                  f"{min([1.0, *(measured[i] for i in by_prediction[:BEST])]):9.3f}  {min(measured):5.3f}", flush=True)
            ratios += own
            times += own_times
            pairs[0].extend(predicted[i] / predicted[0] for i in near)
            pairs[1].extend(measured[i] for i in near)
    if not times:
        raise SystemExit(f"FILE: no {options.direction} searches on {options.ranks} ranks with {options.tokens} tokens in them")
    print(f"{'all':17s} {len(times):4d}  {mean_and_most(ratios):>22s}  {mean_and_most(times):>20s}  {spearman(*pairs):8.2f}")


if __name__ == "__main__":
    main()
