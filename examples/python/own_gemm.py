"""Your own grouped GEMM between UniEP's dispatch and combine, beside uniep.moe():

python examples/python/own_gemm.py
torchrun --nproc-per-node 2 examples/python/own_gemm.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional

import uniep

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 96, 64, 32, 8, 2
grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # public from PyTorch 2.10 on


def my_layer(x, ids, probs, w1, w2, group):
    plan = uniep.place(ids, probs, EXPERTS, HIDDEN, group=group)
    rows, row_probs = uniep.dispatch(x, plan)  # expert by expert, each from a multiple of 128 on
    gate, up = grouped_mm(rows, w1.transpose(1, 2), offs=plan.offsets).chunk(2, dim=-1)
    inner = (functional.silu(gate.float()) * up.float() * row_probs[:, None]).bfloat16()
    return uniep.combine(grouped_mm(inner, w2.transpose(1, 2), offs=plan.offsets), plan)


def main():
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    with uniep.Group() as group:
        torch.manual_seed(group.rank)
        local, device = EXPERTS // group.size, group.device
        x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
        probs, ids = torch.rand(TOKENS, EXPERTS, device=device).topk(TOPK)
        w1 = (torch.randn(local, 2 * INTERMEDIATE, HIDDEN, device=device) * 0.1).bfloat16()
        w2 = (torch.randn(local, HIDDEN, INTERMEDIATE, device=device) * 0.1).bfloat16()
        gradients = []
        for layer in (my_layer, uniep.moe):
            tensors = [tensor.clone().requires_grad_() for tensor in (x, probs, w1, w2)]
            y = layer(tensors[0], ids, *tensors[1:], group=group)
            y.float().square().sum().backward()
            gradients.append([y.detach(), *(tensor.grad for tensor in tensors)])
        for name, own, fused in zip(("y", "dx", "dprobs", "dw1", "dw2"), *gradients, strict=True):
            apart = ((own - fused).float().norm() / fused.float().norm()).item()
            print(f"rank {group.rank}: {name:<6} {apart:.4f} apart")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
