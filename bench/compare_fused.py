"""Fused layers beside each other on all GPUs of a machine, a process a GPU, in the same processes, in turn and behind the same pauses:
UniEP's, FlashInfer's (forward only) and LigerCute's, where they import; the GEMMs of torch._grouped_mm alone beside them.

Each is called as its users call it, so each finds out itself where rows go: uniep.moe() within a capacity, FlashInfer's MoEEpLayer with
its sm90 bf16 push kernels, LigerCute's tvm_ffi functions. A step is forward and backward: uniep.moe() under autograd. All get the same
tokens, weights, experts and router weights, and a y that is not that of NCCL with grouped GEMMs is an error. Each figure is the median
over --repeat calls, of each call the slowest GPU, with cold L2 caches. --warm-up SECONDS, of several separated by commas: as in
compare_layers.py; with 0 all GPUs begin each call together, after a millisecond's rest.

    python3 bench/compare_fused.py [--op forward|step] [--shapes mixtral,qwen3-30b] [--tokens 4096,8192] [--rounds 3] [--json FILE]
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import compare_layers
import serialized_layer

CAPACITY = 1.25  # times the rows of even routing


class UniEP:
    def __init__(self, ranks, options):
        import uniep
        self.uniep, self.group = uniep, uniep.Group(device=torch.device("cuda", torch.cuda.current_device()))

    def ways(self, own, **options):
        """`options`: more of uniep.moe()'s."""
        w1, w2 = own.weights.w1, own.weights.w2
        leaves = [own.x.clone().requires_grad_(), own.probs.clone().requires_grad_(), w1.detach().requires_grad_(), w2.detach().requires_grad_()]
        capacity = CAPACITY, own.tokens
        call = lambda x, probs, w1, w2: self.uniep.moe(x, own.ids, probs, w1, w2, group=self.group, capacity=capacity, **options)

        def forward():
            with torch.no_grad():
                return call(own.x, own.probs, w1, w2)

        def step():
            torch.autograd.grad(call(*leaves), leaves, own.dy, allow_unused=True)  # weights with main_grad have none

        return {"forward": forward, "step": step}, lambda: None

    def end(self):
        self.group.close()


class FlashInfer:
    def __init__(self, ranks, options):
        from flashinfer import moe_ep
        from flashinfer.comm import mnnvl
        self.moe_ep, driver = moe_ep, mnnvl.cuda
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        if not int(driver.cuDeviceGetAttribute(attribute, torch.cuda.current_device())[1]):  # else it is asked for, and refused
            properties = mnnvl.SymmDeviceMemory._get_allocation_prop

            def without_rdma(memory, size):
                found, multicast = properties(memory, size)
                found.allocFlags.gpuDirectRDMACapable = 0
                return found, multicast

            mnnvl.SymmDeviceMemory._get_allocation_prop = without_rdma
        if os.environ.get("NCCL_NVLS_ENABLE") == "0":  # a machine without multicast
            def refuse(*_):
                raise RuntimeError("NCCL_NVLS_ENABLE=0: no multicast")

            for name in ("cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"):
                setattr(driver, name, refuse)

    def ways(self, own):
        e = self.moe_ep
        kernel = e.Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig(intermediate_size=own.inter, top_k=own.topk)
        layer = e.MoEEpLayer(
            bootstrap=e.BootstrapConfig(world_size=dist.get_world_size(), rank=dist.get_rank(), process_group=dist.group.WORLD),
            fleet_params=e.FleetParams(num_experts=own.experts, max_tokens_per_rank=own.tokens, token_hidden_size=own.hidden),
            weights=e.MoEWeightPack(w13=own.weights.w1, w2=own.weights.w2),
            backend=e.MegaConfig(megakernel=kernel, quantize_input=True, preprocess_weights=True))
        batch = e.MoEEpTensors(hidden_states=own.x, topk_ids=own.ids.int(), topk_weights=own.probs)
        return {"forward": lambda: layer.forward(batch)}, layer.destroy

    def end(self):
        pass


class LigerCute:
    def __init__(self, ranks, options):
        from liger_cute_kernels import MoEConfig, configure, nvshmem, tvm_ffi
        sizes = [compare_layers.SHAPES[shape] for shape in options.shapes]
        configure(process_groups={"ep": dist.group.WORLD}, bootstrap_group=dist.group.WORLD, device=torch.cuda.current_device(),
                  moe=MoEConfig(max_tokens=max(options.tokens), hidden_size=max(s[0] for s in sizes), num_experts=max(s[2] for s in sizes),
                                top_k=max(s[3] for s in sizes), num_hosts=1, gpus_per_host=ranks, group="ep", max_inflight=1))
        self.functions, self.team = tvm_ffi, nvshmem.resolve_team(dist.group.WORLD, create=False)

    def ways(self, own):
        gate, up = (half.contiguous() for half in own.weights.w1.chunk(2, 1))
        experts, probs = own.ids.int(), own.probs.bfloat16()
        given = experts, probs, gate, up, own.weights.w2, own.experts, own.topk, self.team

        def forward():
            found = self.functions.moe_fused_fwd_bf16(own.x, *given)
            self.functions.moe_pop_fwd(self.team)
            return found[0]

        def step():
            _, meta, sorted_meta, offsets, slots, tiles, tile = self.functions.moe_fused_fwd_bf16(own.x, *given)
            self.functions.moe_fused_bwd_bf16(own.dy, sorted_meta, meta, slots, tiles, offsets, *given, tile)
            self.functions.moe_pop_fwd(self.team)

        return {"forward": forward, "step": step}, lambda: None

    def end(self):
        pass


