#!/usr/bin/env python3
"""What uniep.Verifier costs at the models' sizes, and whether it finds planted bits there. One process a GPU:

    torchrun --nproc-per-node 2 bench/verifier_cost.py [--shapes dsv3,qwen3-235b,qwen3-30b,mixtral] [--tokens 8192] [--json]

Each rank has the experts that it would have of eight ranks, and adds to fp32 main_grad. One layer runs forward and
backward a step. A line a shape, medians in milliseconds: a step without a verifier, and with one that makes no check,
in turn; a check of a forward, and of a backward; a rank's memory that a check took beside the calls', and what
memory_need() says. "bound" is a run whose checks may take 1 % of the time: what three of them took. "found" are bits planted in
one tile of y, dx, dprobs, dw1, dw2 and in a weight, on each rank in turn: named rightly, among the suspects, and all.
Exit status 1 where one was missed, an alarm was false, or a check took more memory than memory_need() says.
--cpu: over gloo with small layers, which tries the program and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import time
import typing
from collections.abc import Iterator

import shapes
import torch
import torch.distributed as dist

import uniep
from uniep import rerun

SMALL = {"small": (256, 128, 32, 2)}
LEGAL = shapes.SHAPES | SMALL
PLANTED = ("y", "dprobs", "dx", "dw1", "dw2", "weight")


class Job:
    """One layer of a shape, as a training step calls it."""

    def __init__(self, name: str, tokens: int, group: uniep.Group, device: torch.device) -> None:
        self.hidden, self.intermediate, experts, self.topk = LEGAL[name]
        local = experts // shapes.EIGHT
        self.group, self.device, self.tokens = group, device, tokens
        experts = local * group.size
        self.topk = min(self.topk, experts)
        torch.manual_seed(group.rank)

        def values(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

        self.w1 = values(local, 2 * self.intermediate, self.hidden).mul_(self.hidden**-0.5).requires_grad_()
        self.w2 = values(local, self.hidden, self.intermediate).mul_(self.intermediate**-0.5).requires_grad_()
        self.gradients = tuple(torch.zeros(w.shape, device=device) for w in (self.w1, self.w2))
        self.x, self.dy = values(tokens, self.hidden).requires_grad_(), values(tokens, self.hidden)
        scores = torch.rand(tokens, experts, device=device)
        self.ids = scores.argsort(1)[:, : self.topk].int()
        self.probs = torch.rand(tokens, self.topk, device=device).requires_grad_()

    def step(self) -> None:
        y = uniep.moe(self.x, self.ids, self.probs, self.w1, self.w2, group=self.group, main_grad=self.gradients)
        y.backward(self.dy)
        self.x.grad = self.probs.grad = None

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, verifier: uniep.Verifier | None, steps: int = 1) -> float:
        self.wait()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
            if verifier is not None:
                verifier.step()
        self.wait()
        return 1e3 * (time.perf_counter() - begin) / steps


def measure(job: Job, rounds: int) -> dict[str, typing.Any]:
    """Times and memory of a shape."""
    job.milliseconds(None, 3)
    without: list[float] = []
    told: list[float] = []
    for _ in range(rounds):
        without.append(job.milliseconds(None, 4))
        with uniep.Verifier(every=10**9) as verifier:
            told.append(job.milliseconds(verifier, 4))
    checks: dict[str, list[float]] = {"forward": [], "backward": []}
    memory = 0
    plain = statistics.median(without)
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        job.milliseconds(None)
        memory = -torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    with uniep.Verifier(every=1, budget=1) as verifier:
        for turn in range(2 * rounds + 2):
            took = job.milliseconds(verifier)
            if turn >= 2:  # the first of each has its kernels to load
                checks[("forward", "backward")[turn % 2]].append(took - plain)
        found = verifier.findings
        need = verifier.memory_need(job.hidden, job.intermediate, job.tokens, job.topk, backward=True)
    if job.device.type == "cuda":
        memory += torch.cuda.max_memory_allocated()
    return {
        "step": plain,
        "step_told": statistics.median(told),
        "check_forward": statistics.median(checks["forward"]),
        "check_backward": statistics.median(checks["backward"]),
        "memory": memory,
        "memory_need": need,
        "false_alarms": found,
    }


def bound(job: Job, seconds: float) -> dict[str, typing.Any]:
    """What three checks took of a job's time where they may take a hundredth."""
    with uniep.Verifier(every=1, budget=0.01) as verifier:
        end = time.perf_counter() + seconds
        go = torch.ones(1, device=job.device)
        while verifier.checks < 3 and go.item():
            job.milliseconds(verifier, 8)
            go.fill_(float(time.perf_counter() < end))
            dist.broadcast(go, 0)
        share = verifier.check_seconds / verifier.step_seconds
        return {"bound_share": share, "bound_checks": verifier.checks, "bound_findings": verifier.findings}


