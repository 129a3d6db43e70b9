"""A model's calls, with a process a GPU: a placement and a forward of each of eight layers, then backward of each, back to back; beside
the same calls one at a time, with the GPUs idle between them.

    torchrun --nproc-per-node 8 bench/model_calls.py [--shapes dsv3,...] [--tokens 8192] [--rounds 5] [--json FILE]

Layers share their weights, whose gradients are added to fp32 main_grad; each has a routing of its own. The placement is by need, which
waits for the GPUs, or within a capacity of 1.2 times the rows that even routing gives. A line a shape and number of tokens:
milliseconds of a layer, medians of the rounds, of each the slowest GPU; `model` by the host's clock until all GPUs are done, `apart` by
the GPU's, the sum of two calls. What FILE has (records.py) is not measured again. --cpu: over gloo with a small layer, which tries
the program and measures nothing.
"""

import argparse
import datetime
import os
import statistics
import time

import torch
import torch.distributed as dist

import uniep
from records import Records
from shapes import SHAPES

SMALL = {"small": (256, 128, 8, 2)}
LAYERS = 8
PLACEMENTS = {"by need": None, "in a capacity": 1.2}


class Model:
    def __init__(self, sizes, tokens, group, device):
        hidden, intermediate, experts, topk = sizes
        self.group, self.device, self.tokens = group, device, tokens
        torch.manual_seed(group.rank)
        rand = lambda *size: torch.randn(*size, device=device, dtype=torch.bfloat16)
        local = experts // group.size
        self.weights = [rand(local, 2 * intermediate, hidden).mul_(hidden**-0.5).requires_grad_(),
                        rand(local, hidden, intermediate).mul_(intermediate**-0.5).requires_grad_()]
        self.main_grad = tuple(torch.zeros(weight.shape, device=device) for weight in self.weights)
        self.x, self.dy = rand(tokens, hidden).requires_grad_(), rand(tokens, hidden)
        self.ids = [torch.rand(tokens, experts, device=device).topk(topk, dim=-1).indices.int() for _ in range(LAYERS)]
        self.probs = torch.full((tokens, topk), 1 / topk, device=device, requires_grad=True)

    def forward(self, layer, factor):
        return uniep.moe(self.x, self.ids[layer], self.probs, *self.weights, group=self.group, main_grad=self.main_grad,
                         capacity=None if factor is None else (factor, self.tokens))

    def backward(self, y):
        y.backward(self.dy)
        self.x.grad = self.probs.grad = None

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def slowest(self, milliseconds):
        most = torch.tensor(milliseconds, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.item()

    def back_to_back(self, factor):
        self.wait()
        dist.barrier()
        self.wait()
        begin = time.perf_counter()
        results = [self.forward(layer, factor) for layer in range(LAYERS)]
        while results:
            self.backward(results.pop())
        self.wait()
        return self.slowest(1e3 * (time.perf_counter() - begin) / LAYERS)

    def apart(self, factor):
        total, y = 0.0, None
        for call in (lambda: self.forward(0, factor), lambda: self.backward(y)):
            self.wait()
            dist.barrier()
            self.wait()
            begin = self.mark()
            y = call()
            end = self.mark()
            self.wait()
            total += self.slowest(begin.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - begin))
        return total

    def mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(True)
        event.record()
        return event


def measure(model, rounds):
    """Milliseconds of each round by way."""
    found = {}
    for turn in range(rounds + 1):
        for name, factor in PLACEMENTS.items():
            one = {f"model, {name}": model.back_to_back(factor),
                   f"apart, {name}": statistics.median(model.apart(factor) for _ in range(LAYERS))}
            for way, ms in one.items():
                if turn > 0:  # the first has kernels to load
                    found.setdefault(way, []).append(ms)
    return found


def main():
    parser = argparse.ArgumentParser(description="a model's calls back to back and one at a time")
    parser.add_argument("--shapes", default="qwen3-30b,qwen3-235b,dsv3,mixtral")
    parser.add_argument("--tokens", default="8192,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    known = SMALL if options.cpu else SHAPES
    for shape in options.shapes.split(","):
        if shape not in known:
            parser.error(f"--shapes: {shape}; must be some of {', '.join(known)}")
    device = torch.device("cpu" if options.cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not options.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.cpu else "nccl", timeout=datetime.timedelta(minutes=3))
    group = uniep.Group(device=device)
    name = "CPU" if options.cpu else torch.cuda.get_device_name()
    records = Records(options.json, {"device": name, "gpus": group.size, "layers": LAYERS, "turns": options.rounds})
    for shape in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            record = records.find(shape=shape, tokens=tokens)  # the same on all ranks, for none has written to FILE yet
            if record is None:
                rounds = measure(Model(known[shape], tokens, group, device), options.rounds)
                if group.rank > 0:
                    continue
                record = records.add(shape=shape, tokens=tokens, rounds=rounds)
            if group.rank == 0:
                times = [f"{way} {statistics.median(ms):.3f}" for way, ms in record["rounds"].items()]
                print(f"{shape} {tokens}: {', '.join(times)} ms", flush=True)
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