def joined(ranks, options):
    """Those of the layers that can run here, by name."""
    found = {}
    for kind in (UniEP, FlashInfer, LigerCute):
        try:
            found[kind.__name__] = kind(ranks, options)
        except Exception as error:
            if kind is UniEP:
                raise
            if dist.get_rank() == 0:
                print(f"{kind.__name__} is left out: {repr(error)[:200]}", flush=True)
    return found


def check(name, y, reference):
    difference = float((y.float() - reference).norm() / reference.norm())
    worst = torch.tensor(difference, device="cuda")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if not worst < 0.02:
        raise SystemExit(f"{name}: y differs from NCCL's with grouped GEMMs by {float(worst):.3g} of its norm")


def measure(rank, ranks, options, path):
    """The first rank writes {"op shape tokens warm-up": {name: [ms of a round]}}."""
    serialized_layer.join(rank, ranks, with_deepep=False)
    layers, results = joined(ranks, options), {}
    for shape, tokens in itertools.product(options.shapes, options.tokens):
        own = serialized_layer.Rank(rank, ranks, compare_layers.SHAPES[shape], tokens)
        reference = own.nccl()().float()
        ways, ends = {}, []
        for name, layer in layers.items():
            y = None
            try:
                ways[name], end = layer.ways(own)
                ends.append(end)
                y = ways[name]["forward"]()
            except Exception:
                if name == "UniEP":
                    raise
                print(f"{name} fails on rank {rank}: {shape} {tokens}", flush=True)
                traceback.print_exc(limit=3)
            if own.agrees(y is not None):
                check(name, y, reference)
            else:  # on any rank: all leave it out
                ways.pop(name, None)
        ways["torch GEMMs"] = {op: own.gemms(op) for op in options.op}
        for op, warm_up, turn in itertools.product(options.op, options.warm_up, range(options.rounds)):
            names = [name for name in ways if op in ways[name]]
            times = results.setdefault(f"{op} {shape} {tokens} {warm_up:g}", {})
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                times.setdefault(name, []).append(own.median(ways[name][op], options.repeat, warm_up))
        for end in ends:
            end()
        del own, ways, ends, reference
        torch.cuda.empty_cache()
        if rank == 0:
            with open(path, "w") as file:
                json.dump(results, file)
            for key, times in results.items():
                if f" {shape} {tokens} " in key:
                    show(key, times, ranks)
    dist.barrier()
    for layer in layers.values():
        layer.end()
    os._exit(0)  # NVSHMEM is finalized by nobody


def show(key, times, ranks):
    op, shape, tokens, _ = key.split()
    hidden, inter, _, topk = compare_layers.SHAPES[shape]
    flops = {"forward": 6.0, "step": 18.0}[op] * int(tokens) * topk * hidden * inter
    cells = []
    for name, rounds in times.items():
        ratios = [a / b for a, b in zip(rounds, times["UniEP"])]
        cells.append(f"{name} {statistics.median(rounds):.3f} ms, {flops / statistics.median(rounds) / 1e9:.0f} TFLOP/s, "
                     f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"{key}: {'; '.join(cells)}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--op", default="forward", help="of forward, step (default forward)")
    parser.add_argument("--shapes", default="mixtral,dsv3,qwen3-235b,qwen3-30b", help=f"of {', '.join(compare_layers.SHAPES)}")
    parser.add_argument("--tokens", default="8192")
    parser.add_argument("--warm-up", default="0.5,0", metavar="SECONDS")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    options.op, options.shapes = options.op.split(","), options.shapes.split(",")
    for name, given, legal in (("--op", options.op, ("forward", "step")), ("--shapes", options.shapes, compare_layers.SHAPES)):
        if not set(given) <= set(legal):
            parser.error(f"{name}: {','.join(given)}; must be some of {', '.join(legal)}")
    options.tokens = [int(tokens) for tokens in options.tokens.split(",")]
    options.warm_up = [float(seconds) for seconds in options.warm_up.split(",")]
    ranks = torch.cuda.device_count()
    print(f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}; op shape T warm-up: ms, TFLOP/s a GPU, times UniEP's time "
          "(range of the rounds)")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.abspath(options.json) if options.json else os.path.join(folder, "times.json")
        mp.spawn(measure, args=(ranks, options, path), nprocs=ranks)


if __name__ == "__main__":
    main()
