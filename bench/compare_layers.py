"""Whole forward layers on all GPUs of a machine: ours, and serialized ones as a user would put them together without it.

`nccl` is all_to_all_single, torch._grouped_mm, a compiled SwiGLU and a sum of the slots, one after the other; `deepep` has
deep_ep's Buffer in NCCL's place, where deep_ep imports (serialized_layer.py); `torch gemms` is FC1 and FC2 of torch._grouped_mm
alone, on rows that are there already. Each figure is the median over --repeat runs of it alone, of each run the slowest GPU, with
cold L2 caches; ours and theirs take turns for --rounds. All run for --warm-up seconds before a run counts, and one run follows the
other: for the first tenth of a second, and after each pause, GPUs run at higher clocks than they can keep. With --warm-up 0 all GPUs
begin each run together, once the host has launched it (theirs after a millisecond).

    python3 bench/compare_layers.py build/release/uniep [--shapes dsv3,mixtral] [--tokens 4096,8192] [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

import torch
import torch.multiprocessing as mp

import serialized_layer

SHAPES = {  # H, I, E, K
    "dsv3": (7168, 2048, 256, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "qwen3-30b": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
}


def measure_theirs(rank, ranks, options, path):
    buffer, deep_ep = serialized_layer.join(rank, ranks)
    results = {}
    for shape in options.shapes:
        for tokens in options.tokens:
            own = serialized_layer.Rank(rank, ranks, SHAPES[shape], tokens, options.warm_up)
            times = {"nccl": own.median(own.nccl, options.repeat), "torch gemms": own.median(own.gemms(), options.repeat)}
            if buffer is not None:
                times["deepep"] = own.median(own.deepep(buffer, deep_ep)[2], options.repeat)
            results[f"{shape} {tokens}"] = times
            del own
            torch.cuda.empty_cache()
    if rank == 0:
        with open(path, "w") as file:
            json.dump(results, file)
    serialized_layer.leave()


def measure_ours(options, ranks, shape, tokens):
    """Milliseconds by name, and the layer's floating-point operations."""
    times, flops = {}, 0.0
    for name in ("layer", "gemms"):
        command = [options.uniep, "bench", "--op", "layer", "--shape", shape, "--tokens", str(tokens), "--ranks", str(ranks),
                   "--devices", ",".join(map(str, range(ranks))), "--repeat", str(options.repeat), "--only", name,
                   *(["--warm-up", str(options.warm_up)] if options.warm_up else []), "--json", "-"]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        times.update({result["name"]: result["ms"]["median"] for result in report["results"]})
        if name == "layer":
            flops = report["results"][0]["tflops"] * times["layer"] * 1e9
    return times, flops


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm-up", type=float, default=0.3, metavar="SECONDS")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    options.tokens = [int(tokens) for tokens in options.tokens.split(",")]
    ranks = torch.cuda.device_count()
    print(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
    samples, flops = {}, {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "theirs.json")
            mp.spawn(measure_theirs, args=(ranks, options, path), nprocs=ranks)
            with open(path) as file:
                theirs = json.load(file)
        for shape in options.shapes:
            for tokens in options.tokens:
                times, flops[shape, tokens] = measure_ours(options, ranks, shape, tokens)
                for name, value in {**theirs[f"{shape} {tokens}"], **times}.items():
                    samples.setdefault((shape, tokens), {}).setdefault(name, []).append(value)
    records = []
    print("shape           T    layer TFLOP/s    gemms  torch gemms     nccl   deepep | layer / torch gemms, nccl / layer, deepep / layer")
    for (shape, tokens), values in samples.items():
        ms = {name: statistics.median(times) for name, times in values.items()}
        tflops = flops[shape, tokens] / ms["layer"] / 1e9
        records.append(dict(shape=shape, tokens=tokens, ms=ms, tflops=tflops))
        peer = ms.get("deepep")
        print(f"{shape:11s} {tokens:5d} {ms['layer']:8.3f} {tflops:7.0f} {ms['gemms']:8.3f} {ms['torch gemms']:12.3f} {ms['nccl']:8.3f} "
              f"{peer or float('nan'):8.3f} | {ms['layer'] / ms['torch gemms']:.3f} {ms['nccl'] / ms['layer']:.3f} "
              f"{(peer or float('nan')) / ms['layer']:.3f}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), gpus=ranks, warm_up=options.warm_up, records=records), file)


if __name__ == "__main__":
    main()
