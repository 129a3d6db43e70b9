"""Markdown tables as README's, of what bench/compare_layers.py --json wrote: TFLOP/s a GPU at the power limit / after pauses (of files
of --warm-up 0), the best of each row in bold. One table for each op, GPUs, launch mode, routing and number of tokens.

    python3 bench/layers_table.py FOLDER/layers_*.jsonl
"""

import argparse
import json

COLUMNS = {"layer": "UniEP", "deepep": "DeepEP + grouped GEMM", "nccl": "NCCL + grouped GEMM", "torch GEMMs": "torch's grouped GEMMs alone"}
MODELS = {"dsv3": "DeepSeek-V3", "qwen3-235b": "Qwen3-235B", "qwen3-30b": "Qwen3-30B", "mixtral": "Mixtral"}
TABLE = ("op", "gpus", "device", "launch", "routing", "tokens", "wgrad", "schedule", "schedule_backward")
LAYERS = ("layer", "deepep", "nccl")  # the best of these


def rates(record):
    """TFLOP/s by column."""
    if record is None:
        return {}
    return {name: record["tflops"] * record["ms"]["layer"] / ms for name, ms in record["ms"].items()}


def cell(name, both):
    texts = []
    for one in both:
        best = max((one[layer] for layer in LAYERS if layer in one), default=None)
        text = f"{one[name]:.0f}" if name in one else "-"
        texts.append(f"**{text}**" if name in one and one[name] == best else text)
    return " / ".join(texts)


def table(records):
    first = records[0]
    dates = sorted({record["date"] for record in records})
    what = [f"{first['op'].capitalize()}, {first['gpus']} x {first['device']}, {first['launch']}, T {first['tokens']}",
            f"{first['routing'] or 'uniform'} routing", " to ".join(dict.fromkeys((dates[0], dates[-1])))]
    what += [f"{name} {first[name]}" for name in ("schedule", "schedule_backward") if first[name]]
    what += [f"weight gradients {first['wgrad']}"] if first["wgrad"] != "bf16" else []
    lines = [", ".join(what) + ":", "", "| model | " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for shape in dict.fromkeys(record["shape"] for record in records):
        own = [record for record in records if record["shape"] == shape]
        both = [rates(next((record for record in own if (record["warm_up"] > 0) == at_limit), None)) for at_limit in (True, False)]
        lines.append(f"| {MODELS.get(shape, shape)} | " + " | ".join(cell(name, both) for name in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", metavar="FILE")
    options = parser.parse_args()
    tables = {}
    for name in options.files:
        with open(name) as file:
            for record in map(json.loads, file):
                tables.setdefault(tuple(record[key] for key in TABLE), []).append(record)
    for records in tables.values():
        print(table(records))


if __name__ == "__main__":
    main()
