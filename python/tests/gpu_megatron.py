"""Megatron-core's MoE layers beside UniEP's in training, on GPUs: losses, step times, times of a layer, memory.

    NCCL_MAX_CTAS=8 torchrun --nproc-per-node 2 python/tests/gpu_megatron.py [--steps 100] [--json FILE]
        [--hidden 2048 --intermediate 768 --experts 64 --topk 8 --layers 4 --sequence 2048 --micro-batch 2]
        [--only EP2,PP2x2] [--schedule comm.reserve_sms=24] [--tiny] [--cpu]

Runs on 1, 2 or more processes, one a GPU. It needs torch with CUDA, numpy, packaging, setuptools, and on PYTHONPATH
python/ and megatron-core: `pip install --no-deps --target DIR` of its wheel will do, no Transformer Engine. Megatron's
side is its alltoall dispatcher with SequentialMLP, the experts that it has without Transformer Engine: so a step time
says what a user of these gains, and nothing about grouped GEMMs.

Training is chaotic: runs that differ in one rounding drift apart, Megatron's own too. So UniEP's losses may differ from
Megatron's by 0.5 %, or by twice the most that Megatron's differ from its own when the last bits of the experts' weights
change, three times.
In the first step they may differ by 0.1 %. Bits of UniEP's runs with and without recomputation must be equal where
those of Megatron's are.

With NCCL's collectives beside a layer of several ranks, the layer must leave NCCL its SMs: so NCCL_MAX_CTAS (8 where it
is not set) and --schedule go together. --cpu runs over gloo, with megatron_shim.py. Each check prints a line with PASS
or FAIL; the exit status is 1 where one fails.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import os
import statistics
import sys
import time
import traceback
import typing

if "--cpu" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import megatron_shim  # noqa: F401
else:
    os.environ.setdefault("NCCL_MAX_CTAS", "8")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# isort: split
import torch
import torch.distributed as dist

import megatron_training
from megatron_training import Setting, Training, moe_experts, parallelism

WARM_UP = 3
NUDGES = 3  # one alone says little of how far two runs can drift apart


class Run(typing.NamedTuple):
    name: str
    setting: Setting
    same_as: str = ""  # the run whose bits it has to repeat
    alone: bool = False  # without Megatron's layers


def settings(sizes, ranks, fuse):
    ep = Setting(**sizes, expert=ranks, changes={"bias_activation_fusion": fuse})
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    deterministic, name = dataclasses.replace(ep, deterministic=True), f"EP{ranks}"
    found = [
        Run(name, ep),
        Run(f"{name}, deterministic", deterministic),
        Run(f"{name}, deterministic again", deterministic, f"{name}, deterministic", True),
        Run(
            f"{name}, deterministic, recompute moe",
            dataclasses.replace(deterministic, changes={**ep.changes, **recompute}),
            f"{name}, deterministic",
        ),
        Run(f"{name}, distributed optimizer", dataclasses.replace(ep, distributed_optimizer=True)),
        Run(f"{name}, bf16 gradients", dataclasses.replace(ep, main_grad=False)),
    ]
    if ranks % 2 == 0:
        more = {"layers": max(sizes["layers"], 4), "micro_batches": 4}
        found += [
            Run("EP1, DP", dataclasses.replace(ep, expert=1)),
            Run("PP2x2", dataclasses.replace(ep, expert=ranks // 2, pipeline=2, virtual=2, **more)),
            Run(f"TP2, EP{ranks}", dataclasses.replace(ep, tensor=2)),
            Run(f"CP2, EP{ranks}", dataclasses.replace(ep, context=2)),
        ]
    return found


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def layer_times(training, setting, repeat):
    """Milliseconds of one MoE layer alone, forward and both ways, on this rank: medians."""
    kind = megatron_training.MoELayer
    layer = next(module for chunk in training.chunks for module in chunk.modules() if isinstance(module, kind))
    tokens = setting.sequence * setting.micro_batch // setting.tensor // setting.context
    x = torch.randn(tokens, 1, setting.hidden, device=training.device).bfloat16().requires_grad_()
    dy = torch.randn(tokens, 1, setting.hidden, device=training.device).bfloat16()
    times = {"forward": [], "both": []}
    with training.chunks[0].no_sync():
        for _ in range(repeat):
            dist.barrier()
            synchronize()
            begin = time.perf_counter()
            y = layer(x)[0]
            synchronize()
            middle = time.perf_counter()
            y.backward(dy)
            synchronize()
            times["forward"].append(1e3 * (middle - begin))
            times["both"].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values[WARM_UP:] or values) for name, values in times.items()}


def run(setting, ours, options):
    with parallelism(setting):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        training = Training(setting, ours)
        for module in moe_experts(training.chunks):
            module.schedule = options.schedule
        losses, times = [], []
        for _ in range(options.steps):
            synchronize()
            begin = time.perf_counter()
            losses.append(training.step())
            synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
        result = {"losses": losses, "step_ms": statistics.median(times[WARM_UP:] or times), "memory_mib": memory}
        if setting.pipeline == 1:
            result["layer_ms"] = layer_times(training, setting, options.repeat)
        result["transport"] = "" if not ours else training.transport()
        del training
    release_memory()
    return result


def release_memory():
    """Of a training that has ended: Megatron's modules and hooks refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(passed, name, text, rank):
    if rank == 0:
        print(f"{'PASS' if passed else 'FAIL'} {name}: {text}", flush=True)
    return passed


