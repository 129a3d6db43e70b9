"""What a layer and the collectives beside it cost each other, by how SMs are left to them: steps of uniep.moe() under autograd, a process
per GPU, each followed by all-reduces of NCCL that run beside the next one, as gradients are reduced.

    python3 bench/beside_collectives.py build/release/uniep [--shapes dsv3,qwen3-235b,qwen3-30b] [--tokens 8192] [--steps 4]
        [--mib 64,192] [--sms 8] [--rounds 2] [--json FILE]

Ways: `no collectives`: the steps alone, no SM reserved; `apart`: no SM reserved, and each step waits for the all-reduces before it;
`kept` and `lent`: --sms SMs are reserved (comm.reserve_sms), or lent (comm.lend_sms), and NCCL takes as many CTAs at most; in streams of
ordinary priority, or of high priority (`first`), as TORCH_NCCL_HIGH_PRIORITY=1 makes them. --mib: of the all-reduces behind a step.

Two and four GPUs are loaded as eight would be (compare_layers.py). Each figure is the median over --repeat runs of --steps steps at the
power limit, of each run the slowest GPU, until the last all-reduce is over. Prints a Markdown table: milliseconds a step. What FILE has
(records.py) is not measured again.
"""

import statistics

import torch
import torch.distributed as dist

import compare_fused
import serialized_layer
from records import Records, device_name
from shapes import EIGHT
from training_layer import keys_of, make_parser, measured, rank_of

WAYS = {  # by name: the schedule, whether NCCL's streams have high priority, and whether steps wait; None: no collectives
    "no collectives": ("comm.reserve_sms=0", None, False),
    "apart": ("comm.reserve_sms=0", False, True),
    "kept": ("comm.reserve_sms={}", False, False),
    "kept, first": ("comm.reserve_sms={}", True, False),
    "lent": ("comm.reserve_sms={},comm.lend_sms=on", False, False),
    "lent, first": ("comm.reserve_sms={},comm.lend_sms=on", True, False),
}


def collectives(sms, first):
    """A process group of NCCL that takes so many SMs at most."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=first)
    options.config.max_ctas = sms
    return dist.new_group(backend="nccl", pg_options=options)


def steps(step, count, group, buffers, waits):
    """`count` steps, and behind each an all-reduce of each buffer; all of them are over at the end."""

    def run():
        under_way = []
        for _ in range(count):
            step()
            begun = [dist.all_reduce(one, group=group, async_op=True) for one in buffers] if group is not None else []
            for work in under_way if not waits else begun:
                work.wait()
            under_way = [] if waits else begun
        for work in under_way:
            work.wait()

    return run


def measure(rank, ranks, options, texts, keys):
    """Adds a record for each (shape, tokens) of `keys`, on the first rank."""
    serialized_layer.join(rank, ranks, with_deepep=False)
    layer = compare_fused.UniEP(ranks, options)
    records = Records(options.json, options.settings)
    groups = {first: collectives(options.sms, first) for first in (False, True)} | {None: None}
    buffers = [torch.zeros(mib << 18, device="cuda") for mib in options.mib]
    for shape, tokens in keys:
        own = rank_of(rank, ranks, shape, tokens)
        runs = {}
        for name, (given, first, waits) in WAYS.items():
            ways, _ = layer.ways(own, schedule=texts[shape][given.format(options.sms)])
            runs[name] = steps(ways["step"], options.steps, groups[first], buffers, waits)
        for run in runs.values():  # makes communicators and kernels before anything overlaps
            run()
            torch.cuda.synchronize()
            dist.barrier()
        alone = steps(lambda: None, options.steps, groups[False], buffers, True)
        times = {name: [] for name in (*runs, "all-reduces alone")}
        for turn in range(options.rounds):
            names = [*runs]
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                times[name].append(own.median(runs[name], options.repeat, options.warm_up) / options.steps)
            times["all-reduces alone"].append(own.median(alone, options.repeat, options.warm_up) / options.steps)
        if rank == 0:
            records.add(shape=shape, tokens=tokens, rounds=times)
            print(f"{shape} {tokens}: measured", flush=True)
        del own, runs
        torch.cuda.empty_cache()
    dist.barrier()
    layer.end()
    serialized_layer.leave()


def print_table(records):
    names = list(records[0]["rounds"])
    print("\n| ms a step | T | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 2))
    for record in records:
        cells = [f"{statistics.median(record['rounds'][name]):.3f}" for name in names]
        print(f"| {record['shape']} | {record['tokens']} | " + " | ".join(cells) + " |")


def main():
    parser = make_parser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--mib", default="64,192")
    parser.add_argument("--sms", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--warm-up", type=float, default=0.3, metavar="SECONDS")
    options = parser.parse_args()
    options.mib = [int(one) for one in options.mib.split(",")]
    keys = keys_of(parser, options, (2, 4, EIGHT))
    options.settings = dict(device=device_name(), gpus=torch.cuda.device_count(), warm_up=options.warm_up, repeat=options.repeat,
                            turns=options.rounds, steps=options.steps, mib=options.mib, sms=options.sms)
    print_table(measured(options, measure, keys, {given.format(options.sms) for given, _, _ in WAYS.values()}))


if __name__ == "__main__":
    main()
