"""Grouped GEMMs: torch._grouped_mm and `uniep bench --op gemm` in turn, on all GPUs at once, with the same rows.

Each figure is the median over --repeat runs a round, of each run the slowest GPU, timed with device events around all
device work with a cold L2 cache. GPU g has the rows of rank g of an expert-parallel group with uniform routing.
The two take turns GEMM by GEMM. Both begin on GPUs that have been idle for a moment, and run for --warm-up
seconds before a run counts: for the first tenth of a second GPUs run at higher clocks than they can keep. What FILE has (records.py)
is not measured again.

    python3 bench/compare.py build/release/uniep [--shapes dsv3,mixtral] [--tokens 4096,8192] [--devices 0,1] [--json FILE]
"""

import argparse
import collections
import json
import math
import statistics
import subprocess
import time

import torch

from records import Records
from shapes import FOUR

BF16 = torch.bfloat16
PLAIN = ("fc1", "fc2", "dgrad2", "dgrad1", "wgrad2", "wgrad1")
FUSED = {"fc1+swiglu": "fc1", "dgrad2+dswiglu": "dgrad2"}
PAUSE = 0.5  # s: about what the program `uniep` takes to start
WARM_UP_CALLS = 3
CALLS_UNDER_WAY = 8  # queued ahead, so that no GPU is idle between two


def run_uniep(options, shape, tokens, *names):
    """The report on these GEMMs."""
    command = [options.uniep, "bench", "--op", "gemm", "--shape", shape, "--tokens", str(tokens), "--devices",
               ",".join(map(str, options.devices)), "--repeat", str(options.repeat), "--only", ",".join(names),
               *(["--warm-up", str(options.warm_up)] if options.warm_up else []), "--json", "-"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


class TorchGemms:
    """The same GEMMs by torch on one GPU: name -> call."""

    def __init__(self, device, counts, shape):
        self.device = torch.device("cuda", device)
        hidden, inter, experts, rows = shape["hidden"], shape["intermediate"], len(counts), sum(counts)
        with torch.cuda.device(self.device):
            rand = lambda *size: torch.randn(*size, device=self.device, dtype=BF16)
            ends = torch.tensor(counts, device=self.device).cumsum(0).to(torch.int32)
            x, dy, a, dz = rand(rows, hidden), rand(rows, hidden), rand(rows, inter), rand(rows, 2 * inter)
            w1, w2 = rand(experts, 2 * inter, hidden), rand(experts, hidden, inter)
            main_grad = torch.zeros(experts, 2 * inter, hidden, device=self.device)
            self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        g = torch._grouped_mm
        self.calls = {
            "fc1": lambda: g(x, w1.transpose(1, 2), offs=ends),
            "fc2": lambda: g(a, w2.transpose(1, 2), offs=ends),
            "dgrad2": lambda: g(dy, w2, offs=ends),
            "dgrad1": lambda: g(dz, w1, offs=ends),
            "wgrad2": lambda: g(dy.t(), a, offs=ends),
            "wgrad1": lambda: g(dz.t(), x, offs=ends),
            "wgrad1+=": lambda: main_grad.add_(g(dz.t(), x, offs=ends)),
        }

    def start(self, name):
        """Queues one timed call; its two events."""
        with torch.cuda.device(self.device):
            self.flush.zero_()  # out of the L2 cache
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            self.calls[name]()
            end.record()
        return begin, end


def run_torch(gpus, name, options):
    """Milliseconds of each run, the slowest GPU's."""
    time.sleep(PAUSE)
    started = time.monotonic()
    times, under_way = [], collections.deque()

    def end_calls(left):
        while len(under_way) > left:
            counts, events = under_way.popleft()
            for _, end in events:
                end.synchronize()
            if counts:
                times.append(max(begin.elapsed_time(end) for begin, end in events))

    turn, counted = 0, 0
    while counted < options.repeat:
        end_calls(CALLS_UNDER_WAY - 1)
        counts = turn >= WARM_UP_CALLS and time.monotonic() - started >= options.warm_up
        under_way.append((counts, [gpu.start(name) for gpu in gpus]))
        turn += 1
        counted += counts
    end_calls(0)
    return times


def compare(options, kept, shape, tokens):
    """One line a GEMM; the records."""
    gpus, records = [], []
    for name in (*PLAIN, "wgrad1+=", *FUSED):
        record = kept.find(shape=shape, tokens=tokens, op=name) or kept.add(**measure(options, gpus, shape, tokens, name))
        records.append(record)
        print(f"{shape:11s} {tokens:5d} {name:15s} {record['base_ms']:8.3f} {record['ours_ms']:8.3f} {record['tflops']:8.0f} "
              f"{record['ratio']:7.3f}", flush=True)
    del gpus
    torch.cuda.empty_cache()
    return records


def measure(options, gpus, shape, tokens, name):
    """`gpus`: TorchGemms of this shape, filled here where there are none yet."""
    times = {"ours": [], "base": []}
    for _ in range(options.rounds):
        report = run_uniep(options, shape, tokens, *((FUSED[name], name) if name in FUSED else (name,)))
        results = {result["name"]: result for result in report["results"]}
        times["ours"] += results[name]["ms"]["all"]
        if name in FUSED:
            times["base"] += results[FUSED[name]]["ms"]["all"]
            continue
        if not gpus:
            gpus += [TorchGemms(device, counts, report["shape"]) for device, counts in zip(options.devices, report["rows_per_expert"])]
        times["base"] += run_torch(gpus, name, options)
    ours, base = statistics.median(times["ours"]), statistics.median(times["base"])
    tflops = results[name]["tflops"] * results[name]["ms"]["median"] / ours
    return dict(shape=shape, tokens=tokens, op=name, base_ms=base, ours_ms=ours, ratio=base / ours, tflops=tflops)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--shapes", default=",".join(FOUR))
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--devices", help="GPUs, all by default")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--warm-up", type=float, default=0.3, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=1, help="how often the two take turns")
    parser.add_argument("--json")
    options = parser.parse_args()
    devices = options.devices.split(",") if options.devices else range(torch.cuda.device_count())
    options.devices = [int(device) for device in devices]
    print(f"{len(options.devices)} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("base: torch; of fused epilogues our plain GEMM")
    print("shape           T GEMM            base ms  ours ms  TFLOP/s   ratio")
    kept = Records(options.json, dict(device=torch.cuda.get_device_name(), gpus=len(options.devices), warm_up=options.warm_up,
                                      repeat=options.repeat, turns=options.rounds))
    records = []
    for shape in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            records += compare(options, kept, shape, tokens)
    for group in ("fc", "dgrad", "wgrad", ""):
        ratios = [r["ratio"] for r in records if r["op"] in PLAIN and r["op"].startswith(group)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean of {group or 'all'}: {mean:.3f} over {len(ratios)}, worst {min(ratios):.3f}")


if __name__ == "__main__":
    main()
