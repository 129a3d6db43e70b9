"""Dispatch and combine alone on all GPUs of a machine: ours by SMs, NCCL's all-to-all, and DeepEP where it imports.

Ours and NCCL's begin with tokens and end with rows in expert order, and back with sums of the slots, as `deepep, permuted` does;
`deepep` leaves rows in the order of their sources and combines sums that are there already (serialized_layer.py). Each figure is the
median over --repeat runs, of each run the slowest GPU, with cold L2 caches and a given placement. GB/s count what our dispatch
(combine: flat, or the groups' sums) makes a GPU receive, rows from its own GPU too, for all of them: a token once for each GPU that
it goes to.

    python3 bench/compare_exchange.py build/release/uniep [--tokens 4096] [--hidden 7168] [--experts 256] [--topk 8] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import tempfile

import torch
import torch.multiprocessing as mp

import serialized_layer

INTERMEDIATE = 64  # of experts that nobody uses here
SMS = ("8 SMs", "16 SMs", "24 SMs", "all SMs")


def measure_theirs(rank, ranks, options, path):
    joined = serialized_layer.join(rank, ranks)
    own = serialized_layer.Rank(rank, ranks, (options.hidden, INTERMEDIATE, options.experts, options.topk), options.tokens)
    rows = own.nccl_dispatch()
    times = {"dispatch": {"nccl": own.median(own.nccl_dispatch, options.repeat)},
             "combine": {"nccl": own.median(lambda: own.nccl_combine(rows), options.repeat)}}
    if joined.buffer is not None:
        deepep = own.deepep(joined.buffer, joined.deep_ep)
        sorted_rows = deepep.way.dispatch(own.x)
        times["dispatch"]["deepep"] = own.median(deepep.dispatch, options.repeat)
        times["dispatch"]["deepep, permuted"] = own.median(lambda: deepep.way.dispatch(own.x), options.repeat)
        times["combine"]["deepep"] = own.median(deepep.combine, options.repeat)
        times["combine"]["deepep, permuted"] = own.median(lambda: deepep.way.combine(sorted_rows), options.repeat)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(times, file)
    serialized_layer.leave()


def measure_ours(options, ranks, op, *more):
    """Milliseconds by number of SMs, and the gigabytes that a GPU receives."""
    command = [options.uniep, "bench", "--op", op, "--ranks", str(ranks), "--devices", ",".join(map(str, range(ranks))),
               "--tokens", str(options.tokens), "--hidden", str(options.hidden), "--experts", str(options.experts), "--topk",
               str(options.topk), "--repeat", str(options.repeat), "--only", ",".join(SMS), "--json", "-", *more]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    times = {result["name"]: result["ms"]["median"] for result in report["results"]}
    rates = {name.split(":")[0]: value for name, value in report["ratios"].items()}
    name = next(iter(times))
    return times, rates[name] * times[name] / 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--tokens", type=int, default=4096, help="of each GPU")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    ranks = torch.cuda.device_count()
    print(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "theirs.json")
        mp.spawn(measure_theirs, args=(ranks, options, path), nprocs=ranks)
        with open(path) as file:
            theirs = json.load(file)
    records = []
    groups = ("--combine-groups", str(ranks))
    for name, op, more in (("dispatch", "dispatch", ()), ("combine by groups", "combine", groups), ("combine", "combine", ())):
        ours, gigabytes = measure_ours(options, ranks, op, *more)
        milliseconds = {**ours, **theirs[op]}
        records.append(dict(exchange=name, gigabytes=gigabytes, ms=milliseconds))
        print(f"{name}: {gigabytes:.3f} GB a GPU")
        for way, time in milliseconds.items():
            print(f"  {way:16s} {time:8.3f} ms {gigabytes / time * 1e3:8.1f} GB/s", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), gpus=ranks, records=records), file)


if __name__ == "__main__":
    main()
