"""Whole layers on all GPUs of a machine, forward, backward or both: ours, and serialized ones as a user would put them together
without it.

`nccl` is all_to_all_single, torch._grouped_mm, a compiled SwiGLU, or the model's own formula (expert_formulas.py; backward: its gradient
and that of the router weights), and a sum of the slots, one after the other; `deepep` has deep_ep's Buffer in NCCL's place, where deep_ep imports (serialized_layer.py); `torch
gemms` are the GEMMs of torch._grouped_mm alone, two of forward and four of backward, on rows that are there already;
`gemms` are ours. Each figure is the median over --repeat runs of it alone, of each run the slowest GPU, with cold L2 caches; ours
and theirs take turns for --rounds, one shape after the other, and the range of the rounds' ratios stands beside the median. All run
for --warm-up seconds before a run counts, and one run follows the other: for the first tenth of a second, and after each pause, GPUs
run at higher clocks than they can keep. With --warm-up 0 all GPUs begin each run together, once the host has launched it (theirs
after a millisecond). Routing is uniform, zipf:S (a token draws different experts, expert e with (e + 1)^-S), or that of a file:
[GPUs x tokens, K] experts, all slots used, as bench/remote_routing.py writes it; the same for ours and theirs.

    python3 bench/compare_layers.py build/release/uniep [--op forward|backward|step] [--shapes dsv3,mixtral,4096,1408,128,8]
        [--tokens 4096,8192] [--routing zipf:1|FILE.npy | --as-eight] [--wgrad bf16|fp32|main_grad] [--schedule ...] [--json FILE]

--op takes several, separated by commas. --as-eight loads fewer GPUs as eight would be: the experts of as many of eight ranks, and a
routing that sends seven slots in eight to other ranks (remote_routing.py), each of them as a row of its own (dispatch.dedup=off).
Ours runs as it would by default on eight. `deepep` has no ratio there: it sends a row to each rank once, and there are fewer ranks.
Mixtral's two slots can not be shared like that: of its slots half are sent. A shape's rows are printed, and go to FILE (records.py), once its
rounds are over; what FILE has is not measured again.

FILE has `bytes`, too: of ours what a call asks for, a rank (`layer`); of theirs what a run takes from torch's allocator beside its
results and what was there before, x, dy, weights and, of a backward, what forward kept (`nccl`, `deepep`); and what a process has
outside of it (`outside`): NCCL's communicator and all kernels, DeepEP's buffer.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile

import numpy
import torch
import torch.multiprocessing as mp

import expert_formulas
import remote_routing
import serialized_layer
import shapes
from records import Records

SHAPES = shapes.SHAPES | shapes.ONLY_HERE
ZIPF = "zipf:"
FORMULAS = {"gpt-oss-120b": "gpt-oss", "nemotron-3-nano": "relu2"}  # of expert_formulas; else "swiglu"


def measure_theirs(rank, ranks, options, path):
    joined = serialized_layer.join(rank, ranks)
    results = {}
    for shape in options.shapes:
        for tokens in options.tokens:
            ids = ids_of(options, ranks, shape, tokens)
            own = serialized_layer.Rank(rank, ranks, sizes_of(shape, options, ranks), tokens, options.warm_up,
                                        None if ids is None else torch.from_numpy(ids), FORMULAS.get(shape, "swiglu"))
            for op in options.op:
                times = {"torch GEMMs": own.median(own.gemms(op), options.repeat)}
                bytes_of = {}
                for name in ("nccl", "deepep")[:1 if joined.buffer is None else 2]:
                    run = own.nccl(op) if name == "nccl" else own.deepep(joined.buffer, joined.deep_ep, op).run
                    times[name] = own.median(run, options.repeat)
                    bytes_of[name] = own.peak_bytes(op, run)
                rest = serialized_layer.bytes_outside_of_torch() - joined.bytes_before - joined.deepep_bytes
                bytes_of["outside"] = {"nccl": rest, "deepep": joined.deepep_bytes}
                results[f"{op} {shape} {tokens}"] = {"ms": times, "bytes": bytes_of}
            del own, run
            torch.cuda.empty_cache()
    if rank == 0:
        with open(path, "w") as file:
            json.dump(results, file)
    serialized_layer.leave()


def measure_ours(options, op, ranks, shape, tokens):
    """Milliseconds by name, the layer's floating-point operations, and its bytes."""
    times = {}
    bench_op = "layer" if op == "forward" else op
    sizes = ",".join(map(str, sizes_of(shape, options, ranks)))
    with tempfile.TemporaryDirectory() as folder:
        ids, schedule, schedule_backward = ids_of(options, ranks, shape, tokens), options.schedule, options.schedule_backward
        routing = os.path.join(folder, "routing.npy")
        if ids is not None:
            numpy.save(routing, ids)
        if options.as_eight:
            whole = SHAPES.get(shape, shape)
            schedule_backward = remote_routing.schedule_of_eight(options.uniep, whole, "backward", schedule_backward or schedule)
            schedule = remote_routing.schedule_of_eight(options.uniep, whole, "forward", schedule)
        for name in ("layer", "gemms"):
            command = [options.uniep, "bench", "--op", bench_op, "--shape", sizes, "--tokens", str(tokens), "--ranks", str(ranks),
                       "--repeat", str(options.repeat), "--only", name, "--wgrad", options.wgrad, "--json", "-",
                       *expert_formulas.OPTIONS[FORMULAS.get(shape, "swiglu")]]
            command += ["--launch", "processes"] if options.processes else ["--devices", ",".join(map(str, range(ranks)))]
            for option, value in (("--warm-up", options.warm_up), ("--routing", ids is not None and routing),
                                  ("--schedule", schedule), ("--schedule-backward", schedule_backward)):
                command += [option, str(value)] if value else []
            report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            result = report["results"][0]
            times[name] = result["ms"]["median"]
            if name == "layer":
                flops, need = result["tflops"] * times["layer"] * 1e9, report["memory"]
    return times, flops, need


