"""The layer as a training job calls it, and what each part of that costs: uniep.moe() under autograd, a process per GPU, the placement in
the call, within a capacity.

`alone` reserves no SMs and returns weight gradients in bf16. `reserve 8` and `reserve 16` leave SMs free for collectives, none of which
runs here; `lend 16` uses them until one comes; `main_grad` adds weight gradients in fp32 to memory that is there; `job 8` and `job 16`
reserve SMs and add, `job 16 lent` lends them and adds. Beside them, in turn in the
same processes: `NCCL`, all_to_all_single with torch's grouped GEMMs and compiled activations, and `torch GEMMs`, those GEMMs without
anything else, on all SMs, with gradients in bf16 (serialized_layer.py); neither has a placement in its time.

    python3 bench/training_layer.py build/release/uniep [--shapes dsv3,qwen3-235b,qwen3-30b] [--tokens 8192] [--rounds 2] [--json FILE]

Two and four GPUs are loaded as eight would be, and run what eight run by default (compare_layers.py); one has the experts of one of eight
ranks, and nothing travels. Each figure is the median over --repeat calls at the power limit, of each call the slowest GPU, with cold L2
caches. Prints a Markdown table for each of forward and step: milliseconds of `alone`, NCCL and torch's GEMMs, and of each way the median
over the rounds of its ratio to `alone` of its round. What FILE has (records.py) is not measured again.
"""

import argparse
import itertools
import os
import statistics
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import compare_fused
import remote_routing
import serialized_layer
from records import Records, device_name
from shapes import EIGHT, SHAPES

OPS = ("forward", "step")
JOBS = {  # by name: the schedule, and whether weight gradients are added to main_grad
    "alone": ("comm.reserve_sms=0", False),
    "reserve 8": ("comm.reserve_sms=8", False),
    "reserve 16": ("comm.reserve_sms=16", False),
    "lend 16": ("comm.reserve_sms=16,comm.lend_sms=on", False),
    "main_grad": ("comm.reserve_sms=0", True),
    "job 8": ("comm.reserve_sms=8", True),
    "job 16": ("comm.reserve_sms=16", True),
    "job 16 lent": ("comm.reserve_sms=16,comm.lend_sms=on", True),
}
THEIRS = ("NCCL", "torch GEMMs")


def as_eight(ranks):
    return 1 < ranks < EIGHT


def schedules(uniep, shape, ranks, given):
    """Of forward and backward, as text."""
    if not as_eight(ranks):
        return given, given
    return tuple(remote_routing.schedule_of_eight(uniep, SHAPES[shape], direction, given) for direction in ("forward", "backward"))


def our_ways(own, layer, texts):
    """{(name, op): what is timed}. `layer`: of compare_fused.py; `texts`: by what JOBS has."""
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in (own.weights.w1, own.weights.w2)]
    found = {}
    for name, (given, adds) in JOBS.items():
        ways, _ = layer.ways(own, schedule=texts[given], main_grad=sums if adds else None)
        found |= {(name, op): ways[op] for op in OPS if op == "step" or not adds}
    return found


def rank_of(rank, ranks, shape, tokens):
    """The part of a layer that is this rank's."""
    hidden, inter, experts, topk = SHAPES[shape]
    experts = experts * ranks // EIGHT
    routing = torch.from_numpy(remote_routing.remote_ids(experts, ranks, tokens, topk)) if as_eight(ranks) else None
    return serialized_layer.Rank(rank, ranks, (hidden, inter, experts, topk), tokens, routing=routing)


