"""Grouped GEMMs: torch._grouped_mm and UniEP in turn, on one GPU, on the same data.

Each figure is the median of --repeat runs timed with device events around all device work, the two libraries taking
turns, the L2 cache flushed before each run. Rows: one rank of an 8-rank expert-parallel group with uniform routing.

    python3 bench/compare.py LIBRARY [--shapes dsv3,mixtral] [--tokens 4096,8192] [--ops fc1,wgrad1] [--json FILE]

LIBRARY is bench/gemm_c_interface.cpp built as a shared library with the engine (tests/cuda/run_on_gpu.sh does it).
"""

import argparse
import ctypes
import json
import math
import statistics
import time

import torch

SHAPES = {
    "dsv3": (7168, 2048, 256, 8),
    "qwen235": (4096, 1536, 128, 8),
    "qwen30": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
}
RANKS = 8
BF16 = torch.bfloat16


class Engine:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.gemm_error.restype = ctypes.c_char_p

    def call(self, name, rows, *arguments):
        values = [ctypes.c_int(rows.experts), ctypes.c_longlong(rows.padded), rows.start, rows.count, *arguments]
        converted = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else v for v in values]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if getattr(self.lib, name)(*converted, stream) != 0:
            raise RuntimeError(self.lib.gemm_error().decode())

    def tune(self, text):
        fields = dict(item.split("=") for item in text.split(",") if item)
        self.lib.gemm_tune(*(int(fields.get(key, 0)) for key in ("tile_n", "stages", "cluster", "raster", "sms")))


class Rows:
    """Rows of one rank's experts: compact for torch, padded to 128 for UniEP."""

    def __init__(self, tokens, experts, top_k, seed):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        counts = torch.zeros(experts, dtype=torch.long, device="cuda")
        for _ in range(RANKS):
            ids = torch.rand(tokens, experts, device="cuda", generator=generator).topk(top_k, dim=-1).indices
            counts += torch.bincount(ids.flatten(), minlength=experts)
        self.experts = experts // RANKS
        counts = counts[: self.experts]
        padded = (counts + 127) // 128 * 128
        self.total = int(counts.sum())
        self.padded = int(padded.sum())
        self.count = counts.to(torch.int32)
        self.start = (padded.cumsum(0) - padded).to(torch.int32)
        self.ends = counts.cumsum(0).to(torch.int32)
        expert = torch.repeat_interleave(torch.arange(self.experts, device="cuda"), counts)
        first = (counts.cumsum(0) - counts)[expert]
        self.place = self.start.long()[expert] + torch.arange(self.total, device="cuda") - first

    def pad(self, compact):
        out = torch.zeros(self.padded, compact.size(1), dtype=compact.dtype, device="cuda")
        out[self.place] = compact
        return out