def ids_of(options, ranks, shape, tokens):
    """[ranks * tokens, topk] experts; None where they are uniform."""
    _, _, experts, topk = sizes_of(shape, options, ranks)
    if options.as_eight:
        return remote_routing.remote_ids(experts, ranks, tokens, topk)
    if options.routing is None:
        return None
    if options.routing.startswith(ZIPF):
        return zipf_ids(experts, ranks * tokens, topk, float(options.routing.removeprefix(ZIPF)))
    return numpy.load(options.routing)


def zipf_ids(experts, tokens, topk, exponent):
    """Of each token different experts, drawn one after the other with (e + 1)^-exponent: the largest of logarithms with Gumbel noise."""
    scores = numpy.random.default_rng(1).gumbel(size=(tokens, experts)) - exponent * numpy.log(numpy.arange(experts) + 1)
    return numpy.argpartition(-scores, topk - 1, axis=1)[:, :topk].astype(numpy.int64)


def sizes_of(shape, options, ranks):
    """H, I, E, K of what is measured: with --as-eight the experts of as many of eight ranks as there are GPUs."""
    hidden, intermediate, experts, topk = SHAPES[shape] if shape in SHAPES else tuple(map(int, shape.split(",")))
    return hidden, intermediate, experts * ranks // 8 if options.as_eight else experts, topk


def split_shapes(text):
    """Names, and four numbers in a row."""
    parts, shapes = text.split(","), []
    while parts:
        count = 4 if parts[0].isdigit() else 1
        shapes.append(",".join(parts[:count]))
        parts = parts[count:]
    for shape in shapes:
        if shape not in SHAPES and len(shape.split(",")) != 4:
            raise SystemExit(f"--shapes: {shape}; must be H,I,E,K or one of {', '.join(SHAPES)}")
    return shapes


