"""How far the simulator is from measured Schedules, with no GPU: of what `uniep tune --json`, bench/search_gain.py --json and
bench/measure_points.py --json wrote.

    python3 bench/simulator_errors.py build/release/uniep FILE [FILE ...] [--machine h200] [--ranks 2] [--tokens 8192]
        [--direction forward|backward] [--routing uniform] [--state sustained|paused] [--device NAME] [--most 1.3] [--fields]
        [--points FILE] [--held-out]

What was timed together took turns, so that the GPUs' power limit left all of a set one clock; it is worked out from what each Schedule
is predicted to load them with, and for how long (docs/simulator.md).

A line a file and set: Schedules, the mean of |predicted / measured - 1| of their times over the default's and the error that nine
in ten stay below, the same of times over those of the set's other Schedules (the median of their errors is taken off, which is the
clock of that run), the same of the times themselves, Spearman's correlation, and the measured ratio of the Schedule that is
predicted to be the fastest, of the fastest of the eight so predicted, and of the fastest of all. "At most" is Spearman's
correlation of measured ratios with what measuring them again may give; a prediction without errors would reach its square root. It
takes the 95 % intervals for noise, and for a Schedule that has none, since it was called too seldom, the median one of those with
the fewest calls. Schedules slower than --most times the default are left out of the errors. Then the same of all sets by other
limits of what is left out, and the last lines, with --most, are of two baselines beside it: the GEMMs' tiles times 1.1, and 1.06
times the greater of GEMMs and links.

--fields adds, for each value of each field that two Schedules have and the default has not: their number, and the signed mean and the
mean of the logarithms of predicted over measured ratios, in per cent (+: predicted too slow). --points FILE writes a line of JSON for
each Schedule. --ranks, --tokens, --direction, --routing, --state and --device take the sets that are so; a set that does not say is of
2 ranks, 8192 tokens, forward, uniform, sustained and of no device (-), or what these options say. --device is the GPU's whole name, as
the lines end with it. --held-out leaves of each set the default and what no shipped description was fitted to
(tests/support/measured_points.h).

FILE: lines of {"shape": "H,I,E,K", "tried": [{"schedule" or "changes", "ms", "ratio", "calls"}, ...]}, or a report of `uniep tune`,
before whose name SHAPE= stands: 2048,768,128,8=tuned.json.
"""

import argparse
import collections
import concurrent.futures
import functools
import json
import math
import os
import random
import statistics
import subprocess
import tempfile

BEST = 8
DRAWS = 100
PREDICTIONS = ("the simulator", "GEMMs times 1.1", "GEMMs or links")
LIMITS = (1.3, 2.0, math.inf)
UNSAID = {"direction": "forward", "ranks": 2, "tokens": 8192, "routing": "uniform", "state": "sustained", "device": None}
IN_NAMES = ("direction", "routing", "state")  # where they are not as in UNSAID
AS_EIGHT = "as-eight"  # measure_points.py
HELD_OUT_SHAPE, HELD_OUT_SHARE = "7168,", 3  # as tests/support/measured_points.cpp has them
# As in src/sim/simulate.cpp: of what a load does to the clock the share that it does at once, and the least load that counts.
OWN_SHARE, LEAST_LOAD = 0.6, 0.3


def rows_of(name, options):
    """Sets that timed the default, with all that UNSAID names, and that the options want."""
    shape, _, path = name.rpartition("=")
    with open(path) as file:
        text = file.read()
    if shape:
        rows = [{**search, "shape": shape} for search in json.loads(text)["tuned"]]
    else:
        rows = [json.loads(line) for line in text.splitlines()]
    given = {key: getattr(options, key) for key in UNSAID if getattr(options, key) is not None}
    rows = [{**UNSAID, **given, **row} for row in rows]
    rows = [row for row in rows if all(row[key] == value for key, value in given.items())]
    return [row for row in rows if any(is_default(one) and one.get("ms") for one in row["tried"])]


def is_default(tried):
    return tried["changes"] == "the default"


def flat(schedule, before=""):
    """{field: value} as --schedule takes them."""
    fields = {}
    for name, value in schedule.items():
        if isinstance(value, dict):
            fields |= flat(value, f"{before}{name}.")
        else:
            fields[before + name] = "on" if value is True else "off" if value is False else str(value)
    return fields