def build_operations(engine, rows, hidden, inter):
    """name -> (torch's call, ours, pair of results to compare or None, floating-point operations)."""
    e = rows.experts
    rand = lambda r, c, s=1.0: (torch.randn(r, c, device="cuda", dtype=torch.float32) * s).to(BF16)
    x, dy = rand(rows.total, hidden), rand(rows.total, hidden)
    a, z, dz = rand(rows.total, inter), rand(rows.total, 2 * inter), rand(rows.total, 2 * inter)
    w1 = (torch.randn(e, 2 * inter, hidden, device="cuda", dtype=BF16)) * 0.02
    w2 = (torch.randn(e, hidden, inter, device="cuda", dtype=BF16)) * 0.02
    px, pdy, pa, pz, pdz = (rows.pad(t) for t in (x, dy, a, z, dz))
    prob = torch.rand(rows.padded, device="cuda")
    out = lambda c, dtype=BF16: torch.empty(rows.padded, c, dtype=dtype, device="cuda")
    oz, oa, oh, odz = out(2 * inter), out(inter), out(hidden), out(2 * inter)
    dprob = torch.empty(rows.padded, device="cuda")
    workspace = torch.empty(((inter + 63) // 64) * rows.padded, device="cuda")
    dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)
    main = torch.zeros(w1.shape, dtype=torch.float32, device="cuda")
    g = torch._grouped_mm
    ends = rows.ends
    saved = {}

    def keep(name, function):
        def call():
            saved[name] = function()

        return call

    def torch_accumulate():
        main.add_(g(dz.t(), x, offs=ends))

    i = ctypes.c_int
    dense = 2 * rows.total * hidden * inter
    ops = {
        "fc1": (keep("fc1", lambda: g(x, w1.transpose(1, 2), offs=ends)),
                lambda: engine.call("gemm_forward", rows, px, w1, oz, i(2 * inter), i(hidden)), oz, 2 * dense),
        "fc2": (keep("fc2", lambda: g(a, w2.transpose(1, 2), offs=ends)),
                lambda: engine.call("gemm_forward", rows, pa, w2, oh, i(hidden), i(inter)), oh, dense),
        "dgrad2": (keep("dgrad2", lambda: g(dy, w2, offs=ends)),
                   lambda: engine.call("gemm_input_gradient", rows, pdy, w2, oa, i(inter), i(hidden)), oa, dense),
        "dgrad1": (keep("dgrad1", lambda: g(dz, w1, offs=ends)),
                   lambda: engine.call("gemm_input_gradient", rows, pdz, w1, oh, i(hidden), i(2 * inter)), oh,
                   2 * dense),
        "wgrad2": (keep("wgrad2", lambda: g(dy.t(), a, offs=ends)),
                   lambda: engine.call("gemm_weight_gradient", rows, pdy, pa, dw2, i(hidden), i(inter), i(0)), dw2,
                   dense),
        "wgrad1": (keep("wgrad1", lambda: g(dz.t(), x, offs=ends)),
                   lambda: engine.call("gemm_weight_gradient", rows, pdz, px, dw1, i(2 * inter), i(hidden), i(0)), dw1,
                   2 * dense),
        # Fused epilogues, against our own plain GEMM of the same shape (fc1, dgrad2) or torch's separate steps.
        "fc1+swiglu": (lambda: engine.call("gemm_forward", rows, px, w1, oz, i(2 * inter), i(hidden)),
                       lambda: engine.call("gemm_forward_swiglu", rows, px, w1, prob, oz, oa, i(inter), i(hidden)),
                       None, 2 * dense),
        "dgrad2+dswiglu": (lambda: engine.call("gemm_input_gradient", rows, pdy, w2, oa, i(inter), i(hidden)),
                           lambda: engine.call("gemm_input_gradient_swiglu", rows, pdy, w2, pz, prob, oa, odz, dprob,
                                               workspace, i(inter), i(hidden)), None, dense),
        "wgrad1+=": (torch_accumulate,
                     lambda: engine.call("gemm_weight_gradient", rows, pdz, px, main, i(2 * inter), i(hidden), i(2)),
                     None, 2 * dense),
    }
    return ops, saved


def measure(first, second, flush, repeat):
    times = ([], [])
    for turn in range(repeat + 3):
        for which, function in enumerate((first, second)):
            flush.zero_()  # out of the L2 cache
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[which].append(begin.elapsed_time(end))
    return statistics.median(times[0]), statistics.median(times[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--ops", default="")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--tune", action="append", help="tile_n=128,stages=4,...; repeat to compare several")
    parser.add_argument("--json")
    options = parser.parse_args()
    engine = Engine(options.library)
    torch.zeros(1, device="cuda")
    begin = time.perf_counter()
    if engine.lib.gemm_prepare() != 0:
        raise RuntimeError(engine.lib.gemm_error().decode())
    print(f"compiled or loaded all default kernels in {time.perf_counter() - begin:.3f} s")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    records = []
    print("shape     T     op               tune                 torch ms  ours ms   TFLOP/s torch  ours   ratio  differs")
    for name in options.shapes.split(","):
        hidden, inter, experts, top_k = SHAPES[name]
        for tokens in map(int, options.tokens.split(",")):
            rows = Rows(tokens, experts, top_k, tokens)
            ops, saved = build_operations(engine, rows, hidden, inter)
            for op, (first, second, ours, flops) in ops.items():
                if options.ops and op not in options.ops.split(","):
                    continue
                for tune in options.tune or [""]:
                    engine.tune(tune)
                    t, u = measure(first, second, flush, options.repeat)
                    differs = ""
                    if ours is not None:
                        mine = ours[rows.place] if ours.dim() == 2 else ours
                        reference = saved[op].float()
                        differs = f"{((mine.float() - reference).norm() / reference.norm()).item():.1e}"
                        saved.clear()
                    record = dict(shape=name, tokens=tokens, op=op, tune=tune, first_ms=t, ours_ms=u, ratio=t / u,
                                  tflops=flops / u / 1e9)
                    records.append(record)
                    print(f"{name:9s} {tokens:5d} {op:16s} {tune:20s} {t:8.3f} {u:8.3f}   {flops / t / 1e9:9.0f} "
                          f"{flops / u / 1e9:9.0f}  {t / u:6.3f}  {differs}", flush=True)
            del ops, saved, first, second, ours, rows
            torch.cuda.empty_cache()
    for group in ("fc", "dgrad", "wgrad", ""):
        ratios = [r["ratio"] for r in records if "+" not in r["op"] and r["op"].startswith(group)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"geometric mean of {group or 'all'}: {mean:.3f} over {len(ratios)}, worst {min(ratios):.3f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), records=records), file)


if __name__ == "__main__":
    main()