def flip(values: torch.Tensor) -> None:
    """One bit of an exponent, of the first value."""
    first = values.view(-1)[:1]
    if values.dtype == torch.float32:
        first.view(torch.int32).bitwise_xor_(1 << 28)
    else:
        first.view(torch.int16).bitwise_xor_(1 << 12)


@contextlib.contextmanager
def planted(tensor: str, here: bool) -> Iterator[None]:
    """A wrong bit of a result of the job's own call, before the verifier sees it."""
    name = {"y": "forward_sums", "dx": "backward_sums", "dprobs": "backward_sums"}.get(tensor, "gradient_sums")
    place = {"y": 2, "dx": 3, "dprobs": 4, "dw1": 0, "dw2": 1}.get(tensor, 0)
    original = getattr(rerun, name)

    def changed(*arguments: typing.Any) -> typing.Any:
        setattr(rerun, name, original)  # the first call is the job's
        flip(arguments[place].detach())
        return original(*arguments)

    if here and tensor != "weight":
        setattr(rerun, name, changed)
    try:
        yield
    finally:
        setattr(rerun, name, original)


def find(job: Job) -> dict[str, typing.Any]:
    """Bits planted on each rank in turn."""
    right, suspected, total = 0, 0, 0
    missed: list[str] = []
    for bad in range(job.group.size):
        here = job.group.rank == bad
        for tensor in PLANTED:
            findings: list[uniep.Finding] = []
            with uniep.Verifier(every=1, budget=1, on_finding=findings.append) as verifier:
                if tensor in ("dx", "dprobs", "dw1", "dw2"):
                    job.milliseconds(verifier)  # backward's turn is the second
                with planted(tensor, here):
                    job.step()
                if tensor == "weight" and here:
                    expert = verifier.expert_in_turn(verifier._noted.call)  # type: ignore[union-attr]
                    flip(job.w1.detach()[expert])
                verifier.step()
                if tensor == "weight" and here:
                    flip(job.w1.detach()[expert])
            total += 1
            ranks = {finding.rank for finding in findings}
            if ranks == {bad}:
                right += 1
            elif len(findings) == 1 and bad in findings[0].suspects:
                suspected += 1
            else:
                missed.append(f"{tensor} on rank {bad}: {[finding.message for finding in findings]}")
    return {"planted": total, "named": right, "suspected": suspected, "missed": missed}


def main() -> None:
    parser = argparse.ArgumentParser(description="what uniep.Verifier costs, and what it finds")
    parser.add_argument("--shapes", default="dsv3,qwen3-235b,qwen3-30b,mixtral")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20, help="of the run with a bound, at most")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", action="store_true", help="a line of JSON a shape")
    options = parser.parse_args()
    unknown = [name for name in options.shapes.split(",") if name not in LEGAL]
    if unknown:
        parser.error(f"--shapes: {unknown[0]}; must be of {', '.join(LEGAL)}")
    device = torch.device("cpu" if options.cpu else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    if not options.cpu:
        torch.cuda.set_device(device)
    limit = datetime.timedelta(minutes=3)
    dist.init_process_group("gloo" if options.cpu else "nccl", timeout=limit)
    group = uniep.Group(device=device)
    wrong = False
    for name in options.shapes.split(","):
        job = Job(name, options.tokens, group, device)
        result = {"shape": name, "ranks": group.size} | measure(job, options.rounds) | bound(job, options.seconds)
        result |= find(job)
        wrong |= bool(result["missed"] or result["false_alarms"] or result["bound_findings"])
        wrong |= result["memory"] > result["memory_need"]
        if group.rank == 0:
            print(json.dumps(result) if options.json else table_line(result), flush=True)
        del job
    group.close()
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(1)


def table_line(result: dict[str, typing.Any]) -> str:
    times = ", ".join(f"{key} {result[key]:.3f}" for key in ("step", "step_told", "check_forward", "check_backward"))
    return (
        f"{result['shape']}, {result['ranks']} ranks: {times} ms; memory {result['memory'] / 2**20:.0f} of"
        f" {result['memory_need'] / 2**20:.0f} MiB; bound 0.01: {result['bound_share']:.4f} with"
        f" {result['bound_checks']} checks; planted {result['planted']}, named {result['named']}, suspected"
        f" {result['suspected']}{', missed: ' + '; '.join(result['missed']) if result['missed'] else ''}"
    )


if __name__ == "__main__":
    main()