def fields_of(tried):
    if "schedule" in tried:
        return flat(tried["schedule"])
    return {} if is_default(tried) else dict(field.split("=", 1) for field in tried["changes"].split(","))


@functools.cache
def routing_file(folder, shape, ranks, tokens):
    """Not for threads: those that come meanwhile would write it, too."""
    import numpy  # which other sets do without

    import remote_routing

    path = os.path.join(folder, f"{shape},{ranks},{tokens}.npy")
    _, _, experts, topk = map(int, shape.split(","))
    numpy.save(path, remote_routing.remote_ids(experts, ranks, tokens, topk))
    return path


def routing_of(row, folder):
    return routing_file(folder, row["shape"], row["ranks"], row["tokens"]) if row["routing"] == AS_EIGHT else row["routing"]


def is_held_out(shape, changes):
    """A third of the Schedules, by name (FNV-1a), and one whole shape."""
    number = 2166136261
    for byte in changes.encode():
        number = (number ^ byte) * 16777619 % 2**32
    return shape.startswith(HELD_OUT_SHAPE) or number % HELD_OUT_SHARE == 0


def clock_of(machine):
    """Numbers of the machine's clock; `machine` is a file, or one that is shipped."""
    if not os.path.exists(machine):
        machine = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "machines", machine + ".json")
    with open(machine) as file:
        return {name: number["value"] for name, number in json.load(file)["clock"].items()}


def limit_of(clock, calls, reports):
    """GHz that the power limit leaves a call under full load, where such calls take turns."""
    busy = all_us = 0
    for count, report in zip(calls, reports):
        us = count * 1e3 * report["ms"]
        busy += us * min(max(report["load"], LEAST_LOAD), 1) ** (1 - OWN_SHARE)
        all_us += us + count * clock["rest"]
    return clock["limit"] * (busy / all_us) ** -clock["limit_exponent"]