def their_results(options, ranks, shape, keys):
    """By (tokens, op)."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "theirs.json")
        own = {"shapes": [shape], "tokens": list(dict.fromkeys(tokens for tokens, _ in keys)),
               "op": list(dict.fromkeys(op for _, op in keys))}
        mp.spawn(measure_theirs, args=(ranks, argparse.Namespace(**{**vars(options), **own}), path), nprocs=ranks)
        with open(path) as file:
            results = json.load(file)
    return {(tokens, op): results[f"{op} {shape} {tokens}"] for tokens, op in keys}


def ratio_text(values, one, other):
    """Of the medians, and the range of the rounds."""
    if one not in values or other not in values:
        return "-"
    rounds = [a / b for a, b in zip(values[one], values[other])]
    ratio = statistics.median(values[one]) / statistics.median(values[other])
    return f"{ratio:.3f} ({min(rounds):.3f} to {max(rounds):.3f})"


def measure_shape(options, ranks, shape, keys):
    """A record for each (tokens, op). Who comes first changes with each round."""
    samples = {key: {} for key in keys}
    for turn in range(options.rounds):
        theirs = their_results(options, ranks, shape, keys) if turn % 2 == 0 else None
        ours = {(tokens, op): measure_ours(options, op, ranks, shape, tokens) for tokens, op in keys}
        theirs = theirs or their_results(options, ranks, shape, keys)
        for key in keys:
            for name, value in {**theirs[key]["ms"], **ours[key][0]}.items():
                samples[key].setdefault(name, []).append(value)
    records = []
    for key in keys:
        ms = {name: statistics.median(times) for name, times in samples[key].items()}
        _, flops, need = ours[key]
        records.append(dict(op=key[1], shape=shape, tokens=key[0], ms=ms, rounds=samples[key], tflops=flops / ms["layer"] / 1e9,
                            bytes={**theirs[key]["bytes"], "layer": need}))
    return records


def row_of(record, as_eight):
    ms, values = record["ms"], record["rounds"]
    pairs = [("layer", "torch GEMMs"), ("nccl", "layer")] + ([] if as_eight else [("deepep", "layer")])
    ratios = [ratio_text(values, *pair) for pair in pairs]
    return (f"{record['op']:8s} {record['shape']:17s} {record['tokens']:5d} {ms['layer']:8.3f} {record['tflops']:7.0f} {ms['gemms']:8.3f} "
            f"{ms['torch GEMMs']:10.3f} {ms['nccl']:8.3f} {ms.get('deepep', float('nan')):8.3f} | {', '.join(ratios)}")


def check_routing(options, ranks):
    if options.routing.startswith(ZIPF):
        float(options.routing.removeprefix(ZIPF))
        return
    ids = numpy.load(options.routing)
    for shape in options.shapes:
        experts, topk = sizes_of(shape, options, ranks)[2:]
        for tokens in options.tokens:
            if ids.shape != (ranks * tokens, topk) or ids.min() < 0 or ids.max() >= experts:
                raise SystemExit(f"--routing: {options.routing} holds {ids.shape}, experts {ids.min()} to {ids.max()}; {shape} with "
                                 f"{tokens} tokens on {ranks} GPUs needs {(ranks * tokens, topk)}, experts 0 to {experts - 1}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--op", default="forward", help="of forward, backward, step (default forward)")
    parser.add_argument("--routing", metavar="zipf:S|FILE.npy")
    parser.add_argument("--as-eight", action="store_true", help="load fewer GPUs as eight would be")
    parser.add_argument("--wgrad", choices=("bf16", "fp32", "main_grad"), default="bf16", help="ours; theirs is bf16")
    parser.add_argument("--schedule", help="ours")
    parser.add_argument("--schedule-backward", help="ours")
    parser.add_argument("--processes", action="store_true", help="ours: a process a GPU, as theirs are")
    parser.add_argument("--shapes", default="dsv3,qwen3-235b,qwen3-30b,mixtral")
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=float, default=0.3, metavar="SECONDS")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.op = options.op.split(",")
    if not set(options.op) <= {"forward", "backward", "step"}:
        parser.error(f"--op: {','.join(options.op)}; must be some of forward, backward, step")
    if options.as_eight and options.routing is not None:
        parser.error("--as-eight: has a routing of its own; leave --routing out")
    options.shapes = split_shapes(options.shapes)
    if "step" in options.op and any(FORMULAS.get(shape) == "gpt-oss" for shape in options.shapes):
        parser.error("--op step: gpt-oss has biases, which `uniep bench` measures in forward and backward alone")
    options.tokens = [int(tokens) for tokens in options.tokens.split(",")]
    ranks = torch.cuda.device_count()
    if options.routing is not None:
        check_routing(options, ranks)
    print(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
    print("op       shape                 T    layer TFLOP/s    GEMMs torch GEMMs     nccl   deepep | layer / torch GEMMs, "
          "nccl / layer, deepep / layer (range of the rounds)")
    settings = dict(wgrad=options.wgrad, routing="as eight" if options.as_eight else options.routing,
                    launch="processes" if options.processes else "threads", device=torch.cuda.get_device_name(), gpus=ranks,
                    warm_up=options.warm_up, repeat=options.repeat, turns=options.rounds, schedule=options.schedule,
                    schedule_backward=options.schedule_backward)
    records = Records(options.json, settings)
    for shape in options.shapes:
        keys = [(tokens, op) for tokens, op in itertools.product(options.tokens, options.op)]
        new = [(tokens, op) for tokens, op in keys if not records.find(op=op, shape=shape, tokens=tokens)]
        measured = [records.add(**record) for record in (measure_shape(options, ranks, shape, new) if new else [])]
        known = [records.find(op=op, shape=shape, tokens=tokens) for tokens, op in keys if (tokens, op) not in new]
        for record in known + measured:
            print(row_of(record, options.as_eight), flush=True)


if __name__ == "__main__":
    main()
