"""What searching gains over the built-in default: for each shape `uniep solve` (which times nothing) and `uniep tune` (which measures).

    python3 bench/search_gain.py build/release/uniep [--shapes H,I,E,K/H,I,E,K/...] [--tokens 8192] [--direction forward|backward]
        [--candidates 16] [--budget 6] [--state sustained|paused] [--machine NAME|FILE] [--json FILE]

Times over the default's, of medians in turn on the same inputs: `first`, what the solver would take without measuring, of 64 that
it simulates (- where `uniep tune` did not time it: more --candidates); `best of 8`, the fastest of the default and the best eight
of these; `best`, of all that were measured; `taken`, what `uniep tune` keeps, which is the default where nothing is surely half a
percent faster; `auto`, what `--schedule auto` takes in `uniep run` where nothing was tuned: the best of eight that are simulated,
where enough is predicted of it (a FILE counts as calibrated). The default shapes are the experts of two of eight ranks, of twelve
models that the default was not chosen on. Ranks are the machine's GPUs. What FILE has (records.py) is not measured again.
"""

import argparse
import json
import subprocess

from records import Records, device_name

MODELS = {  # experts of two of eight ranks
    "DeepSeek-V2": "5120,1536,40,6", "DeepSeek-V2-Lite": "2048,1408,16,6", "Mixtral 8x22B": "6144,16384,2,2",
    "gpt-oss-120b": "2880,2880,32,4", "Kimi-K2": "7168,2048,96,8", "GLM-4.5-Air": "4096,1408,32,8", "DBRX": "6144,10752,4,4",
    "Llama-4 Maverick": "5120,8192,32,1", "OLMoE": "2048,1024,16,8", "Qwen3-Next": "2048,512,128,10", "MiniMax-M2": "3072,1536,64,8",
    "Phi-3.5-MoE": "4096,6400,4,2"}
# What has to be predicted before `--schedule auto` takes it: solver_choice.cpp's errors.
LONG, SHORT, SHORT_TOKENS = 0.13, 0.15, 4096
FIRST = 8
SETTINGS = ("tokens", "ranks", "direction", "candidates", "budget", "state", "machine", "cpu")


def report_of(command):
    done = subprocess.run([*command, "--json", "-"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(done.stdout)


def measure(options, shape):
    sizes = ["--shape", shape, "--tokens", str(options.tokens), "--ranks", str(options.ranks), "--machine", options.machine]
    solved = report_of([options.uniep, "solve", *sizes, "--direction", options.direction, "--simulate", "64"])
    command = [options.uniep, "tune", *sizes, "--direction", options.direction, "--candidates", str(options.candidates), "--budget",
               str(options.budget), "--state", options.state]
    if options.cpu:
        command += ["--engine", "cpu"]
    else:
        command += ["--engine", "cuda", "--devices", ",".join(map(str, range(options.ranks)))]
    tuned = next(one for one in report_of(command)["tuned"] if one["direction"] == options.direction)
    ratio_of = lambda schedule: next((tried.get("ratio") for tried in tuned["tried"] if tried["schedule"] == schedule), None)
    fastest = lambda ratios: min([1.0, *(ratio for ratio in ratios if ratio is not None)])
    ratios = [tried.get("ratio") for tried in tuned["tried"]]
    predicted = solved["predicted_ms"] / solved["default_ms"]
    quick = report_of([options.uniep, "solve", *sizes, "--direction", options.direction])  # as `--schedule auto` does
    least = SHORT if options.tokens < SHORT_TOKENS else LONG
    takes = quick["predicted_ms"] < (1 - least) * quick["default_ms"]
    return {"default_ms": tuned["default_ms"], "predicted": predicted,
            "first": ratio_of(solved["schedule"]), "auto": ratio_of(quick["schedule"]) if takes else 1.0, "best of 8": fastest(ratio_of(one["schedule"]) for one in sorted(solved["best"], key=lambda one: one["simulated_ms"])[:FIRST]),
            "best": fastest(ratios), "taken": tuned["ms"] / tuned["default_ms"], "changes": tuned["changes"],
            "measured": sum(ratio is not None for ratio in ratios),
            "wrong": sum(tried["verdict"] == "wrong" for tried in tuned["tried"]),
            "failed": sum(tried["verdict"] == "failed" for tried in tuned["tried"]), "tried": tuned["tried"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--shapes", default="/".join(MODELS.values()), metavar="H,I,E,K/...")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--budget", type=int, default=6, metavar="SECONDS")
    parser.add_argument("--machine", help="default: the library's description of such GPUs")
    parser.add_argument("--state", choices=("sustained", "paused"), default="sustained")
    parser.add_argument("--ranks", type=int, help="default: a rank a GPU")
    parser.add_argument("--cpu", action="store_true", help="on the cpu engine, to try the program")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.cpu:
        if options.ranks is None:
            parser.error("--cpu: needs --ranks")
        options.machine = options.machine or "h200"
    else:
        import torch
        options.ranks = options.ranks or torch.cuda.device_count()
        options.machine = options.machine or ("dgx_h100" if "H100" in torch.cuda.get_device_name() else "h200")
    settings = {name: getattr(options, name) for name in SETTINGS}
    records = Records(options.json, {**settings, "device": None if options.cpu else device_name()})
    columns = ("first", "auto", "best of 8", "best", "taken")
    print(f"{'shape':17s} {'default':>8s} " + " ".join(f"{column:>9s}" for column in columns) + "  measured, failed, wrong; taken")
    for shape in options.shapes.split("/"):
        row = records.find(shape=shape) or records.add(shape=shape, **measure(options, shape))
        print(f"{shape:17s} {row['default_ms']:8.3f} " + " ".join("        -" if row[column] is None else f"{row[column]:9.3f}" for column in columns) +
              f"  {row['measured']}, {row['failed']}, {row['wrong']}; {row['changes']}", flush=True)


if __name__ == "__main__":
    main()
