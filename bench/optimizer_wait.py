"""What it costs that an optimizer waits for the step's calls (docs/pytorch_reference.md, "Errors").

    torchrun --nproc-per-node 2 bench/optimizer_wait.py [--layers 8] [--tokens 4096] [--shape 2048,768,16,8]
        [--steps 20] [--blocks 12] [--cpu] [--json]

Steps of a stack of dense and MoE layers with the wait and without, in blocks that take turns there and back. A block is
timed by the host's clock from an idle GPU to an idle GPU, so the host runs ahead inside of it as in a job. The shape's
experts are those of a rank. Without several native ranks nothing waits, and both are the same.
"""

import argparse
import json
import os
import statistics
import sys
import time

if "--cpu" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("NCCL_MAX_CTAS", "8")

import torch
import torch.distributed as dist

import uniep
from uniep import late_errors


class Block(torch.nn.Module):
    """A dense layer before an MoE layer, so that backward has work behind the last call of the latter."""

    def __init__(self, hidden, intermediate, experts, topk, group):
        super().__init__()
        self.dense = torch.nn.Linear(hidden, hidden, dtype=torch.bfloat16)
        self.moe = uniep.MoELayer(hidden=hidden, intermediate=intermediate, num_experts=experts, topk=topk, group=group)

    def forward(self, x):
        return x + self.moe(self.dense(x))


# The hook leaves out steps that it believes to be inside of backward.
BELIEFS = {True: late_errors._is_in_backward, False: lambda: True}


def seconds_of_block(model, optimizer, x, options, waits):
    late_errors._is_in_backward = BELIEFS[waits]
    dist.barrier()
    synchronize(x.device)
    begin = time.perf_counter()
    for _ in range(options.steps):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(x.device)
    return (time.perf_counter() - begin) / options.steps


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shape", default="2048,768,16,8", help="H,I,E of a rank,K")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if options.cpu else "nccl")
    group = uniep.Group()
    hidden, intermediate, experts, topk = map(int, options.shape.split(","))
    torch.manual_seed(0)
    blocks = [Block(hidden, intermediate, experts * group.size, topk, group) for _ in range(options.layers)]
    model = torch.nn.Sequential(*blocks).to(group.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(options.tokens, hidden, device=group.device).bfloat16()
    times = {True: [], False: []}
    for number in range(-1, options.blocks):
        for waits in (True, False) if number % 2 == 0 else (False, True):
            taken = seconds_of_block(model, optimizer, x, options, waits)
            if number >= 0:
                times[waits].append(1e3 * taken)
    if group.rank == 0:
        found = {"with the wait": statistics.median(times[True]), "without": statistics.median(times[False])}
        found["ratio"] = statistics.median(one / other for one, other in zip(times[True], times[False], strict=True))
        if options.json:
            print(json.dumps({"transport": group.transport, **found}))
        else:
            print(", ".join(f"{name}: {value:.3f}" for name, value in found.items()), f"(ms a step; {group})")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