def differences(losses, others):
    """Relative, step by step."""
    return [abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True)]


def compare(one, results, spreads, options, rank):
    """Runs a setting both ways and prints what came out; whether it passed."""
    theirs = results[one.same_as]["megatron"] if one.alone else run(one.setting, False, options)
    ours = run(one.setting, True, options)
    setting = one.setting
    layout = setting.tensor, setting.pipeline, setting.context, setting.expert, setting.layers, setting.micro_batches
    if layout not in spreads:
        nudged = (run(dataclasses.replace(setting, nudged=seed), False, options) for seed in range(1, 1 + NUDGES))
        spreads[layout] = max(max(differences(one["losses"], theirs["losses"])) for one in nudged)
    results[one.name] = {"megatron": theirs, "uniep": ours, "spread": spreads[layout]}
    found = differences(ours["losses"], theirs["losses"])
    limit = max(0.005, 2 * spreads[layout])
    falls = ours["losses"][-1] < ours["losses"][0]
    passed = report(
        found[0] <= 0.001 and max(found) <= limit and falls,
        f"{one.name}, losses",
        f"{ours['losses'][0]:.4f} to {ours['losses'][-1]:.4f}, {100 * found[0]:.4f} % from Megatron's in the first "
        f"step (0.1 %), at most {100 * max(found):.3f} % ({100 * limit:.3f} %; Megatron's from its own "
        f"{100 * spreads[layout]:.3f} %)",
        rank,
    )
    if one.same_as:
        before = results[one.same_as]
        same, theirs_same = (
            now["losses"] == before[side]["losses"] for now, side in ((ours, "uniep"), (theirs, "megatron"))
        )
        words = {True: "in every digit", False: "differ"}
        text = f"UniEP's losses of {one.same_as} {words[same]}"
        if not one.alone:
            text += f", Megatron's {words[theirs_same]}"
        passed = report(same or not theirs_same, f"{one.name}, bits", text, rank) and passed
    return passed


def print_table(results):
    print("\nmilliseconds                      | step: Megatron   UniEP ratio | MoE layer, forward: Megatron  UniEP |"
          " both ways: Megatron   UniEP | MiB: Megatron  UniEP | transport")  # fmt: skip
    for name, one in results.items():
        theirs, ours = one["megatron"], one["uniep"]
        columns = [f"{name:33s} | {theirs['step_ms']:14.2f} {ours['step_ms']:7.2f} "
                   f"{theirs['step_ms'] / ours['step_ms']:5.2f}"]  # fmt: skip
        for part, width in (("forward", 28), ("both", 20)):
            pair = [side["layer_ms"][part] if "layer_ms" in side else float("nan") for side in (theirs, ours)]
            columns.append(f"{pair[0]:{width}.3f} {pair[1]:7.3f}")
        columns.append(f"{theirs['memory_mib']:13.0f} {ours['memory_mib']:6.0f} | {ours['transport']}")
        print(" | ".join(columns))


def parse():
    parser = argparse.ArgumentParser()
    sizes = {"hidden": 2048, "intermediate": 768, "experts": 64, "topk": 8, "layers": 4, "heads": 16}
    sizes |= {"vocabulary": 4096, "sequence": 2048, "micro_batch": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=20, help="of a layer alone")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--only", help="names of runs up to their first comma, with commas: EP2,PP2x2")
    parser.add_argument("--fuse", action=argparse.BooleanOptionalAction, help="Megatron's compiled SwiGLU: on GPUs")
    parser.add_argument("--schedule", help="default: comm.reserve_sms=24 on GPUs, else auto")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="hidden 64, 8 experts, sequences of 32")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.fuse = not options.cpu if options.fuse is None else options.fuse
    options.schedule = options.schedule or ("auto" if options.cpu else "comm.reserve_sms=24")
    tiny = {name: getattr(Setting, name) for name in sizes}
    chosen = tiny if options.tiny else {name: getattr(options, name) for name in sizes}
    return options, {**chosen, "learning_rate": options.learning_rate}


def main():
    options, sizes = parse()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not options.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1 if options.cpu else 4)
    dist.init_process_group("gloo" if options.cpu else "nccl", timeout=datetime.timedelta(minutes=3))
    if rank == 0:
        device = "CPU" if options.cpu else torch.cuda.get_device_name()
        print(f"{ranks} x {device}, torch {torch.__version__}, Megatron-core {megatron_training.VERSION}, {sizes}, "
              f"schedule {options.schedule}", flush=True)  # fmt: skip
    failed, results, spreads = [], {}, {}
    runs = settings(sizes, ranks, options.fuse)
    wanted = options.only.split(",") if options.only else [one.name for one in runs]
    runs = [one for one in runs if one.name in wanted or one.name.split(",")[0] in wanted]
    for one in runs:
        try:
            passed = compare(one, results, spreads, options, rank)
        except Exception:
            # The other ranks may be in any collective by now, so nothing more can be run.
            traceback.print_exc()
            report(False, one.name, f"an exception on rank {rank}", 0)
            sys.stdout.flush()
            os._exit(1)
        if not passed:
            failed.append(one.name)
    if rank == 0:
        print_table(results)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file)
        print(f"{len(results) - len(failed)} of {len(results)} runs passed" + "".join(f", not {one}" for one in failed))
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
