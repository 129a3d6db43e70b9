"""Trains a small mixture-of-experts language model on bytes, on a laptop or on GPUs:

    torchrun --nproc-per-node 4 examples/python/train_moe.py --compare

Ranks share the experts, and each has its own part of the data. --layer torch runs the same model with experts in plain
PyTorch, all of them on every rank; --compare trains both, from the same weights on the same data.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch.nn import functional

import uniep

DEFAULT_TEXT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "hopper.md"


class TorchExperts(torch.nn.Module):
    """All experts on every rank, one after the other."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(x[token], gate_up).chunk(2, dim=-1)
            rows = functional.linear(functional.silu(gate) * up, down) * probs[token, slot, None]
            y = y.index_add(0, token, rows.to(y.dtype))
        return y


class MoE(torch.nn.Module):
    """A router, and experts whose weights depend on neither the layer's kind nor the number of ranks."""

    def __init__(self, options: argparse.Namespace, kind: str, group: uniep.Group) -> None:
        super().__init__()
        hidden, intermediate, experts = options.hidden, options.intermediate, options.experts
        self.topk = options.topk
        self.router = torch.nn.Linear(hidden, experts, bias=False)
        gate_up = torch.empty(experts, 2 * intermediate, hidden).uniform_(-1, 1) * hidden**-0.5
        down = torch.empty(experts, hidden, intermediate).uniform_(-1, 1) * intermediate**-0.5
        if kind == "torch":
            self.experts = TorchExperts(gate_up, down)
        else:
            with torch.random.fork_rng(devices=[]):  # what it draws is replaced
                self.experts = uniep.Experts(
                    num_experts=experts, hidden=hidden, intermediate=intermediate, group=group, dtype=torch.float32
                )
            with torch.no_grad():
                self.experts.gate_up_proj.copy_(gate_up.chunk(group.size)[group.rank])
                self.experts.down_proj.copy_(down.chunk(group.size)[group.rank])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            probs, ids = torch.softmax(self.router(flat.float()), -1).topk(self.topk)
        probs = probs / probs.sum(-1, keepdim=True)
        return self.experts(flat, ids, probs).view(x.shape)


class Block(torch.nn.Module):
    def __init__(self, options: argparse.Namespace, kind: str, group: uniep.Group) -> None:
        super().__init__()
        hidden = options.hidden
        self.heads = hidden // 32
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = (
            torch.nn.Linear(hidden, 3 * hidden, bias=False),
            torch.nn.Linear(hidden, hidden, bias=False),
        )
        self.moe = MoE(options, kind, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.moe(self.norms[1](x).bfloat16())


class Model(torch.nn.Module):
    def __init__(self, options: argparse.Namespace, kind: str, group: uniep.Group) -> None:
        super().__init__()
        self.bytes, self.places = (
            torch.nn.Embedding(256, options.hidden),
            torch.nn.Embedding(options.length, options.hidden),
        )
        self.blocks = torch.nn.ModuleList(Block(options, kind, group) for _ in range(options.layers))
        self.norm, self.head = torch.nn.RMSNorm(options.hidden), torch.nn.Linear(options.hidden, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mean_of_ranks(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    if ranks > 1:
        dist.all_reduce(tensor)
    return tensor / ranks


def train(options: argparse.Namespace, kind: str, group: uniep.Group) -> list[float]:
    """Losses of all steps, of the whole batch."""
    torch.manual_seed(options.seed)
    model = Model(options, kind, group).to(group.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    data = torch.Generator().manual_seed(options.seed + group.rank)
    losses, begin = [], time.perf_counter()
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.length - 1, (options.batch,), generator=data).tolist()
        rows = torch.stack([text[start : start + options.length + 1] for start in starts]).to(group.device)
        with torch.autocast(group.device.type, torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        experts = set(uniep.expert_parameters(model).values())
        for parameter in model.parameters():
            if parameter not in experts:
                parameter.grad = mean_of_ranks(parameter.grad, group.size)
        uniep.average_expert_gradients(model)
        optimizer.step()
        losses.append(mean_of_ranks(loss.detach(), group.size).item())
        if group.rank == 0 and (step % 10 == 0 or step + 1 == options.steps):
            print(f"{kind:<6} step {step:>4}  loss {losses[-1]:.4f}  {time.perf_counter() - begin:.1f} s", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=["uniep", "torch"], default="uniep")
    parser.add_argument("--compare", action="store_true", help="train with both layers")
    parser.add_argument("--text", type=pathlib.Path, default=DEFAULT_TEXT, help="any file")
    numbers = {"steps": 60, "layers": 2, "hidden": 128, "intermediate": 128, "experts": 8, "topk": 2}
    for name, default in (numbers | {"length": 64, "batch": 4, "seed": 1}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()

    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    with uniep.Group() as group:
        if group.rank == 0:
            print(f"{group.size} ranks on {group.device.type}, transport {group.transport}")
        kinds = ["torch", "uniep"] if options.compare else [options.layer]
        losses = {kind: train(options, kind, group) for kind in kinds}
        if options.compare and group.rank == 0:
            apart = max(abs(a - b) / a for a, b in zip(losses["torch"], losses["uniep"], strict=True))
            print(f"losses at most {100 * apart:.2f} % apart; the last: {losses['torch'][-1]:.4f} torch, ", end="")
            print(f"{losses['uniep'][-1]:.4f} uniep")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