def simulated(options, row, routing, tried, limit=None):
    """What `uniep simulate` reports."""
    fields = ",".join(f"{name}={value}" for name, value in fields_of(tried).items())
    command = [options.uniep, "simulate", "--engine", "cuda", "--ranks", str(row["ranks"]), "--tokens", str(row["tokens"]), "--shape",
               row["shape"], "--machine", options.machine, "--direction", row["direction"], "--routing", routing, "--state",
               row["state"], "--json", "-"]
    if fields:
        command += ["--schedule", fields]
    if limit is not None:
        command += ["--limit-clock", f"{limit:.6g}"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def predictions(report):
    """Milliseconds as in PREDICTIONS."""
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


class Set:
    """One default and what was timed beside it; of each prediction all times."""

    def __init__(self, options, row, folder, pool):
        self.row = row
        default = next(one for one in row["tried"] if is_default(one))
        self.timed = [default] + [one for one in row["tried"] if one.get("ratio") is not None and one is not default]
        self.measured = [1.0] + [one["ratio"] for one in self.timed[1:]]
        predict = functools.partial(simulated, options, row, routing_of(row, folder))
        reports = list(pool.map(predict, self.timed))
        if row["state"] == "sustained":
            limit = limit_of(clock_of(options.machine), [one["calls"] for one in self.timed], reports)
            reports = list(pool.map(functools.partial(predict, limit=limit), self.timed))
        self.shown = [i for i, one in enumerate(self.timed) if i == 0 or not options.held_out or is_held_out(row["shape"], one["changes"])]
        self.predicted = list(zip(*map(predictions, reports)))

    def ratios(self, kind):
        return [ms / self.predicted[kind][0] for ms in self.predicted[kind]]

    def near(self, most):
        """Those up to `most` times the default, which is the first."""
        return [0] + [i for i in self.shown[1:] if self.measured[i] < most]

    def within(self, kind, most):
        """Of those their errors beside the others of the run, held out or not."""
        errors = [math.log(predicted / one["ms"]) for predicted, one in zip(self.predicted[kind], self.timed)]
        found = []
        for i in self.near(most):
            others = [error for j, error in enumerate(errors) if j != i and self.measured[j] < most]
            found += [abs(math.exp(errors[i] - statistics.median(others)) - 1)] if others else []
        return found

    def points(self):
        told = {key: self.row[key] for key in ("shape", *UNSAID)}
        ratios = self.ratios(0)
        for i in self.shown:
            one, measured, ratio, ms = self.timed[i], self.measured[i], ratios[i], self.predicted[0][i]
            yield {**told, "changes": one["changes"], "schedule": fields_of(one), "ms": one["ms"], "ratio": measured,
                   "predicted_ms": ms, "predicted_ratio": ratio}


def figures(sets, kind, most):
    """Text: Schedules, errors of ratios, within runs and of times, Spearman's correlation and for the simulator the most that there is."""
    of_ratios, within, of_times, measured, ratios, noise = [], [], [], [], [], []
    for one in sets:
        near, own = one.near(most), one.ratios(kind)
        of_ratios += [abs(own[i] / one.measured[i] - 1) for i in near[1:]]
        within += one.within(kind, most)
        of_times += [abs(one.predicted[kind][i] / one.timed[i]["ms"] - 1) for i in near]
        measured += [one.measured[i] for i in near]
        ratios += [own[i] for i in near]
        noise += noise_of([one.timed[i] for i in near])
    text = (f"{len(measured):4d}  {mean_and_most(of_ratios):>22s}  {mean_and_most(within):>21s}  {mean_and_most(of_times):>20s}  "
            f"{spearman(ratios, measured):8.2f}")
    return text + (f"  {most_spearman(measured, noise):7.2f}" if kind == 0 else "")


def up_to(most):
    return "all" if math.isinf(most) else f"up to {most:g} times the default"


def print_fields(sets, most):
    errors = collections.defaultdict(list)
    for one in sets:
        default, ratios = fields_of(one.timed[0]), one.ratios(0)
        for i in one.near(most)[1:]:
            error = math.log(ratios[i] / one.measured[i])
            for name, value in fields_of(one.timed[i]).items():
                if default.get(name) != value:
                    errors[f"{name}={value}"].append(error)
    for name, own in sorted(errors.items(), key=lambda item: -abs(statistics.mean(item[1]))):
        if len(own) > 1:
            print(f"{name:34s} {len(own):4d} {100 * statistics.mean(own):+7.2f} {100 * statistics.mean(map(abs, own)):6.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--direction", choices=("forward", "backward"))
    parser.add_argument("--routing")
    parser.add_argument("--state", choices=("sustained", "paused"))
    parser.add_argument("--device", metavar="NAME")
    parser.add_argument("--most", type=float, default=1.3)
    parser.add_argument("--fields", action="store_true")
    parser.add_argument("--points", metavar="FILE")
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    sets = []
    print(f"{'ranks, tokens, shape':38s}    n  ratios: mean, 9 of 10  within: mean, 9 of 10  times: mean, 9 of 10  Spearman  at most   "
          f"first  best of {BEST}   best  device")
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for row in (row for name in options.files for row in rows_of(name, options)):
            one = Set(options, row, folder, pool)
            sets.append(one)
            other = [row[key] for key in IN_NAMES if row[key] != UNSAID[key]]
            name = " ".join([str(row["ranks"]), str(row["tokens"]), row["shape"], *other])
            order = sorted(one.shown, key=lambda i: one.predicted[0][i])
            print(f"{name:38s} {figures([one], 0, options.most)}  {one.measured[order[0]]:6.3f}  "
                  f"{min([1.0, *(one.measured[i] for i in order[:BEST])]):9.3f}  {min(one.measured[i] for i in one.shown):5.3f}  "
                  f"{row['device'] or '-'}", flush=True)
    if not sets:
        raise SystemExit("FILE: no sets in them that are so")
    if options.points:
        with open(options.points, "w") as file:
            file.writelines(json.dumps(point) + "\n" for one in sets for point in one.points())
    if options.fields:
        print_fields(sets, options.most)
    for most in LIMITS:
        if most != options.most:
            print(f"{up_to(most):38s} {figures(sets, 0, most)}")
    for kind, name in enumerate(PREDICTIONS):
        print(f"{up_to(options.most) if kind == 0 else name:38s} {figures(sets, kind, options.most)}")


if __name__ == "__main__":
    main()