def measure(rank, ranks, options, texts, keys):
    """Adds a record for each (shape, tokens) of `keys`, on the first rank."""
    serialized_layer.join(rank, ranks, with_deepep=False)
    layer = compare_fused.UniEP(ranks, options)
    records = Records(options.json, options.settings)
    for shape, tokens in keys:
        own = rank_of(rank, ranks, shape, tokens)
        ways = our_ways(own, layer, texts[shape])
        compare_fused.check("UniEP", ways["alone", "forward"](), own.nccl()().float())
        for op in OPS:
            ways |= {("NCCL", op): own.nccl(op), ("torch GEMMs", op): own.gemms(op)}
        times = {op: {} for op in OPS}
        for op, turn in itertools.product(OPS, range(options.rounds)):
            names = [name for name, of in ways if of == op]
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                times[op].setdefault(name, []).append(own.median(ways[name, op], options.repeat, options.warm_up))
        if rank == 0:
            records.add(shape=shape, tokens=tokens, rounds=times)
            print(f"{shape} {tokens}: measured", flush=True)
        del own, ways
        torch.cuda.empty_cache()
    dist.barrier()
    layer.end()
    serialized_layer.leave()


def print_table(op, records):
    names = [name for name in JOBS if name in records[0]["rounds"][op]]
    print(f"\n| {op} | T | alone, ms | " + " | ".join(f"{name} / alone" for name in names[1:]) + " | "
          + " | ".join(f"{name}, ms" for name in THEIRS) + f" | {names[-1]} / torch GEMMs | NCCL / {names[-1]} |")
    print("|" + "---|" * (len(names) + len(THEIRS) + 4))
    for record in records:
        rounds = record["rounds"][op]
        ratio = lambda one, other: f"{statistics.median(a / b for a, b in zip(rounds[one], rounds[other])):.3f}"
        cells = [record["shape"], record["tokens"], f"{statistics.median(rounds['alone']):.3f}", *(ratio(name, "alone") for name in names[1:]),
                 *(f"{statistics.median(rounds[name]):.3f}" for name in THEIRS), ratio(names[-1], "torch GEMMs"), ratio("NCCL", names[-1])]
        print("| " + " | ".join(map(str, cells)) + " |")


def make_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--shapes", default="dsv3,qwen3-235b,qwen3-30b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", default="8192")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    return parser


def keys_of(parser, options, legal):
    """(shape, tokens) of all layers that are asked for, on as many GPUs as are here."""
    shapes, ranks = options.shapes.split(","), torch.cuda.device_count()
    if ranks not in legal:
        parser.error(f"{ranks} GPUs; must be {', '.join(map(str, legal))}")
    unknown = [shape for shape in shapes if shape not in SHAPES or SHAPES[shape][2] * ranks // EIGHT < SHAPES[shape][3]]
    if unknown:
        parser.error(f"--shapes: {', '.join(unknown)}; must be some of {', '.join(SHAPES)}, with as many experts as a token has slots")
    return list(itertools.product(shapes, [int(count) for count in options.tokens.split(",")]))


def measured(options, measure, keys, all_given):
    """A record for each of `keys`; measure(rank, ranks, options, texts, keys) adds those that are not there, in a process a GPU.
    `all_given`: what Schedules are given; texts[shape][given] are the texts of forward and backward."""
    ranks = torch.cuda.device_count()
    texts = {shape: {given: schedules(options.uniep, shape, ranks, given) for given in all_given} for shape, _ in keys}
    with tempfile.TemporaryDirectory() as folder:
        options.json = os.path.abspath(options.json) if options.json else os.path.join(folder, "times.jsonl")
        new = [(shape, count) for shape, count in keys if not Records(options.json, options.settings).find(shape=shape, tokens=count)]
        print(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}", flush=True)
        if new:
            mp.spawn(measure, args=(ranks, options, texts, new), nprocs=ranks)
        records = Records(options.json, options.settings)
        return [records.find(shape=shape, tokens=count) for shape, count in keys]


def main():
    parser = make_parser()
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--warm-up", type=float, default=0.3, metavar="SECONDS")
    options = parser.parse_args()
    keys = keys_of(parser, options, (1, 2, 4, EIGHT))
    ranks = torch.cuda.device_count()
    options.settings = dict(device=device_name(), gpus=ranks, warm_up=options.warm_up, repeat=options.repeat, turns=options.rounds)
    found = measured(options, measure, keys, {given for given, _ in JOBS.values()})
    for op in OPS:
        print_table(op, found)


if __name__ == "__main__":
    main()
